"""The tokenizer and the chat format that need no download."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.messages import Message
from loops_cookbook.renderers.base import Renderer
from loops_cookbook.testing import ByteTokenizer, PlainRenderer
from loops_cookbook.tokens import ids_of

END = ByteTokenizer.end_id

texts = st.text(max_size=12)
histories = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant", "tool"]),
        texts,
    ),
    min_size=1,
    max_size=4,
)


@given(text=st.text(alphabet="abé€ ", max_size=20))
@settings(deadline=None)
def test_a_text_comes_back_from_its_ids(text: str) -> None:
    tokenizer = ByteTokenizer(words=["ab", "aba", "é"])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.spell(text)) == text


def test_the_longest_word_is_taken() -> None:
    tokenizer = ByteTokenizer(words=["he", "hello"])
    first = 256 + 1 + 5
    assert tokenizer.encode("hello he") == [first + 1, ord(" "), first]
    assert tokenizer.vocabulary_size == first + 2


def test_marks_and_broken_text_are_shown() -> None:
    tokenizer = ByteTokenizer()
    user = tokenizer.role_ids["user"]
    assert tokenizer.decode([user, 0xC3, END, 9999]) == "<|user|>�<|end|><|?|>"


def test_a_prompt_asks_for_the_assistant() -> None:
    renderer: Renderer = PlainRenderer()
    ids = renderer.render(
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": "?"}]
    )
    assert ids.dtype == np.int32
    assert renderer.decode(ids) == "<|system|>Be short.<|end|><|user|>?<|end|><|assistant|>"


@given(history=histories, reply=texts, new=histories)
@settings(deadline=None)
def test_extending_equals_rendering_anew_where_the_spelling_is_the_same(
    history: list[Message], reply: str, new: list[Message]
) -> None:
    renderer = PlainRenderer(ByteTokenizer(words=["ab"]))
    sampled = ids_of([*renderer.tokenizer.encode(reply), END])
    said = {"role": "assistant", "content": reply}
    extended = renderer.extend(renderer.render(history), sampled, new)
    assert extended is not None
    assert extended.tolist() == renderer.render([*history, said, *new]).tolist()


@given(sampled=st.lists(st.integers(0, 300), max_size=6))
@settings(deadline=None)
def test_an_extension_begins_with_what_was_recorded(sampled: list[int]) -> None:
    renderer = PlainRenderer()
    prompt = renderer.render([{"role": "user", "content": "?"}])
    extended = renderer.extend(prompt, ids_of(sampled), [{"role": "user", "content": "!"}])
    assert extended is not None
    assert extended[: len(prompt) + len(sampled)].tolist() == [*prompt.tolist(), *sampled]


def test_a_format_can_be_made_that_does_not_extend() -> None:
    renderer = PlainRenderer(extends=False)
    assert renderer.why_not_extended
    assert renderer.extend(ids_of([1]), ids_of([2]), []) is None


@pytest.mark.parametrize(
    ("sampled", "content"),
    [([*b"yes", END], "yes"), ([*b"yes"], "yes"), ([END], ""), ([], ""), ([0xC3, END], "�")],
)
def test_a_reply_is_all_content(sampled: list[int], content: str) -> None:
    assert PlainRenderer().parse(ids_of(sampled)).content == content


TOOL = {"type": "function", "function": {"name": "look"}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'


def test_tools_stand_first_and_calls_are_read_where_they_are_declared() -> None:
    renderer = PlainRenderer()
    prompt = renderer.decode(renderer.render([{"role": "user", "content": "?"}], [TOOL]))
    assert prompt.startswith('<|system|>{"type": "function", "function": {"name": "look"}}<|end|>')
    sampled = ids_of([*CALL.encode(), END])
    [call] = renderer.parse(sampled, [TOOL]).tool_calls
    assert (call.name, call.arguments) == ("look", {"at": "é"})
    assert renderer.parse(sampled).content == CALL


def test_a_call_of_the_history_is_written_as_it_is_read() -> None:
    renderer = PlainRenderer()
    user, result = {"role": "user", "content": "?"}, {"role": "tool", "content": "a cat"}
    sampled = ids_of([*f"I look.\n{CALL}".encode(), END])
    parsed = renderer.parse(sampled, [TOOL])
    calls = [call.as_message_part() for call in parsed.tool_calls]
    said = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
    extended = renderer.extend(renderer.render([user], [TOOL]), sampled, [result], [TOOL])
    assert extended is not None
    assert extended.tolist() == renderer.render([user, said, result], [TOOL]).tolist()


def test_a_demonstrated_call_is_read_back_as_it_was_written() -> None:
    """A reply that calls tools was refused as one of a format that has no way to do so."""
    renderer = PlainRenderer()
    function = {"name": "look", "arguments": {"at": "é"}}
    calls = [{"type": "function", "function": function}]
    said = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    parsed = renderer.parse(renderer.supervise([said], [TOOL]), [TOOL])
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("look", {"at": "é"})]
    assert (parsed.content or "").strip() == "I look."
    with pytest.raises(ValueError, match="calls tools, and none are declared"):
        renderer.supervise([said])
