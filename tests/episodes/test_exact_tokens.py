"""The law of conversations: what was sampled is trained once, as it was sampled, and nothing else.

A random agent holds two conversations as trees: it extends, rewrites, branches, calls at once,
answers calls of tools, changes its tools. The model spells every word in another way than the
tokenizer would (B1), and some of its replies are cut. Each sampled token has a logprob of its
own, by which it is told from every other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from loops_cookbook.episodes.conversation import Conversation, Models, TryRecord
from loops_cookbook.learning.datums import ScoredAttempt, datums
from loops_cookbook.messages import Message, Tool
from loops_cookbook.runtimes.base import Place
from loops_cookbook.runtimes.producers import Policy, Producers
from loops_cookbook.services.base import SampleParams
from loops_cookbook.testing.scripted import Line, ScriptedSampler
from loops_cookbook.testing.tokenizer import ByteTokenizer, PlainRenderer
from loops_cookbook.tokens import Trajectory, Turn, sequences

END = ByteTokenizer.end_id
ADVANTAGE = 0.5
TOOLS: Sequence[Sequence[Tool]] = (
    (),
    ({"type": "function", "function": {"name": "a"}},),
    ({"type": "function", "function": {"name": "b"}},),
)
CALL = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
BROKEN = "<tool_call>{</tool_call>"
PLACE = Place(
    group=0,
    attempt=0,
    trial=0,
    params=SampleParams(max_tokens=200),
    policy_version=0,
    call_seed=lambda index: index,
)


@dataclass(frozen=True)
class Step:
    """What the agent does next, and what the model says to it."""

    kind: str
    conversation: int
    history: int
    """Which of the histories so far it goes on from."""
    text: str
    tools: int
    said: str
    is_cut: bool


steps = st.builds(
    Step,
    kind=st.sampled_from(["extend", "result", "rewrite", "shorten", "again", "anew", "at once"]),
    conversation=st.integers(0, 1),
    history=st.integers(0, 6),
    text=st.text("ab", max_size=2),
    tools=st.sampled_from([0, 1, 1, 1, 2]),
    said=st.sampled_from(["", "a", "ab", "aba", CALL, f"b{CALL}a{BROKEN}", BROKEN]),
    is_cut=st.booleans(),
)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def asked(step: Step, past: Sequence[Message]) -> list[Message]:
    """The messages of a step that goes on from some past."""
    last = past[-1]
    match step.kind:
        case "extend" | "at once":
            return [*past, user(step.text)]
        case "result":
            calls: object = last.get("tool_calls") or [{"id": "none"}]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": step.text}
                for call in calls  # type: ignore[attr-defined]
            ]
            return [*past, *results]
        case "rewrite":
            return [*past[:-1], {**last, "content": step.text}, user(step.text)]
        case "shorten":
            return [past[0], user(step.text)]
        case "again":
            return list(past)
        case _:
            return [user(step.text)]


class Script:
    """Replies spelt byte by byte, with logprobs that no two tokens share."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.given = 0

    def __call__(self, _: str, index: int) -> Line:
        assert self.step is not None
        ids = [*self.step.said.encode(), *(() if self.step.is_cut else (END,))]
        first, self.given = self.given + 1, self.given + len(ids)
        logprobs = [-(first + i) / 1024 for i in range(len(ids))]
        return Line(ids=ids, logprobs=logprobs, seconds=1 + index % 3)


async def live(walk: Sequence[Step], models: Models, script: Script) -> None:
    conversations = [models["main"].conversation() for _ in range(2)]
    histories: list[list[Message]] = [[user("start")]]

    async def call(conversation: Conversation, step: Step, messages: list[Message]) -> None:
        reply = await conversation.generate(messages, tools=TOOLS[step.tools])
        histories.append([*messages, reply.message])

    for step in walk:
        script.step = step
        messages = asked(step, histories[step.history % len(histories)])
        conversation = conversations[step.conversation]
        async with anyio.create_task_group() as group:
            for _ in range(2 if step.kind == "at once" else 1):
                group.start_soon(call, conversation, step, messages)


def recorded(walk: Sequence[Step], *, extends: bool = True) -> tuple[Turn, ...]:
    renderer = PlainRenderer(ByteTokenizer(words=["ab", "aba", "name", CALL]), extends=extends)
    script = Script()
    sampler = ScriptedSampler(script, tokenizer=renderer.tokenizer)
    record = TryRecord(PLACE, 100_000)
    models = Models(Producers(Policy("main", sampler, renderer)), record, trains=True)
    anyio.run(
        live,
        walk,
        models,
        script,
        backend="trio",
        backend_options={"clock": MockClock(autojump_threshold=0)},
    )
    return tuple(record.turns)


@given(walk=st.lists(steps, min_size=1, max_size=9), extends=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_sampled_token_is_trained_exactly_once_and_nothing_else_is(
    walk: list[Step], extends: bool
) -> None:
    turns = recorded(walk, extends=extends)
    rows = sequences(Trajectory(turns))
    sampled = {
        (p, i)
        for turn in turns
        for p, i in zip(turn.sampled.logprobs.tolist(), turn.sampled.ids.tolist(), strict=True)
    }
    trained: list[tuple[float, int]] = []
    for datum in datums([ScoredAttempt(rows, ADVANTAGE)]):
        assert datum.advantages is not None
        assert datum.logprobs is not None
        is_trained = datum.advantages != 0
        assert (datum.advantages[is_trained] == ADVANTAGE).all()
        assert not datum.logprobs[~is_trained].any()
        pairs = zip(datum.logprobs[is_trained], datum.target_ids[is_trained], strict=True)
        trained += [(float(p), int(i)) for p, i in pairs]
    assert len(trained) == len(set(trained))
    assert set(trained) == sampled


@given(walk=st.lists(steps, min_size=1, max_size=9))
@settings(max_examples=30, deadline=None)
def test_every_token_is_trained_after_the_very_prompt_that_it_was_sampled_from(
    walk: list[Step],
) -> None:
    turns = recorded(walk)
    rows = sequences(Trajectory(turns))
    for turn in turns:
        whole = np.concatenate([turn.prompt_ids, turn.sampled.ids])
        start = len(turn.prompt_ids)
        holding = [
            row
            for row in rows
            if np.array_equal(row.ids[: len(whole)], whole)
            and np.array_equal(row.logprobs[start : len(whole)], turn.sampled.logprobs)
        ]
        assert len(holding) == (1 if len(turn.sampled.ids) else len(holding))


@given(walk=st.lists(steps, min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_a_call_that_goes_on_with_an_earlier_one_is_extended(walk: list[Step]) -> None:
    """A straight conversation with one list of tools is one row, however the model spells it."""
    straight = [
        replace(step, kind=step.kind if step.kind == "result" else "extend", conversation=0)
        for step in walk
    ]
    straight = [replace(s, history=i, tools=1) for i, s in enumerate(straight)]
    turns = recorded(straight)
    assert [turn.origin for turn in turns] == ["first"] + ["extended"] * (len(straight) - 1)
    assert len(sequences(Trajectory(turns))) == (1 if any(len(t.sampled.ids) for t in turns) else 0)
