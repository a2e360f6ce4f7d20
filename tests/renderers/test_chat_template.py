"""The laws of `extend`: it begins with what was recorded, and it is what rendering would give."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.errors import ModelError
from loops_cookbook.renderers.chat_template import ChatTemplateRenderer
from loops_cookbook.tokens import ids_of

EXTENDING = (
    "chatml", "headers", "brackets", "unclosed", "parts", "keeps_reasoning", "merged_system",
    "hermes", "xml_tools", "bare", "listed", "open_calls",
)  # fmt: skip

# Surrogates have no UTF-8. A backslash keeps Hypothesis from writing marks of a chat by chance.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<["), max_size=20)
replies = texts | st.sampled_from(["hello", "hello there", "  hell", "ll\n\n"])


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def joined(*parts):
    return ids_of(np.concatenate(parts))


@pytest.fixture(scope="module")
def make_renderer(make_tokenizer):
    renderers = {}

    def make(template="chatml", *, more=(), **options):
        key = (template, more, *options.items())
        if key not in renderers:
            renderers[key] = ChatTemplateRenderer(make_tokenizer(template, more=more), **options)
        return renderers[key]

    return make


@pytest.fixture(scope="module")
def sample(make_tokenizer):
    """Ids of a reply as a model may sample it: any spelling, closed or cut."""
    tokenizer = make_tokenizer()

    def sample(text, close=(), *, by_letter=False):
        pieces = text if by_letter else [text]
        return ids_of([i for piece in pieces for i in tokenizer.encode(piece)] + list(close))

    return sample


@pytest.mark.parametrize("template", EXTENDING)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_extended_prompt_begins_with_what_was_recorded(make_renderer, sample, template, data):
    """Whatever was sampled: canonical or not, closed, cut, empty, or ended by another token."""
    renderer = make_renderer(template)
    prompt = renderer.render([user(data.draw(texts))])
    for _ in range(data.draw(st.integers(1, 3))):
        close = data.draw(
            st.sampled_from([(), renderer.stop_token_ids[:1], renderer.stop_token_ids[-1:]])
        )
        sampled = sample(data.draw(replies), close, by_letter=data.draw(st.booleans()))
        extended = renderer.extend(prompt, sampled, [user(data.draw(texts))])
        assert extended is not None
        recorded = joined(prompt, sampled)
        assert np.array_equal(extended[: len(recorded)], recorded)
        assert len(extended) > len(recorded)
        prompt = extended


@pytest.mark.parametrize("template", EXTENDING)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_extending_by_a_canonical_reply_is_rendering_anew(make_renderer, sample, template, data):
    """B3: a template's text after the stop token was lost, or trained.

    White space around a reply is left out: some templates trim it from a past reply.
    """
    renderer = make_renderer(template)
    messages = [user(data.draw(texts))]
    prompt = renderer.render(messages)
    space = " " if template in ("brackets", "listed") else ""
    for _ in range(data.draw(st.integers(1, 3))):
        reply = data.draw(replies).strip()
        close = data.draw(st.sampled_from([(), renderer.stop_token_ids[:1]]))
        new = [user(data.draw(texts))]
        extended = renderer.extend(prompt, sample(space + reply, close), new)
        messages += [assistant(reply), *new]
        assert extended is not None
        assert np.array_equal(extended, renderer.render(messages))
        prompt = extended


def test_a_reply_spelt_in_another_way_is_kept_as_it_was_sampled(make_renderer, sample):
    renderer = make_renderer()
    prompt, new = renderer.render([user("hi")]), [user("go on")]
    odd = sample("hello", renderer.stop_token_ids, by_letter=True)

    extended = renderer.extend(prompt, odd, new)
    anew = renderer.render([user("hi"), assistant("hello"), *new])
    assert renderer.decode(extended) == renderer.decode(anew)
    assert not np.array_equal(extended, anew)


def test_a_reply_that_was_cut_is_closed_as_context(make_renderer, sample):
    renderer = make_renderer()
    prompt = renderer.render([user("hi")])

    extended = renderer.extend(prompt, sample("hel"), [user("go on")])
    assert renderer.decode(extended[len(prompt) :]) == (
        "hel<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_reply_that_the_model_ended_by_its_own_end_of_text_is_closed_too(make_tokenizer, sample):
    """B9: a base model ends in its own way; such replies ran on, or were all called broken."""
    tokenizer = make_tokenizer(eos="<|endoftext|>")
    renderer = ChatTemplateRenderer(tokenizer)
    end = tokenizer.id_of("<|endoftext|>")
    prompt = renderer.render([user("hi")])

    extended = renderer.extend(prompt, sample("no", [end]), [user("go on")])
    assert renderer.decode(extended[len(prompt) :]).startswith("no<|endoftext|><|im_end|>\n")
    assert renderer.stop_token_ids == (tokenizer.id_of("<|im_end|>"), end)


def test_messages_of_several_roles_can_follow_a_reply(make_renderer, sample):
    renderer = make_renderer()
    prompt = renderer.render([user("hi")])
    new = [{"role": "tool", "content": "42"}, user("so?")]
    extended = renderer.extend(prompt, sample("hello", renderer.stop_token_ids), new)

    assert np.array_equal(extended, renderer.render([user("hi"), assistant("hello"), *new]))


def test_a_reply_can_be_asked_for_twice_without_a_message_between(make_renderer, sample):
    renderer = make_renderer()
    prompt = renderer.render([user("hi")])
    extended = renderer.extend(prompt, sample("hello", renderer.stop_token_ids), [])

    assert np.array_equal(extended, renderer.render([user("hi"), assistant("hello")]))


@pytest.mark.parametrize(
    ("template", "new"),
    [
        pytest.param("chatml", [user("a"), assistant("b"), user("c")], id="a reply among them"),
        pytest.param("brackets", [user("a"), user("b")], id="refused by the template"),
        pytest.param("rewrites", [user("a")], id="a template that rewrites"),
    ],
)
def test_what_cannot_be_extended_is_left_to_rendering(make_renderer, sample, template, new):
    renderer = make_renderer(template)
    prompt = renderer.render([user("hi")])

    assert renderer.extend(prompt, sample("hello", renderer.stop_token_ids), new) is None


def test_a_reply_ended_for_one_role_is_not_extended_by_another(make_renderer, sample):
    """A template without a close token ends a reply by the mark of whoever speaks next."""
    renderer = make_renderer("unclosed")
    prompt = renderer.render([user("hi")])
    ended_for_user = sample("hello", renderer.stop_token_ids[:1])

    assert renderer.extend(prompt, ended_for_user, [{"role": "system", "content": "a"}]) is None
    assert (
        renderer.extend(prompt, sample("hello"), [{"role": "system", "content": "a"}]) is not None
    )


def test_reasoning_that_the_template_drops_is_not_extended_unless_it_shall_be_kept(
    make_renderer, sample
):
    reply = sample("<think>\nhm\n</think>\n\nyes", make_renderer().stop_token_ids)
    as_template = make_renderer("forgets_reasoning")
    kept = make_renderer("forgets_reasoning", thinking_retention="all")
    prompt = kept.render([user("hi")])

    assert as_template.extend(prompt, reply, [user("go on")]) is None
    extended = kept.extend(prompt, reply, [user("go on")])
    assert np.array_equal(extended[: len(prompt) + len(reply)], joined(prompt, reply))


def test_reasoning_that_the_template_keeps_extends_and_is_what_rendering_gives(
    make_renderer, sample
):
    renderer = make_renderer("keeps_reasoning")
    prompt = renderer.render([user("hi")])
    reply = sample("<think>\nhm\n</think>\n\nyes", renderer.stop_token_ids)
    extended = renderer.extend(prompt, reply, [user("go on")])

    said = {**assistant("yes"), "reasoning_content": "hm"}
    assert np.array_equal(extended, renderer.render([user("hi"), said, user("go on")]))


def test_a_reply_cut_within_its_reasoning_is_not_extended(make_renderer, sample):
    renderer = make_renderer("keeps_reasoning")
    prompt = renderer.render([user("hi")])

    assert renderer.extend(prompt, sample("<think>\nhm"), [user("go on")]) is None


def test_where_the_tokenizer_alone_knows_reasoning_only_replies_with_it_are_not_extended(
    make_renderer, sample, make_tokenizer
):
    marks = ("<think>", "</think>")
    renderer = make_renderer(more=marks)
    tokenizer = make_tokenizer(more=marks)
    prompt = renderer.render([user("hi")])
    reasoned = ids_of(tokenizer.encode("<think>hm</think>yes<|im_end|>"))

    assert renderer.why_not_extended is None
    assert renderer.extend(prompt, sample("yes", renderer.stop_token_ids), [user("a")]) is not None
    assert renderer.extend(prompt, reasoned, [user("a")]) is None


@pytest.mark.parametrize(
    ("template", "said", "content", "reasoning"),
    [
        ("chatml", " hello\n<|im_end|>", " hello\n", None),
        ("chatml", "hel", "hel", None),
        ("chatml", "<|im_end|>", "", None),
        ("chatml", "yes<|im_end|>junk", "yes", None),
        ("chatml", "<think>a</think>b<|im_end|>", "<think>a</think>b", None),
        ("keeps_reasoning", "<think>\na\n</think>\n\nb<|im_end|>", "b", "a"),
        ("keeps_reasoning", "<think></think>b<|im_end|>", "b", ""),
        ("keeps_reasoning", "<think>a", "", "a"),
        ("keeps_reasoning", "b <think>a</think><|im_end|>", "b <think>a</think>", None),
        ("opens_reasoning", "a\n</think>\n\nb<|im_end|>", "b", "a"),
        ("opens_reasoning", "<think>a</think>b<|im_end|>", "b", "a"),
        ("opens_reasoning", "a", "", "a"),
    ],
)
def test_a_reply_is_read_up_to_its_stop_token_and_its_reasoning_apart(
    make_renderer, sample, template, said, content, reasoning
):
    parsed = make_renderer(template).parse(sample(said))

    assert (parsed.content, parsed.reasoning_content) == (content, reasoning)
    assert parsed.tool_calls == ()


def test_a_prompt_is_what_the_template_writes(make_renderer, make_tokenizer):
    renderer = make_renderer()
    text = (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )

    prompt = renderer.render([{"role": "system", "content": "s"}, user("hello")])
    assert prompt.tolist() == make_tokenizer().encode(text)
    assert renderer.decode(prompt) == text


@settings(max_examples=40, deadline=None)
@given(first=texts, second=texts)
def test_what_differs_only_in_white_space_is_not_taken_for_the_same(make_renderer, first, second):
    renderer = make_renderer()
    prompts = [renderer.render([user(text)]) for text in (first, second, first + " ")]

    assert np.array_equal(prompts[0], prompts[1]) == (first == second)
    assert not np.array_equal(prompts[0], prompts[2])


def test_a_group_renders_its_prompt_once_and_nobody_can_change_it(make_renderer):
    renderer = make_renderer()
    first, again = (renderer.render([user("the same")]) for _ in range(2))

    assert again is first
    assert not first.flags.writeable


@pytest.mark.parametrize(
    "content", ["ab", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]]
)
@pytest.mark.parametrize("template", ["chatml", "parts"])
def test_content_may_be_a_string_or_text_parts_whatever_the_template_takes(
    make_renderer, template, content
):
    renderer = make_renderer(template)

    assert "user\nab<|im_end|>" in renderer.decode(renderer.render([user(content)]))


def test_fields_that_are_none_are_absent(make_renderer):
    renderer = make_renderer("keeps_reasoning")
    messages = [user("a"), {**assistant("b"), "reasoning_content": None, "tool_calls": None}]

    assert np.array_equal(renderer.render(messages), renderer.render([user("a"), assistant("b")]))


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"role": "user", "content": [{"type": "image_url"}]}], "must be text here"),
        ([{"role": "user", "content": "a", "more": {1, 2}}], "must be plain JSON"),
        ([{"role": "user"}], "refuses these messages"),
    ],
)
def test_messages_that_the_format_cannot_express_are_refused(make_renderer, messages, problem):
    with pytest.raises(ValueError, match=problem):
        make_renderer().render(messages)


def test_it_says_what_it_is_and_how_it_was_chosen(make_renderer, make_tokenizer):
    assert make_renderer().name == "ChatTemplateRenderer"
    assert make_renderer().chosen == "probed from the chat template of models/chatml"
    assert ChatTemplateRenderer(make_tokenizer(), chosen="set").chosen == "set"


def test_a_tokenizer_without_a_chat_template_is_refused(make_tokenizer):
    with pytest.raises(ModelError, match=r"has no chat template: add a chat_template\.jinja"):
        ChatTemplateRenderer(make_tokenizer(None))
