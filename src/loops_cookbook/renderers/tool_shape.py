"""What a chat template does with tools, found by rendering a few conversations that use one.

A template has to show the model its tools, to write a call in a form that is read here, and to
show what the tool gave back; otherwise tools are refused, with the reason. Whether a prompt may
be extended by the results of calls is asked apart from whether it may be by a user's message:
many templates drop the reasoning of earlier turns only when a user speaks again.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from loops_cookbook.messages import Message, Tool
from loops_cookbook.renderers.probe import (
    CLOSE,
    OPEN,
    Shape,
    Text,
    ThinkingRetention,
    alike,
    close_of,
    probe,
)
from loops_cookbook.renderers.tokenizers import ChatTokenizer
from loops_cookbook.renderers.tool_calls import Dialect, dialect_of, end_of_calls

_NAME, _KEY, _VALUE, _ASK, _SAID, _RESULT, _REASON = (
    f"qz{word}qz" for word in ("tool", "key", "value", "ask", "said", "result", "why")
)
_ID = "qzcall000"
"""Nine letters and digits: some templates take no other."""
_ARGUMENTS: Mapping[str, object] = {_KEY: _VALUE}
_USER: Message = {"role": "user", "content": _ASK}
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "It stands for any tool.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "Any."}},
            "required": [_KEY],
        },
    },
}
"""The tool that stands for any tool."""


@dataclass(frozen=True, slots=True)
class ToolShape:
    """What probing with a tool found."""

    dialect: Dialect
    talk: Shape
    """The shape of a conversation in which tools are declared and nobody calls one."""
    close_id: int | None
    """The atomic token that follows a reply with calls; some formats have one for these alone."""
    keeps_calls: bool
    """Whether a reply with a call, without reasoning, stands before its results as sampled."""
    keeps_reasoned: bool
    """Whether one with reasoning does."""
    keeps_on: bool
    """Whether calls and results stand as they were when a user speaks later on."""


def probe_tools(
    text: Text, with_tool: Text, tokenizer: ChatTokenizer, retention: ThinkingRetention
) -> ToolShape | str:
    """Learn how a template speaks of tools, or why it cannot.

    Args:
        text: the template without tools.
        with_tool: the same where `TOOL` is declared.
        tokenizer: of the model.
        retention: whether reasoning is kept that the template drops.
    """
    try:
        shows = _NAME in with_tool([_USER], True) and _NAME not in text([_USER], True)
    except ValueError:
        shows = False
    if not shows:
        return "the chat template does not show the model any tools"
    try:
        asked, written = with_tool([_USER], True), with_tool([_USER, *_call(1)], True)
    except ValueError as error:
        return f"the chat template cannot write a call of a tool ({error})"
    if _RESULT not in written:
        return "the chat template does not show the model what a tool gave back"
    try:
        talk = probe(with_tool, tokenizer, retention)
    except ValueError as error:
        return f"the tokenizer cannot express what the chat template writes of tools ({error})"
    stops = [tokenizer.text_of(i) for i in talk.stop_ids]
    dialect = dialect_of(written[_start(asked, written) :], _NAME, _ARGUMENTS, stops)
    if dialect is None:
        return "the chat template writes calls of tools in a form that is not read here"
    end = end_of_reply(with_tool, dialect, written, 1)
    close_id = close_of(written[end:].partition(_RESULT)[0], tokenizer)
    plain = _keeps(with_tool, asked, "")
    reasoned = _keeps(with_tool, asked, _REASON) if talk.splits_reasoning else plain
    if talk.splits_reasoning and retention == "all" and _keeps(with_tool, asked, "", OPEN, CLOSE):
        plain = reasoned = True
    return ToolShape(dialect, talk, close_id, plain, reasoned, keeps_on=_keeps_on(with_tool))


def past_calls(calls: Sequence[tuple[str, str]]) -> tuple[Message, ...]:
    """The conversation that stands for one whose reply made some calls, by their ids and names."""
    return (_USER, _calling([_part(id, name) for id, name in calls]))


def result_of(reply: Message) -> Message:
    """What stands for any result of a reply's first call."""
    calls = cast(Sequence[Message], reply.get("tool_calls") or [_part(_ID, _NAME)])
    name = cast(Message, calls[0]["function"])["name"]
    return {"role": "tool", "tool_call_id": calls[0]["id"], "name": name, "content": _RESULT}


def end_of_reply(with_tools: Text, dialect: Dialect, written: str, count: int) -> int | None:
    """Where the reply of a conversation of `past_calls` ends in its text; None if it is not read.

    Args:
        with_tools: the template with the tools that are declared.
        dialect: in which it writes calls.
        written: the text of the conversation, and of what follows.
        count: how many calls the reply makes.
    """
    start = _start(with_tools([_USER], True), written)
    end = end_of_calls(dialect, written[start:], count)
    return None if end is None else start + end


def _call(serial: int, reasoning: str = "") -> tuple[Message, Message]:
    """A reply that calls the tool, and what the tool gave back."""
    called = _calling([_part(f"{_ID[:-1]}{serial}", _NAME)])
    result = result_of(called)
    return {**called, "reasoning_content": reasoning} if reasoning else called, result


def _calling(calls: Sequence[Mapping[str, object]]) -> Message:
    return {"role": "assistant", "content": _SAID, "tool_calls": list(calls)}


def _part(id: str, name: str) -> Mapping[str, object]:
    function = {"name": name, "arguments": dict(_ARGUMENTS)}
    return {"id": id, "type": "function", "function": function}


def _start(asked: str, written: str) -> int:
    """Where a reply's calls begin: after its words, or where a template drops those, at once."""
    common = _common(asked, written)
    said = written.find(_SAID, common)
    if said >= 0:
        return said + len(_SAID)
    nothing = re.compile(rf"\s*(?:{OPEN})?\s*(?:{CLOSE})?\s*").match(written, common)
    return common if nothing is None else nothing.end()


def _keeps(with_tool: Text, asked: str, reasoning: str, *marks: str) -> bool:
    """Whether two replies with calls, and their results, are written as they were sampled."""
    first, second = _call(1, reasoning), _call(2, reasoning)
    try:
        one = with_tool([_USER, *first], False)
        again = with_tool([_USER, *first], True)
        two = with_tool([_USER, *first, *second], True)
    except ValueError:
        return False
    if not (again.startswith(one) and two.startswith(one)):
        return False
    return _follows(asked, one, reasoning, marks) and _follows(again, two, reasoning, marks)


def _keeps_on(with_tool: Text) -> bool:
    """Whether a call and its result are left alone by the turns of a user that come later."""
    later: Sequence[Message] = ({"role": "assistant", "content": "qzdoneqz"}, _USER)
    try:
        one = with_tool([_USER, *_call(1)], False)
        return with_tool([_USER, *_call(1), *later], True).startswith(one)
    except ValueError:
        return False


def _follows(asked: str, written: str, reasoning: str, marks: Sequence[str]) -> bool:
    """Whether a reply with a call follows the prompt that it was sampled from."""
    common = _common(asked, written)
    said = written.find(_SAID, common)
    before = written[: said if said >= 0 else _start(asked, written)]
    if not reasoning:
        return alike(asked, before, *marks)
    opened = asked if asked.rstrip().endswith(OPEN) else asked + OPEN
    return written.startswith(opened) and reasoning in before[len(asked) :]


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
