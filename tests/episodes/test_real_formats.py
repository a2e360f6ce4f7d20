"""The law of conversations under the formats that ship: exact ids in, exact ids out, once each.

A random agent and a random model talk through real tokenizers. The model says what models say:
calls that are good, broken or cut, half characters, marks of turns in plain letters, any tokens at
all. Whatever it was, what is recorded is what the sampler was sent and what it gave.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from loops_cookbook.attempts import Attempt
from loops_cookbook.episodes.conversation import Conversation, Models, TryRecord
from loops_cookbook.messages import Message, Tool
from loops_cookbook.renderers.chat_template import ChatTemplateRenderer
from loops_cookbook.renderers.tokenizers import ChatTokenizer, load_tokenizer
from loops_cookbook.rundir.transcripts import transcript_of, transcript_text
from loops_cookbook.runtimes.base import Place
from loops_cookbook.runtimes.producers import Policy, Producers
from loops_cookbook.services.base import SampleParams
from loops_cookbook.tokens import Ids, SampledTokens, Trajectory, ids_of, logprobs_of, sequences

ROOT = Path(__file__).parents[2]
FORMATS = ("models/tool_agent", "examples/sft_tools/model", "models/counting")
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}},
}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
PIECES = (
    CALL, CALL[:-20], "<tool_call>{oops</tool_call>", '<tool_call>{"name": 3}</tool_call>',
    CALL.replace("sea", "\\ud800"), CALL.replace('"sea"', "NaN"), "I look.", " ", "\n", "\0",
    "e\u0301", "\U0001f600", "\ufffd", "<|end|>", "<|user|>", "<end>", "qzreplyqz", "<think>",
)  # fmt: skip
PLACE = Place(
    group=0,
    attempt=0,
    trial=0,
    params=SampleParams(max_tokens=400),
    policy_version=0,
    call_seed=lambda index: index,
)


@cache
def tokenizer_of(name: str) -> ChatTokenizer:
    return load_tokenizer(ROOT / name, name=name)


@cache
def renderer_of(name: str) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(tokenizer_of(name))


@dataclass(frozen=True)
class Step:
    """What the agent does, and what the model says to it."""

    kind: str
    history: int
    heard: str
    said: str
    by_letter: bool
    stray: tuple[int, ...]
    """Tokens of any kind before the end."""
    cut: int
    """Tokens that the limit takes off; 0: it ends by itself."""


texts = st.lists(st.sampled_from(PIECES), max_size=3).map("".join)
steps = st.builds(
    Step,
    kind=st.sampled_from(["go on", "go on", "go on", "rewrite", "again", "at once", "no tools"]),
    history=st.integers(0, 4),
    heard=texts | st.sampled_from(["\ud800", "a\udfffb"]),
    said=texts,
    by_letter=st.booleans(),
    stray=st.lists(st.integers(5, 30), max_size=2).map(tuple),
    cut=st.integers(-3, 3).map(lambda n: max(0, n)),
)


class Model:
    """Says what the step has, with logprobs that no two tokens share; keeps what it was sent."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.step: Step | None = None
        self.sent: list[tuple[Ids, SampledTokens]] = []
        self._tokenizer = tokenizer
        self._given = 0

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        assert self.step is not None
        step, stops = self.step, params.stop_token_ids
        pieces = list(step.said) if step.by_letter else [step.said]
        ids = [i for piece in pieces for i in self._tokenizer.encode(piece)] + list(step.stray)
        ids = [i for i in ids if i not in stops] + [stops[0]]
        if step.cut:
            ids = ids[: -step.cut]
        logprobs = [-(self._given + index) / 4096 for index in range(1, len(ids) + 1)]
        self._given += len(ids)
        stop = "length" if step.cut else "stop"
        sampled = SampledTokens(ids_of(ids), logprobs_of(logprobs), stop, 0)
        await anyio.sleep(1)
        self.sent.append((prompt_ids.copy(), sampled))
        return (sampled,)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def live(walk: list[Step], models: Models, model: Model, has_tools: bool) -> None:
    conversation = models["main"].conversation(tools=[LOOK] if has_tools else None)
    histories: list[list[Message]] = [[user("?")]]

    async def call(conversation: Conversation, step: Step, messages: list[Message]) -> None:
        tools: list[Tool] | None = [] if step.kind == "no tools" else None
        reply = await conversation.generate(messages, tools=tools)
        results = [made.result(step.heard) for made in reply.tool_calls]
        histories.append([*messages, reply.message, *(results or [user(step.heard)])])

    for step in walk:
        model.step = step
        messages = histories[step.history % len(histories)]
        if step.kind == "rewrite":
            messages = [messages[0], user(step.heard)]
        elif step.kind == "again":
            messages = messages[:1]
        async with anyio.create_task_group() as group:
            for _ in range(2 if step.kind == "at once" else 1):
                group.start_soon(call, conversation, step, messages)


@pytest.mark.parametrize("name", FORMATS)
@given(walk=st.lists(steps, min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_whatever_a_model_says_is_recorded_and_trained_as_it_was_said(
    name: str, walk: list[Step]
) -> None:
    renderer, model = renderer_of(name), Model(tokenizer_of(name))
    record = TryRecord(PLACE, 100_000)
    models = Models(Producers(Policy("main", model, renderer)), record, trains=True)
    clock = MockClock(autojump_threshold=0)
    anyio.run(
        live,
        walk,
        models,
        model,
        renderer.why_no_tools is None,
        backend="trio",
        backend_options={"clock": clock},
    )

    for turn, (prompt_ids, sampled) in zip(record.turns, model.sent, strict=True):
        assert np.array_equal(turn.prompt_ids, prompt_ids)
        assert turn.sampled is sampled
    rows = sequences(Trajectory(tuple(record.turns)))
    said = [
        pair for turn in record.turns for pair in pairs(turn.sampled.ids, turn.sampled.logprobs)
    ]
    trained = [
        pair
        for row in rows
        for pair in pairs(row.ids[row.is_sampled], row.logprobs[row.is_sampled])
    ]
    assert sorted(trained) == sorted(said)
    assert_reads_back(record)


def pairs(ids: Ids, logprobs: np.ndarray) -> list[tuple[float, int]]:
    return list(zip(logprobs.tolist(), ids.tolist(), strict=True))


def assert_reads_back(record: TryRecord) -> None:
    """The transcript's file says of each call what happened in it."""
    written = Attempt(
        group=0,
        index=0,
        task="t",
        reward=0.0,
        calls=tuple(record.calls),
        trajectory=Trajectory(tuple(record.turns)),
    )
    file = transcript_text(written, "train").encode(errors="backslashreplace")
    read = transcript_of(json.loads(file))
    for before, after in zip(written.calls, read.calls, strict=True):
        assert json.dumps([before.messages, before.reply]) == json.dumps(
            [after.messages, after.reply]
        )
        assert (before.origin, before.turn) == (after.origin, after.turn)
    for turn, again in zip(written.trajectory.turns, read.trajectory.turns, strict=True):
        assert np.array_equal(turn.prompt_ids, again.prompt_ids)
        assert np.array_equal(turn.sampled.ids, again.sampled.ids)
        assert np.array_equal(turn.sampled.logprobs, again.sampled.logprobs)
