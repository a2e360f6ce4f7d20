"""A transcript's file gives back exactly what was said, and says nothing twice."""

import json
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.attempts import Attempt, Call, Discarded, Fate, Flags, Timing
from loops_cookbook.journal import Row, utf8
from loops_cookbook.messages import Message
from loops_cookbook.records import Transcript
from loops_cookbook.rundir.transcripts import transcript_of, transcript_text
from loops_cookbook.tokens import SampledTokens, Trajectory, Turn, ids_of, logprobs_of


def attempt(calls: Sequence[Call] = (), turns: Sequence[Turn] = ()) -> Attempt:
    return Attempt(
        group=1,
        index=2,
        task="orders",
        discarded=Discarded(Fate.UNGRADED, "ValueError: \ud83d", "ValueError"),
        flags=Flags(retried=True),
        tries=2,
        metadata={"ended": "limit", "turns": 3, "share": 0.1, "clean": True},
        timing=Timing(sampling=0.25),
        started_at=12.5,
        calls=tuple(calls),
        trajectory=Trajectory(tuple(turns)),
    )


def row_of(ended: Attempt, purpose: str = "train") -> Row:
    return cast(Row, json.loads(utf8(transcript_text(ended, purpose)).decode()))


def read_back(ended: Attempt, purpose: str = "train") -> Transcript:
    return transcript_of(row_of(ended, purpose))


def call(messages: Sequence[Message], reply: Message, *, tools: bool = False) -> Call:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    return Call("main", tuple(messages), (tool,) if tools else (), reply, "stop", "first", 0)


def turn(prompt: Sequence[int], sampled: Sequence[int]) -> Turn:
    logprobs = logprobs_of(np.linspace(-0.1, -9.7, len(sampled)))
    return Turn(ids_of(prompt), SampledTokens(ids_of(sampled), logprobs, "length", 3), "extended")


def messages_of(*texts: str) -> list[Message]:
    return [{"role": "user", "content": text} for text in texts]


def test_a_transcript_reads_back_whole() -> None:
    written = attempt([call(messages_of("hello"), {"role": "assistant", "content": "4"})])

    assert read_back(written) == Transcript(
        purpose="train",
        group=1,
        attempt=2,
        task="orders",
        fate=Fate.UNGRADED,
        reward=None,
        detail="ValueError: \ud83d",
        exception="ValueError",
        flags=written.flags,
        tries=2,
        metadata=written.metadata,
        timing=written.timing,
        started_at=12.5,
        calls=written.calls,
        trajectory=written.trajectory,
    )


@pytest.mark.parametrize(
    ("ended", "purpose", "fate"),
    [
        (Attempt(1, 2, "orders", reward=1.0), "train", None),
        (Attempt(1, 2, "orders", reward=1.0), "held_out", Fate.EVALUATED),
        (attempt(), "train", Fate.UNGRADED),
        (attempt(), "held_out", Fate.UNGRADED),
    ],
)
def test_a_transcript_has_the_fate_that_is_known_when_the_attempt_ends(
    ended: Attempt, purpose: str, fate: Fate | None
) -> None:
    assert read_back(ended, purpose).fate == fate


def test_a_number_that_is_not_finite_reads_back_as_nan() -> None:
    row = row_of(attempt())
    row["metadata"] = {"share": None}

    assert np.isnan(transcript_of(row).metadata["share"])


@given(st.data())
def test_calls_read_back_whichever_of_them_go_on_with_which(data: st.DataObject) -> None:
    few = st.sampled_from(messages_of("a", "b", "ü\u2028\n"))
    calls: list[Call] = []
    for _ in range(data.draw(st.integers(0, 5))):
        messages = data.draw(st.lists(few, max_size=3))
        if calls and data.draw(st.booleans()):
            before = data.draw(st.sampled_from(calls))
            messages = [*before.messages, before.reply, *messages]
        calls.append(call(messages, data.draw(few), tools=data.draw(st.booleans())))

    assert read_back(attempt(calls)).calls == tuple(calls)


@given(st.data())
def test_token_ids_and_logprobs_read_back_exactly(data: st.DataObject) -> None:
    ids = st.lists(st.integers(0, 200_000), max_size=4)
    turns: list[Turn] = []
    for _ in range(data.draw(st.integers(0, 5))):
        prompt = data.draw(ids)
        if turns and data.draw(st.booleans()):
            before = data.draw(st.sampled_from(turns))
            prompt = [*before.prompt_ids.tolist(), *before.sampled.ids.tolist(), *prompt]
        sampled = data.draw(ids)
        numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
        logprobs = data.draw(st.lists(numbers, min_size=len(sampled), max_size=len(sampled)))
        version = data.draw(st.none() | st.integers(0, 9))
        made = SampledTokens(ids_of(sampled), logprobs_of(logprobs), "stop", version)
        turns.append(Turn(ids_of(prompt), made, "template"))

    read = read_back(attempt(turns=turns)).trajectory.turns

    assert len(read) == len(turns)
    for one, other in zip(read, turns, strict=True):
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert one.sampled.ids.tolist() == other.sampled.ids.tolist()
        assert one.sampled.logprobs.tolist() == other.sampled.logprobs.tolist()
        assert one.sampled.policy_version == other.sampled.policy_version
        assert (one.origin, one.sampled.stop) == (other.origin, other.sampled.stop)


def test_a_long_conversation_is_written_once() -> None:
    history: list[Message] = messages_of("first question")
    calls: list[Call] = []
    turns: list[Turn] = []
    ids = [7, 8, 9]
    for i in range(30):
        reply = {"role": "assistant", "content": f"answer {i}."}
        calls.append(call(history, reply, tools=True))
        turns.append(turn(ids, [100 + i]))
        history = [*history, reply, *messages_of(f"question {i}.")]
        ids = [*ids, 100 + i, 200 + i]

    text = transcript_text(attempt(calls, turns), "train")

    assert text.count('"answer 3."') == 1
    assert text.count('"question 3."') == 1
    assert text.count('"parameters"') == 1
    assert [row["context_ids"] for row in json.loads(text)["turns"][:3]] == [
        [7, 8, 9],
        [200],
        [201],
    ]


def test_a_list_of_numbers_stands_on_one_line() -> None:
    text = transcript_text(attempt(turns=[turn(range(500), range(300))]), "train")

    assert [line for line in text.splitlines() if '"sampled_ids"' in line] == [
        f'   "sampled_ids": [{",".join(map(str, range(300)))}],'
    ]


def test_an_object_that_is_no_transcript_is_an_error() -> None:
    with pytest.raises(ValueError, match="purpose"):
        transcript_of({"schema": 1})
