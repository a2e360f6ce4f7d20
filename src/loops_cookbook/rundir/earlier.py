"""Which earlier call, or turn, of an attempt one goes on with, so that nothing is written twice.

One goes on with the latest of those whose whole, what was sent and what came back, stands at its
own beginning: word for word as it is written for calls, id for id for turns. An agent may call a
model thousands of times, with all that was said before in each call: what is compared here is what
is new in a call, or one list at a time, and never each call with each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loops_cookbook.attempts import Call
from loops_cookbook.journal import encode
from loops_cookbook.messages import Message, Tool
from loops_cookbook.tokens import Ids, Turn

_Key: TypeAlias = tuple[str, ...]
"""The producer of a call and its tools as they are written; only calls that share it go on."""


class Continued(NamedTuple):
    """A call as far as it is to be written."""

    before: int | None
    """The index of the call that it goes on with."""
    tools: list[str]
    messages: list[str]
    """Those after the whole of that call; all of them without one."""
    reply: str


@dataclass(slots=True, eq=False)
class _Node:
    """A message at its place after those above it."""

    next: "dict[str, _Node]" = field(default_factory=dict[str, "_Node"])
    ended: dict[_Key, int] = field(default_factory=dict[_Key, int])
    """The latest call of each key whose reply the message is."""


def continued_calls(calls: Sequence[Call]) -> Iterator[Continued]:
    """Each call, as far as no earlier one says it; messages are compared as they are written."""
    if len(calls) == 1:  # as most attempts have
        [call] = calls
        tools, messages = list(map(encode, call.tools)), list(map(encode, call.messages))
        yield Continued(None, tools, messages, encode(call.reply))
        return
    written: dict[int, str] = {}  # by identity: calls share the messages of their history
    root = _Node()
    last: dict[_Key, tuple[int, _Node]] = {}
    for index, call in enumerate(calls):
        tools = [_once(tool, written) for tool in call.tools]
        key = (call.producer, *tools)
        before, node = last.get(key, (None, root))
        if before is not None and _is_begun_by(call, calls[before], written):
            new = [_once(message, written) for message in call.messages[_length(calls[before]) :]]
            for text in new:
                node = node.next.setdefault(text, _Node())
        else:
            messages = [_once(message, written) for message in call.messages]
            before, node = _walk(root, messages, key)
            new = messages if before is None else messages[_length(calls[before]) :]
        reply = _once(call.reply, written)
        node = node.next.setdefault(reply, _Node())
        node.ended[key] = index
        last[key] = (index, node)
        yield Continued(before, tools, new, reply)


def continued_turns(turns: Sequence[Turn]) -> Iterator[int | None]:
    """The index of the turn that each one goes on with.

    Prompts are compared with wholes by a sum over the ids of each beginning, each id weighted by
    its place, and id by id where those agree.
    """
    if len(turns) == 1:  # as most attempts have
        yield None
        return
    lengths = np.array([_whole(turn) for turn in turns])
    sums = np.zeros(len(turns), np.uint32)
    weights = _weights(int(lengths.max(initial=0)))
    for index, turn in enumerate(turns):
        begun = _sums(turn.prompt_ids, weights)
        fitting = np.flatnonzero(lengths[:index] <= len(turn.prompt_ids))
        alike = fitting[begun[lengths[fitting]] == sums[fitting]]
        latest: list[int] = alike[::-1].tolist()
        yield next((i for i in latest if _stands_at_the_beginning(turns[i], turn)), None)
        rest = _sums(turn.sampled.ids, weights[len(turn.prompt_ids) :])
        sums[index : index + 1] = begun[-1:] + rest[-1:]  # as arrays, which may overflow


def _is_begun_by(call: Call, earlier: Call, written: dict[int, str]) -> bool:
    """Whether an earlier call's whole, in the very same objects but for its reply, begins it."""
    place = len(earlier.messages)
    return (
        len(call.messages) > place
        and all(map(is_, call.messages, earlier.messages))
        and _once(call.messages[place], written) == _once(earlier.reply, written)
    )


def _walk(root: _Node, messages: Sequence[str], key: _Key) -> tuple[int | None, _Node]:
    """The latest call that ended on the way along some messages, and the place of the last."""
    node, before = root, -1
    for text in messages:
        node = node.next.setdefault(text, _Node())
        before = max(before, node.ended.get(key, -1))
    return (None if before < 0 else before), node


def _length(call: Call) -> int:
    return len(call.messages) + 1


def _once(value: Message | Tool, written: dict[int, str]) -> str:
    text = written.get(id(value))
    if text is None:
        text = written[id(value)] = encode(value)
    return text


def _weights(length: int) -> npt.NDArray[np.uint32]:
    return np.cumprod(np.full(length, 0x9E3779B1, np.uint32), dtype=np.uint32)


def _sums(ids: Ids, weights: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """uint32[T + 1], a number for each beginning of the ids, the empty one included."""
    sums = np.zeros(len(ids) + 1, np.uint32)
    np.cumsum(ids.astype(np.uint32) * weights[: len(ids)], dtype=np.uint32, out=sums[1:])
    return sums


def _stands_at_the_beginning(earlier: Turn, turn: Turn) -> bool:
    start, end = len(earlier.prompt_ids), _whole(earlier)
    return np.array_equal(turn.prompt_ids[:start], earlier.prompt_ids) and np.array_equal(
        turn.prompt_ids[start:end], earlier.sampled.ids
    )


def _whole(turn: Turn) -> int:
    return len(turn.prompt_ids) + len(turn.sampled.ids)
