import dataclasses

import pytest

from loops_cookbook.errors import ModelError
from loops_cookbook.renderers.chat_template import ChatTemplateRenderer


def stops(renderer, tokenizer):
    return [tokenizer.text_of(i) for i in renderer.stop_token_ids]


@pytest.mark.parametrize(
    ("template", "close"),
    [
        ("chatml", "<|im_end|>"),
        ("headers", "<|eot|>"),
        ("brackets", "<|im_end|>"),
        ("unclosed", "<|user|>"),
        ("parts", "<|im_end|>"),
        ("keeps_reasoning", "<|im_end|>"),
    ],
)
def test_the_token_that_closes_a_reply_is_found_and_turns_extend(make_tokenizer, template, close):
    tokenizer = make_tokenizer(template)
    renderer = ChatTemplateRenderer(tokenizer)

    assert stops(renderer, tokenizer)[0] == close
    assert renderer.why_not_extended is None


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("rewrites", "the template rewrites earlier turns"),
        ("forgets_reasoning", "the template drops the reasoning of earlier turns"),
        ("opens_reasoning", "the template drops the reasoning of earlier turns"),
        ("plain", "a reply ends in no token of its own"),
    ],
)
def test_a_template_that_cannot_be_extended_says_why_and_renders(make_tokenizer, template, why):
    renderer = ChatTemplateRenderer(make_tokenizer(template))

    assert renderer.why_not_extended == why
    assert "hello" in renderer.decode(renderer.render([{"role": "user", "content": "hello"}]))


@pytest.mark.parametrize("template", ["forgets_reasoning", "opens_reasoning"])
def test_reasoning_that_shall_be_kept_lets_turns_extend(make_tokenizer, template):
    renderer = ChatTemplateRenderer(make_tokenizer(template), thinking_retention="all")

    assert renderer.why_not_extended is None


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
            "{{ messages[0].content }}<|im_end|>",
            "the template refuses a conversation of several turns",
        ),
        (
            "{% for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}answer:{% endif %}",
            "the template writes a past reply in another way than it asks for one",
        ),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>"
            "{% endfor %}{% if add_generation_prompt %}assistant{% endif %}",
            "the template rewrites earlier turns",
        ),
        (
            "{% for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}{% if messages[0].role == 'system' and messages | length"
            " > 2 %}Remember: {{ messages[0].content }}{% endif %}assistant{% endif %}",
            "the template rewrites earlier turns",
        ),
    ],
)
def test_other_ways_of_not_extending_are_told_apart(make_tokenizer, source, why):
    tokenizer = dataclasses.replace(make_tokenizer(), template=source)

    assert ChatTemplateRenderer(tokenizer).why_not_extended == why


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content.missing.field }}", "Hello.", "{{ raise_exception('never') }}"],
)
def test_a_template_that_does_not_even_render_is_refused(make_tokenizer, source):
    tokenizer = dataclasses.replace(make_tokenizer(), template=source)

    with pytest.raises(ModelError, match="models/chatml cannot render a user's message"):
        ChatTemplateRenderer(tokenizer)


def test_a_declared_end_that_the_template_opens_messages_with_is_no_stop_token(make_tokenizer):
    """SmolLM2's GGUF names `<|im_start|>` as the end of text; replies stopped at nothing else."""
    tokenizer = make_tokenizer(eos="<|im_start|>")

    assert stops(ChatTemplateRenderer(tokenizer), tokenizer) == ["<|im_end|>"]


def test_an_end_that_only_begins_the_whole_text_is_still_a_stop_token(make_tokenizer):
    tokenizer = make_tokenizer("headers", eos="<|begin|>")

    assert stops(ChatTemplateRenderer(tokenizer), tokenizer) == ["<|eot|>", "<|begin|>"]


def test_without_a_close_token_the_declared_ends_stop_a_reply(make_tokenizer):
    tokenizer = make_tokenizer("plain")

    assert stops(ChatTemplateRenderer(tokenizer), tokenizer) == ["<|im_end|>"]
