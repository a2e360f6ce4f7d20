"""A transcript as a file: readable by a person, exact for a machine.

Nothing that was said stands twice. A call that goes on with an earlier one says so in
`continues`: its `messages` are those after that call's messages and reply. A turn that goes on
with an earlier one says so likewise: its `context_ids` are the ids between that turn's last
sampled token and its own first. So each token that the policy sampled stands once, in
`sampled_ids`, with exactly the log-probability, a float32, that the sampler gave. A list of
numbers stands on one line, and so does a message.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel

from loops_cookbook.attempts import Attempt, Call, Fate, Flags, Scalar, Timing
from loops_cookbook.journal import Row, encode
from loops_cookbook.messages import Message, Tool
from loops_cookbook.records import SCHEMA_VERSION, TRAIN, Transcript
from loops_cookbook.rundir.earlier import continued_calls, continued_turns
from loops_cookbook.tokens import (
    Origin,
    SampledTokens,
    Trajectory,
    Turn,
    ids_of,
    logprobs_of,
)

_DEEP = "    "


def transcript_text(attempt: Attempt, purpose: str) -> str:
    """The whole content of the file of an attempt that has just ended."""
    discarded = attempt.discarded
    rewarded = None if purpose == TRAIN else Fate.EVALUATED
    head = encode(
        {
            "schema": SCHEMA_VERSION,
            "purpose": purpose,
            "group": attempt.group,
            "attempt": attempt.index,
            "task": attempt.task,
            "reward": attempt.reward,
            "fate": rewarded if discarded is None else discarded.fate,
            "detail": "" if discarded is None else discarded.detail,
            "exception": None if discarded is None else discarded.exception,
            "metadata": attempt.metadata,
            "tries": attempt.tries,
            "flags": attempt.flags.to_json(),
            "timing": attempt.timing.to_json(),
            "started_at": attempt.started_at,
        }
    )
    for key in ("reward", "metadata", "tries"):  # where metadata has such a key, a line ends there
        head = head.replace(f',"{key}":', f',\n "{key}":', 1)
    calls = _list(_calls(attempt.calls))
    turns = _list(_turns(attempt.trajectory.turns))
    return f'{head[:-1]},\n "calls": {calls},\n "turns": {turns}}}\n'


def transcript_of(row: Row) -> Transcript:
    """What `transcript_text` wrote; keys it does not know are passed over.

    Raises:
        ValueError: it is not a transcript.
    """
    form = _TranscriptForm.model_validate(row)
    return Transcript(
        purpose=form.purpose,
        group=form.group,
        attempt=form.attempt,
        task=form.task,
        fate=form.fate,
        reward=form.reward,
        detail=form.detail,
        exception=form.exception,
        flags=form.flags,
        tries=form.tries,
        metadata=nan_for_null(form.metadata),
        timing=form.timing,
        started_at=form.started_at,
        calls=_read_calls(form.calls),
        trajectory=Trajectory(_read_turns(form.turns)),
    )


def nan_for_null(values: Mapping[str, Scalar | None]) -> dict[str, Scalar]:
    """Read a mapping back: null is how JSON says a number that is not finite, NaN here."""
    return {name: math.nan if value is None else value for name, value in values.items()}


class _CallForm(BaseModel):
    producer: str
    turn: int | None
    origin: str | None
    finish_reason: str
    continues: int | None
    tools: tuple[dict[str, object], ...] = ()
    messages: tuple[dict[str, object], ...]
    reply: dict[str, object]


class _TurnForm(BaseModel):
    origin: Origin
    policy_version: int | None
    stop: Literal["stop", "length"]
    continues: int | None
    context_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]


class _TranscriptForm(BaseModel):
    purpose: str
    group: int
    attempt: int
    task: str
    reward: float | None
    fate: Fate | None
    detail: str
    exception: str | None
    tries: int
    flags: Flags
    metadata: dict[str, Scalar | None]
    timing: Timing
    started_at: float
    calls: list[_CallForm]
    turns: list[_TurnForm]


def _calls(calls: Sequence[Call]) -> list[str]:
    """Each call as a JSON object; messages are compared as they are written."""
    objects: list[str] = []
    for call, (before, tools, messages, reply) in zip(calls, continued_calls(calls), strict=True):
        head = encode(
            {
                "producer": call.producer,
                "turn": call.turn,
                "origin": call.origin,
                "finish_reason": call.finish_reason,
                "continues": before,
            }
        )
        declared = f',\n   "tools": {_list(tools, _DEEP)}' if tools and before is None else ""
        said = f'"messages": {_list(messages, _DEEP)},\n   "reply": {reply}'
        objects.append(f"{head[:-1]}{declared},\n   {said}}}")
    return objects


def _read_calls(forms: Sequence[_CallForm]) -> tuple[Call, ...]:
    calls: list[Call] = []
    for form in forms:
        messages: tuple[Message, ...] = form.messages
        tools: tuple[Tool, ...] = form.tools
        if form.continues is not None:
            before = calls[form.continues]
            messages = (*before.messages, before.reply, *messages)
            tools = before.tools
        calls.append(
            Call(
                producer=form.producer,
                messages=messages,
                tools=tools,
                reply=form.reply,
                finish_reason=form.finish_reason,
                origin=form.origin,
                turn=form.turn,
            )
        )
    return tuple(calls)


def _turns(turns: Sequence[Turn]) -> list[str]:
    """Each turn as a JSON object."""
    objects: list[str] = []
    for turn, before in zip(turns, continued_turns(turns), strict=True):
        sampled, start = turn.sampled, 0
        if before is not None:
            earlier = turns[before]
            start = len(earlier.prompt_ids) + len(earlier.sampled.ids)
        head = encode(
            {
                "origin": turn.origin,
                "policy_version": sampled.policy_version,
                "stop": sampled.stop,
                "continues": before,
            }
        )
        context_ids = encode(turn.prompt_ids[start:].tolist())
        sampled_ids = encode(sampled.ids.tolist())
        logprobs = encode(sampled.logprobs.tolist())
        objects.append(
            f'{head[:-1]},\n   "context_ids": {context_ids},\n   "sampled_ids": {sampled_ids},\n'
            f'   "logprobs": {logprobs}}}'
        )
    return objects


def _read_turns(forms: Sequence[_TurnForm]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    for form in forms:
        prompt = form.context_ids
        if form.continues is not None:
            before = turns[form.continues]
            prompt = [*before.prompt_ids.tolist(), *before.sampled.ids.tolist(), *prompt]
        sampled = SampledTokens(
            ids=ids_of(form.sampled_ids),
            logprobs=logprobs_of(form.logprobs),
            stop=form.stop,
            policy_version=form.policy_version,
        )
        turns.append(Turn(ids_of(prompt), sampled, form.origin))
    return tuple(turns)


def _list(items: Sequence[str], indent: str = "  ") -> str:
    """JSON values as a list, one below the other."""
    return f"[\n{indent}" + f",\n{indent}".join(items) + "]" if items else "[]"
