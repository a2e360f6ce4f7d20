"""Tools in a probed chat template: declared, called, answered, and extended by the answers."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.renderers.chat_template import ChatTemplateRenderer
from loops_cookbook.renderers.tool_calls import Bare, Listed, Marked
from loops_cookbook.tokens import ids_of

TEMPLATES = Path(__file__).parent / "templates"
MARKS = (
    "<|tool_call|>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASK = {"role": "user", "content": "Is it warm?"}

# No marks of a chat by chance, and nothing that a template would trim.
words = st.text('abc"\\{}é\n', min_size=1, max_size=8).map(lambda text: f"a{text}z")


@pytest.fixture(scope="module", params=[(), MARKS], ids=["marks are text", "marks are tokens"])
def make_renderer(make_tokenizer, request):
    made = {}

    def make(template, **options):
        key = (template, *options.items())
        if key not in made:
            made[key] = ChatTemplateRenderer(
                make_tokenizer(template, more=request.param), **options
            )
        return made[key]

    return make


def ids(renderer, text):
    return ids_of(renderer._tokenizer.encode(text))


def said(template, content, *calls):
    """A reply that calls the tool, as a model of this format would write it."""
    if template in ("listed", "open_calls"):
        items = ", ".join(
            f'{{"name": "weather", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'
            for arguments in calls
        )
        mark = "[TOOL_CALLS] " if template == "listed" else "<|tool_call|>"
        return f"{content}{mark}[{items}]"
    if template == "bare":
        [arguments] = calls
        return f'{{"name": "weather", "parameters": {json.dumps(arguments, ensure_ascii=False)}}}'
    bodies = []
    for arguments in calls:
        if template == "xml_tools":
            lines = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
            bodies.append(f"<function=weather>\n{lines}</function>")
        else:
            text = json.dumps(arguments, ensure_ascii=False)
            bodies.append(f'{{"name": "weather", "arguments": {text}}}')
    blocks = [f"<tool_call>\n{body}\n</tool_call>" for body in bodies]
    return "\n".join([content, *blocks] if content else blocks)


def message(renderer, sampled):
    """The reply as `Conversation` gives it to the agent."""
    reply = renderer.parse(sampled, [WEATHER])
    made = {"role": "assistant", "content": reply.content or ""}
    if reply.reasoning_content is not None:
        made["reasoning_content"] = reply.reasoning_content
    return made | {"tool_calls": [call.as_message_part() for call in reply.tool_calls]}


def results(reply, *contents):
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": content}
        for call, content in zip(reply["tool_calls"], contents, strict=True)
    ]


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("hermes", Marked("<tool_call>", "</tool_call>")),
        ("tool_cycle", Marked("<tool_call>", "</tool_call>")),
        ("xml_tools", Marked("<tool_call>", "</tool_call>")),
        ("listed", Listed()),
        ("bare", Bare()),
        ("open_calls", Marked("<|tool_call|>", "")),
    ],
)
def test_the_form_of_calls_is_found_and_their_results_extend(make_renderer, template, dialect):
    renderer = make_renderer(template)

    assert renderer._tools.dialect == dialect
    assert renderer.why_no_tools is None
    assert renderer.extends_results
    assert '"weather"' in renderer.decode(renderer.render([ASK], [WEATHER]))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("chatml", "the chat template does not show the model any tools"),
        ("odd_calls", "the chat template writes calls of tools in a form that is not read here"),
        ("no_results", "the chat template does not show the model what a tool gave back"),
    ],
)
def test_a_template_that_cannot_speak_of_tools_says_why_and_refuses_them(
    make_renderer, template, why
):
    renderer = make_renderer(template)

    assert renderer.why_no_tools == why
    assert not renderer.extends_results
    with pytest.raises(ValueError, match=why):
        renderer.render([ASK], [WEATHER])
    with pytest.raises(ValueError, match=why):
        renderer.extend(renderer.render([ASK]), ids(renderer, "a"), [ASK], [WEATHER])
    assert np.array_equal(renderer.render([ASK], []), renderer.render([ASK]))


@pytest.mark.parametrize("template", ["hermes", "tool_cycle", "xml_tools", "bare", "open_calls"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_results_extend_to_what_rendering_gives(make_renderer, template, data):
    """B3, B4: several rounds of calls, each extended; the template is append-only here."""
    renderer = make_renderer(template)
    messages = [ASK]
    prompt = renderer.render(messages, [WEATHER])
    for _ in range(data.draw(st.integers(1, 3))):
        several = 1 if template == "bare" else data.draw(st.integers(1, 2))
        content = "" if template == "bare" else data.draw(st.sampled_from(["", "Let me see."]))
        cities = [{"city": data.draw(words)} for _ in range(several)]
        close = data.draw(st.sampled_from([(), renderer.stop_token_ids[:1]]))
        sampled = ids_of([*ids(renderer, said(template, content, *cities)), *close])
        reply = message(renderer, sampled)
        assert [json.loads(c["function"]["arguments"]) for c in reply["tool_calls"]] == cities
        new = results(reply, *(data.draw(words) for _ in cities))
        extended = renderer.extend(prompt, sampled, new, [WEATHER])
        messages += [reply, *new]
        assert extended is not None
        assert np.array_equal(extended, renderer.render(messages, [WEATHER]))
        prompt = extended


def test_results_that_name_their_calls_extend_by_the_ids_of_the_reply(make_renderer):
    """Mistral's format writes the id of the call beside each result."""
    renderer = make_renderer("listed")
    prompt = renderer.render([ASK], [WEATHER])
    text = said("listed", "", {"city": "Oslo"}, {"city": "Rome"})
    sampled = ids_of([*ids(renderer, text), *renderer.stop_token_ids[:1]])
    reply = message(renderer, sampled)
    extended = renderer.extend(prompt, sampled, results(reply, "cold", "warm"), [WEATHER])

    first, second = (call["id"] for call in reply["tool_calls"])
    assert renderer.decode(extended[len(prompt) + len(sampled) :]) == (
        f'[TOOL_RESULTS] {{"content": "cold", "call_id": "{first}"}}[/TOOL_RESULTS]'
        f'[TOOL_RESULTS] {{"content": "warm", "call_id": "{second}"}}[/TOOL_RESULTS]'
    )


