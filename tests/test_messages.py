"""When two messages are the same turn of a conversation."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.messages import (
    Message,
    ToolCall,
    canonical,
    canonical_tools,
    text_of,
    well_formed,
)

WORDS = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def call(name: str, arguments: object, id: str = "1") -> Mapping[str, object]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_result_of_a_call_is_a_message_that_answers_it() -> None:
    answer = ToolCall("c1", "look", {"at": "sea"}).result("blue")
    assert answer == {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "blue"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, None),
        ("", ""),
        (" as it is ", " as it is "),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ],
)
def test_content_is_read_as_text(content: object, text: str | None) -> None:
    assert text_of(content) == text


@pytest.mark.parametrize("content", [3, {"text": "a"}, b"a"])
def test_content_of_another_type_is_refused(content: object) -> None:
    with pytest.raises(ValueError, match="content must be a string, a list of parts or null"):
        text_of(content)


@pytest.mark.parametrize("part", ["a", {"type": "image_url"}, {"type": "text", "text": None}, 3])
def test_a_part_that_is_not_text_is_refused(part: object) -> None:
    with pytest.raises(ValueError, match="a content part must be text here"):
        text_of([part])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"content": "a", "role": "user"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": None}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "\n a "}),
        (
            {"role": "user", "content": "ab"},
            {"role": "user", "content": [{"text": "a"}, {"text": "b"}]},
        ),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": "", "tool_calls": []}),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "because"},
            {"role": "assistant", "content": "a", "refusal": "no"},
        ),
        (
            {"role": "assistant", "tool_calls": [call("look", '{"x": 1, "y": 2}')]},
            {"role": "assistant", "tool_calls": [call("look", {"y": 2, "x": 1}, id="2")]},
        ),
    ],
    ids=[
        "key order",
        "absent and None",
        "outer white space",
        "text parts",
        "no content",
        "no calls",
        "what an assistant message carries beside",
        "arguments and ids of calls",
    ],
)
def test_messages_that_mean_the_same_are_equal(one: Message, other: Message) -> None:
    assert canonical(one) == canonical(other)
    assert hash(canonical(one)) == hash(canonical(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a", "name": "Ann"}),
        ({"role": "assistant", "content": "a b"}, {"role": "assistant", "content": "a  b"}),
        (
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            {"role": "tool", "content": "3", "tool_call_id": "2"},
        ),
        (
            {"role": "assistant", "tool_calls": [call("look", '{"x": 1}')]},
            {"role": "assistant", "tool_calls": [call("look", '{"x": 2}')]},
        ),
        (
            {"role": "assistant", "tool_calls": [call("look", "{}")]},
            {"role": "assistant", "tool_calls": [call("find", "{}")]},
        ),
        (
            {"role": "assistant", "tool_calls": [call("look", "{")]},
            {"role": "assistant", "tool_calls": [call("look", "{}")]},
        ),
    ],
)
def test_messages_that_differ_are_not_equal(one: Message, other: Message) -> None:
    assert canonical(one) != canonical(other)


@given(arguments=st.dictionaries(WORDS, JSON, max_size=3), indent=st.sampled_from([None, 2]))
@settings(deadline=None)
def test_a_call_of_ours_comes_back_equal_from_any_client(
    arguments: Mapping[str, object], indent: int | None
) -> None:
    ours = ToolCall("1", "look", arguments).as_message_part()
    theirs = call("look", json.dumps(arguments, sort_keys=True, indent=indent))
    assert canonical({"role": "assistant", "tool_calls": [ours]}) == canonical(
        {"role": "assistant", "tool_calls": [theirs]}
    )


def test_no_tools_and_an_empty_list_are_the_same() -> None:
    assert canonical_tools(None) == canonical_tools([]) == ""


def test_tools_are_compared_without_regard_to_key_order() -> None:
    one = {"type": "function", "function": {"name": "look", "parameters": {}}}
    other = {"function": {"parameters": {}, "name": "look"}, "type": "function"}
    assert canonical_tools([one]) == canonical_tools([other])
    assert canonical_tools([one]) != canonical_tools([one, one])


@pytest.mark.parametrize(
    ("text", "formed"),
    [
        ("as it is", "as it is"),
        ("ǹ 你好 \U0001f600", "ǹ 你好 \U0001f600"),
        ("a\ud800b\udfff", "a\ufffdb\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
def test_a_well_formed_text_has_utf_8(text: str, formed: str) -> None:
    assert well_formed(text) == formed
    assert well_formed(text).encode().decode() == formed
