"""The forms of tool calls, read back from text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.renderers.tool_calls import (
    Bare,
    Dialect,
    Listed,
    Marked,
    call_id,
    dialect_of,
    end_of_calls,
    read_calls,
)
from loops_cookbook.tokens import ids_of

HERMES = Marked("<tool_call>", "</tool_call>")
IDS = ids_of([1, 2, 3])
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


def call(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def read(dialect: Dialect, text: str, tools: list[dict[str, object]] | None = None):
    said = read_calls(dialect, text, tools or [], IDS)
    calls = [(one.name, dict(one.arguments)) for one in said.calls]
    return said.content, calls, [(bad.problem, bad.raw) for bad in said.malformed]


def tool(name: str, **types: str) -> dict[str, object]:
    properties = {key: {"type": declared} for key, declared in types.items()}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"properties": properties}},
    }


def test_two_calls_are_read_in_order_and_the_text_around_them_is_kept() -> None:
    """B12: a second call, or the words between two, were lost."""
    text = f"First.\n{hermes(call('a', x=1))}\nThen.\n{hermes(call('b'))} Done."
    assert read(HERMES, text) == ("First.\nThen.\nDone.", [("a", {"x": 1}), ("b", {})], [])


def test_a_second_call_that_cannot_be_read_does_not_lose_the_first() -> None:
    """B12: one malformed block turned the whole reply into text."""
    text = hermes(call("a"), "{oops", call("c"))
    content, calls, malformed = read(HERMES, text)
    assert content is None
    assert calls == [("a", {}), ("c", {})]
    assert malformed == [("the call is not JSON", "<tool_call>\n{oops\n</tool_call>")]


@pytest.mark.parametrize(
    ("dialect", "text", "problem"),
    [
        (HERMES, "<tool_call>{", "the call is not closed"),
        (HERMES, hermes('{"name": 3}'), "the call names no tool"),
        (HERMES, hermes("[1]"), "the call names no tool"),
        (HERMES, hermes('{"name": "a", "arguments": [1]}'), "the arguments are not an object"),
        (HERMES, hermes('{"name": "a", "arguments": "x"}'), "the arguments are not an object"),
        (HERMES, hermes("<function=></function>"), "the call names no tool"),
        (HERMES, hermes("<function=a><parameter=x>1</function>"), "a parameter is not closed"),
        (HERMES, hermes("[" * 100_000), "the call is not JSON"),
        (Listed(), "[TOOL_CALLS]", "the call is not JSON"),
        (Listed(), '[TOOL_CALLS][{"name": "a"', "the call is not JSON"),
        (Listed(), "[TOOL_CALLS]a[ARGS]{", "the call is not JSON"),
        (Bare(), '{"name": "a", "parameters": {', "the call is not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why_and_keeps_its_text(
    dialect: Dialect, text: str, problem: str
) -> None:
    content, calls, malformed = read(dialect, text)
    assert (content, calls) == (None, [])
    assert malformed == [(problem, text)]


def test_an_unclosed_block_ends_where_the_next_one_opens() -> None:
    content, calls, malformed = read(HERMES, f"<tool_call>{call('a')}\n{hermes(call('b'))}")
    assert (content, calls) == (None, [("b", {})])
    assert [problem for problem, _ in malformed] == ["the call is not closed"]


def test_marks_within_an_argument_are_text() -> None:
    text = "a </tool_call> and a <tool_call>"
    assert read(HERMES, hermes(call("say", text=text))) == (None, [("say", {"text": text})], [])


@pytest.mark.parametrize(
    ("dialect", "text", "calls"),
    [
        (HERMES, hermes(f"[{call('a')}, {call('b', x=1)}]"), [("a", {}), ("b", {"x": 1})]),
        (HERMES, hermes('{"name": "a", "arguments": "{\\"x\\": 1}"}'), [("a", {"x": 1})]),
        (HERMES, hermes('{"type": "function", "function": {"name": "a"}}'), [("a", {})]),
        (Listed(), f"[TOOL_CALLS] [{call('a')}, {call('b')}]", [("a", {}), ("b", {})]),
        (
            Listed(),
            '[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[ARGS]{}',
            [("a", {"x": 1}), ("b", {})],
        ),
        (Bare(), '{"name": "a", "parameters": {"x": 1}}', [("a", {"x": 1})]),
        (Bare(), f"<|python_tag|>{call('a')}; {call('b')}", [("a", {}), ("b", {})]),
    ],
)
def test_each_form_is_read(
    dialect: Dialect, text: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    assert read(dialect, text) == (None, calls, [])


def test_a_list_whose_second_call_is_broken_keeps_the_first() -> None:
    _, calls, malformed = read(Listed(), f"[TOOL_CALLS][{call('a')}, {{oops]")
    assert calls == [("a", {})]
    assert malformed == [("the call is not JSON", "{oops]")]


@pytest.mark.parametrize("text", ['{"answer": 5}', '{"name": "Bob"}', "{", "", " words\n"])
def test_an_answer_that_is_no_call_is_left_as_it_is(text: str) -> None:
    assert read(Bare(), text) == (text, [], [])


def test_parameters_in_xml_are_read_by_their_declared_types() -> None:
    declared = [tool("weather", city="string", days="string")]
    assert read(HERMES, XML) == (None, [("weather", {"city": "Oslo", "days": 3})], [])
    assert read(HERMES, XML, declared)[1] == [("weather", {"city": "Oslo", "days": "3"})]


def test_a_parameter_of_another_type_than_declared_is_reported() -> None:
    _, calls, malformed = read(HERMES, XML, [tool("weather", city="integer")])
    assert calls == []
    assert [problem for problem, _ in malformed] == ["the parameter 'city' is not JSON"]


@pytest.mark.parametrize(
    ("written", "dialect"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"k": "v"}}\n</tool_call>', HERMES),
        (
            "<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n</tool_call>",
            HERMES,
        ),
        (
            '<TOOLCALL>[{"name": "f", "arguments": {"k": "v"}}]</TOOLCALL>',
            Marked("<TOOLCALL>", "</TOOLCALL>"),
        ),
        (
            '<|tool_call|>[{"function": {"name": "f", "arguments": {"k": "v"}}}]<|/tool_call|>',
            Marked("<|tool_call|>", "<|/tool_call|>"),
        ),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"k": "v"}, "id": "abc"}]', Listed()),
        ('[TOOL_CALLS]f[ARGS]{"k": "v"}', Listed()),
        ('{"name": "f", "parameters": {"k": "v"}}', Bare()),
        ('call f with k="v"', None),
        ('[f(k="v")]', None),
    ],
)
def test_the_dialect_is_the_one_that_reads_what_a_template_wrote(
    written: str, dialect: Dialect | None
) -> None:
    assert dialect_of(written, "f", {"k": "v"}) == dialect


def test_the_end_of_calls_is_that_of_their_closing_marks() -> None:
    text = hermes(call("a"), call("b"))
    assert end_of_calls(HERMES, f"{text}<|im_end|>\n", 2) == len(text)
    assert end_of_calls(HERMES, text, 3) is None
    assert end_of_calls(Bare(), f"{call('a')}<|eot|>", 1) == len(call("a"))


def test_a_call_has_one_id_however_often_it_is_read() -> None:
    assert call_id(IDS, 0) == call_id(ids_of([1, 2, 3]), 0)
    assert len({call_id(IDS, 0), call_id(IDS, 1), call_id(ids_of([1, 2]), 0)}) == 3
    assert len(call_id(IDS, 0)) == 9


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    bodies=st.lists(st.one_of(st.just("{oops"), WORDS.map(lambda w: call("f", w=w))), max_size=4),
    between=st.text("ab \n", max_size=4),
)
@settings(deadline=None)
def test_every_block_is_a_call_or_reported_and_no_word_is_lost(
    bodies: list[str], between: str
) -> None:
    text = between.join(["", *(hermes(body) for body in bodies), ""])
    content, calls, malformed = read(HERMES, text)
    assert len(calls) == sum(body != "{oops" for body in bodies)
    assert len(malformed) == bodies.count("{oops")
    letters = "".join((content or "").split())
    assert letters == "".join(between.split()) * (len(bodies) + 1)


@given(text=st.text('<tool_call>/{}[]"name:,ARGSTOLCAL_f=', max_size=60))
@settings(deadline=None)
def test_nothing_that_a_model_may_say_raises(text: str) -> None:
    for dialect in (HERMES, Listed(), Bare()):
        read(dialect, text)