def test_the_results_of_several_calls_extend_where_a_template_writes_only_one(make_renderer):
    """Llama 3.1's refuses a past reply of two calls: the attempt failed, for what a model said."""
    renderer = make_renderer("bare")
    prompt = renderer.render([ASK], [WEATHER])
    text = "; ".join(said("bare", "", {"city": city}) for city in ("Oslo", "Rome"))
    sampled = ids_of([*ids(renderer, text), *renderer.stop_token_ids[:1]])
    reply = message(renderer, sampled)
    extended = renderer.extend(prompt, sampled, results(reply, "cold", "warm"), [WEATHER])

    assert len(reply["tool_calls"]) == 2
    head = "<|start|>{}<|end|>\n\n"
    assert renderer.decode(extended[len(prompt) + len(sampled) :]) == (
        f'{head.format("ipython")}"cold"<|eot|>{head.format("ipython")}"warm"<|eot|>'
        f"{head.format('assistant')}"
    )


@pytest.mark.parametrize("template", ["hermes", "xml_tools"])
def test_a_user_may_speak_after_results(make_renderer, template):
    renderer = make_renderer(template)
    prompt = renderer.render([ASK], [WEATHER])
    sampled = ids(renderer, said(template, "", {"city": "Oslo"}))
    reply = message(renderer, sampled)
    new = [*results(reply, "warm"), {"role": "user", "content": "And now?"}]
    extended = renderer.extend(prompt, sampled, new, [WEATHER])

    assert np.array_equal(extended, renderer.render([ASK, reply, *new], [WEATHER]))


def test_a_declaration_that_moves_to_the_last_user_is_rendered_anew(make_renderer):
    """Mistral's format declares tools before the last message of a user."""
    renderer = make_renderer("listed")
    prompt = renderer.render([ASK], [WEATHER])
    plain = ids(renderer, " No.")

    assert renderer.extend(prompt, plain, [ASK], [WEATHER]) is None
    assert renderer.extend(renderer.render([ASK]), plain, [ASK]) is not None


def test_a_token_that_closes_replies_with_calls_alone_is_a_stop_token_too(make_renderer):
    renderer = make_renderer("two_ends")
    prompt = renderer.render([ASK], [WEATHER])
    sampled = ids(renderer, said("two_ends", "", {"city": "Oslo"}) + "<|eot|>")
    reply = message(renderer, sampled)
    new = results(reply, "warm")
    extended = renderer.extend(prompt, sampled, new, [WEATHER])

    assert [renderer.decode(ids_of([i])) for i in renderer.stop_token_ids] == [
        "<|im_end|>",
        "<|eot|>",
    ]
    assert np.array_equal(extended, renderer.render([ASK, reply, *new], [WEATHER]))
    assert renderer.extend(prompt, sampled, [ASK], [WEATHER]) is None


def test_reasoning_that_the_prompt_opens_is_kept_among_results(make_tokenizer):
    template = (TEMPLATES / "tool_cycle.jinja").read_text()
    opening = template.replace(
        "assistant\\n' }}\n{%- endif", "assistant\\n<think>\\n' }}\n{%- endif"
    )
    assert opening != template
    renderer = ChatTemplateRenderer(dataclasses.replace(make_tokenizer(), template=opening))
    prompt = renderer.render([ASK], [WEATHER])
    text = "Hm.\n</think>\n\n" + said("tool_cycle", "", {"city": "Oslo"}) + "<|im_end|>"
    sampled = ids(renderer, text)
    reply = message(renderer, sampled)
    new = results(reply, "warm")

    assert reply["reasoning_content"] == "Hm."
    assert np.array_equal(
        renderer.extend(prompt, sampled, new, [WEATHER]),
        renderer.render([ASK, reply, *new], [WEATHER]),
    )


def test_reasoning_is_kept_until_a_user_speaks_again(make_renderer):
    """B8: such a template drops earlier reasoning, but not within a round of calls."""
    renderer = make_renderer("tool_cycle")
    prompt = renderer.render([ASK], [WEATHER])
    text = "<think>\nHm.\n</think>\n\n" + said("tool_cycle", "", {"city": "Oslo"})
    sampled = ids_of([*ids(renderer, text), *renderer.stop_token_ids[:1]])
    reply = message(renderer, sampled)
    new = results(reply, "warm")
    extended = renderer.extend(prompt, sampled, new, [WEATHER])

    assert reply["reasoning_content"] == "Hm."
    assert np.array_equal(extended, renderer.render([ASK, reply, *new], [WEATHER]))
    assert renderer.extend(prompt, sampled, [*new, ASK], [WEATHER]) is None
    assert renderer.why_not_extended == "the template drops the reasoning of earlier turns"


def test_reasoning_that_shall_be_kept_extends_past_a_user_too(make_renderer):
    renderer = make_renderer("tool_cycle", thinking_retention="all")
    prompt = renderer.render([ASK], [WEATHER])
    text = "<think>\nHm.\n</think>\n\n" + said("tool_cycle", "", {"city": "Oslo"})
    sampled = ids_of([*ids(renderer, text), *renderer.stop_token_ids[:1]])
    new = [*results(message(renderer, sampled), "warm"), ASK]
    extended = renderer.extend(prompt, sampled, new, [WEATHER])

    recorded = np.concatenate([prompt, sampled])
    assert np.array_equal(extended[: len(recorded)], recorded)


def test_nothing_sampled_is_closed_and_extended(make_renderer):
    renderer = make_renderer("hermes")
    prompt = renderer.render([ASK], [WEATHER])
    extended = renderer.extend(prompt, ids_of([]), [ASK], [WEATHER])

    assert renderer.decode(extended[len(prompt) :]).startswith("<|im_end|>\n<|im_start|>user")


def test_calls_within_reasoning_are_no_calls(make_renderer):
    renderer = make_renderer("tool_cycle")
    draft = said("tool_cycle", "", {"city": "Oslo"})
    reply = renderer.parse(ids(renderer, f"<think>\n{draft}\n</think>\n\nYes."), [WEATHER])

    assert (reply.content, reply.tool_calls, reply.malformed_tool_calls) == ("Yes.", (), ())


def test_calls_are_read_only_where_tools_are_declared(make_renderer):
    """An agent may describe tools in its own words, and read the text itself."""
    renderer = make_renderer("hermes")
    text = said("hermes", "", {"city": "Oslo"})

    assert renderer.parse(ids(renderer, text)).content == text
    assert renderer.parse(ids(renderer, text), [WEATHER]).content is None


def test_a_broken_call_beside_a_good_one_is_reported_and_its_tokens_are_kept(make_renderer):
    """B12: one malformed call turned the whole reply into text."""
    renderer = make_renderer("hermes")
    prompt = renderer.render([ASK], [WEATHER])
    good = said("hermes", "", {"city": "Oslo"})
    sampled = ids(renderer, f"{good}\n<tool_call>\n{{oops\n</tool_call><|im_end|>")
    parsed = renderer.parse(sampled, [WEATHER])
    reply = message(renderer, sampled)
    extended = renderer.extend(prompt, sampled, results(reply, "warm"), [WEATHER])

    assert [call.name for call in parsed.tool_calls] == ["weather"]
    assert [bad.problem for bad in parsed.malformed_tool_calls] == ["the call is not JSON"]
    assert "oops" in renderer.decode(extended)


def test_a_reply_with_nothing_but_a_broken_call_can_be_answered_by_a_user(make_renderer):
    renderer = make_renderer("hermes")
    prompt = renderer.render([ASK], [WEATHER])
    sampled = ids(renderer, "<tool_call>\n{oops\n</tool_call><|im_end|>")
    extended = renderer.extend(prompt, sampled, [{"role": "user", "content": "No."}], [WEATHER])

    assert renderer.decode(extended[len(prompt) :]).startswith(
        "<tool_call>\n{oops\n</tool_call><|im_end|>\n<|im_start|>user\nNo."
    )
