"""How the turns of an attempt join into the rows that are trained."""

import math
from collections.abc import Sequence as AbstractSequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook import tokens
from loops_cookbook.tokens import (
    SampledTokens,
    Sequence,
    Trajectory,
    Turn,
    ids_of,
    logprobs_of,
    sequences,
)


def sampled(*ids: int, logprobs: AbstractSequence[float] | None = None) -> SampledTokens:
    return SampledTokens(ids_of(ids), logprobs_of(logprobs or [-0.5] * len(ids)), "stop")


def turn(prompt: AbstractSequence[int], *ids: int) -> Turn:
    return Turn(ids_of(prompt), sampled(*ids))


def rows_of(*turns: Turn) -> list[tuple[list[int], str]]:
    """Each row's ids, and its mask as a word: `s` for sampled, `.` for context."""
    return [
        (row.ids.tolist(), "".join("s" if is_sampled else "." for is_sampled in row.is_sampled))
        for row in sequences(Trajectory(turns))
    ]


def test_one_turn_is_one_row() -> None:
    assert rows_of(turn([1, 2], 3, 4)) == [([1, 2, 3, 4], "..ss")]


def test_a_turn_that_goes_on_joins_the_row() -> None:
    assert rows_of(turn([1], 2), turn([1, 2, 9], 3)) == [([1, 2, 9, 3], ".s.s")]


@pytest.mark.parametrize("turns", [2, 3, 10])
def test_a_conversation_of_many_turns_is_one_row(turns: int) -> None:
    """B5: keeping only the last turn's tokens as the prefix split episodes of three and more."""
    made: list[Turn] = []
    history: list[int] = []
    for index in range(turns):
        history += [100 + index]
        made.append(turn(history, 10 + index, 20 + index))
        history += [10 + index, 20 + index]
    [(ids, mask)] = rows_of(*made)
    assert ids == history
    assert mask == ".ss" * turns


def test_ids_that_the_tokenizer_would_not_write_are_kept() -> None:
    """B1: sampled "he" + "llo", where the tokenizer writes "hello" as one id."""
    he, llo, hello = 50, 51, 52
    kept = rows_of(turn([1], he, llo), turn([1, he, llo, 2], 3))
    assert kept == [([1, he, llo, 2, 3], ".ss.s")]
    again = rows_of(turn([1], he, llo), turn([1, hello, 2], 3))
    assert again == [([1, he, llo], ".ss"), ([1, hello, 2, 3], "...s")]


def test_a_rewritten_history_begins_a_new_row() -> None:
    assert rows_of(turn([1], 2), turn([1, 7, 9], 3)) == [([1, 2], ".s"), ([1, 7, 9, 3], "...s")]


def test_two_branches_of_one_turn_share_its_tokens_as_context() -> None:
    rows = rows_of(turn([1], 2), turn([1, 2, 8], 3), turn([1, 2, 9], 4))
    assert rows == [([1, 2, 8, 3], ".s.s"), ([1, 2, 9, 4], "...s")]


def test_the_longest_row_is_gone_on_with() -> None:
    rows = rows_of(turn([1], 2), turn([1, 2], 3), turn([1, 2, 3], 4))
    assert rows == [([1, 2, 3, 4], ".sss")]
    rows = rows_of(turn([1], 2), turn([1], 2, 3), turn([1, 2, 3], 4))
    assert rows == [([1, 2], ".s"), ([1, 2, 3, 4], ".sss")]


def test_a_turn_that_ended_late_may_stand_before_one_that_ended_early() -> None:
    """Joined in the order of their ends, these three turns once made two rows."""
    rows = rows_of(turn([1, 2], 3), turn([1], 2), turn([1, 2, 3], 4))
    assert rows == [([1, 2, 3, 4], ".sss")]


def test_rows_are_found_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that called its model 9,000 times held the event loop for two minutes when it ended:
    each prompt was compared with each row."""
    looks: list[Turn] = []

    def look(turn: Turn, earlier: Turn) -> bool:
        looks.append(turn)
        return goes_on_with(turn, earlier)

    goes_on_with = tokens._goes_on_with  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(tokens, "_goes_on_with", look)
    first = [turn([1] * n, n, 9) for n in range(1, 200)]
    second = [turn([*[1] * n, n, 9, 5], 7) for n in range(1, 200)]
    rows = sequences(Trajectory((*first, *second)))
    assert [len(row.ids) for row in rows] == [n + 4 for n in range(1, 200)]
    assert len(looks) == len(second)


def test_rows_that_end_alike_are_told_apart_by_how_they_begin() -> None:
    long = [0] * 100
    rows = rows_of(turn([1, *long], 9), turn([2, *long], 9), turn([2, *long, 9, 3], 9))
    assert rows == [
        ([1, *long, 9], "." * 101 + "s"),
        ([2, *long, 9, 3, 9], "." * 101 + "s.s"),
    ]


def test_a_turn_without_a_token_adds_nothing() -> None:
    assert rows_of(turn([1, 2])) == []
    assert rows_of(turn([1], 2), turn([1, 2, 9]), turn([1, 2, 9, 9], 3)) == [
        ([1, 2, 9, 9, 3], ".s..s")
    ]


def test_logprobs_stand_at_their_tokens_and_zero_elsewhere() -> None:
    one = Turn(ids_of([1]), sampled(2, 3, logprobs=[-0.5, -0.25]))
    two = Turn(ids_of([1, 2, 3, 9]), sampled(4, logprobs=[-0.125]))
    [row] = sequences(Trajectory((one, two)))
    assert row.logprobs.tolist() == [0, -0.5, -0.25, 0, -0.125]
    assert row.sampled_tokens == 3


def test_a_trajectory_counts_its_tokens() -> None:
    trajectory = Trajectory((turn([1, 2], 3), turn([1, 2, 3, 4], 5, 6)))
    assert trajectory.totals()[:2] == (6, trajectory.sampled_tokens) == (6, 3)


def test_rows_cannot_be_written_to() -> None:
    [row] = sequences(Trajectory((turn([1], 2),)))
    for array in (row.ids, row.logprobs, row.is_sampled, ids_of([1]), logprobs_of([1.0])):
        assert not array.flags.writeable


def test_a_sampler_must_give_one_logprob_for_each_token() -> None:
    """B2: a completion tokenized again was shorter than its mask."""
    with pytest.raises(ValueError, match=r"\(2,\) ids and \(1,\) logprobs"):
        SampledTokens(ids_of([1, 2]), logprobs_of([-0.5]), "stop")


@pytest.mark.parametrize(
    "logprobs",
    [[math.nan], [-math.inf], [math.inf], [math.inf, -math.inf], [-1.0, math.nan, -1.0]],
)
def test_a_logprob_must_be_finite(logprobs: list[float]) -> None:
    with pytest.raises(ValueError, match="not finite"):
        SampledTokens(ids_of([1] * len(logprobs)), logprobs_of(logprobs), "stop")


def test_the_least_logprobs_there_are_add_up_to_a_finite_number() -> None:
    least = float(np.finfo(np.float32).min)
    sampled = SampledTokens(ids_of([1] * 3), logprobs_of([least] * 3), "stop")
    assert sampled.logprob_sum == 3 * least


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Turns over few ids, that go on with an earlier turn, with a part of one, or with none."""
    ids = st.lists(st.integers(0, 2), max_size=3)
    turns: list[Turn] = []
    serial = 0
    for _ in range(draw(st.integers(0, 8))):
        prompt = draw(ids)
        if turns and draw(st.booleans()):
            earlier = draw(st.sampled_from(turns))
            whole = [*earlier.prompt_ids.tolist(), *earlier.sampled.ids.tolist()]
            prompt = whole[: draw(st.integers(0, len(whole)))] + prompt
        said = draw(ids)
        logprobs = [-(serial + index + 1) / 16 for index in range(len(said))]
        serial += len(said)
        turns.append(Turn(ids_of(prompt), sampled(*said, logprobs=logprobs)))
    return Trajectory(tuple(turns))


@given(trajectory=trajectories())
@settings(deadline=None)
def test_each_sampled_token_stands_in_exactly_one_row(trajectory: Trajectory) -> None:
    rows = sequences(trajectory)
    # Every sampled token has a logprob of its own here, by which it is told from the others.
    expected = {
        p: i
        for t in trajectory.turns
        for p, i in zip(t.sampled.logprobs.tolist(), t.sampled.ids.tolist(), strict=True)
    }
    found = [pair for row in rows for pair in _trained(row)]
    assert len(found) == len(expected) == trajectory.sampled_tokens
    assert dict(found) == expected


@given(trajectory=trajectories())
@settings(deadline=None)
def test_context_has_no_logprob_and_every_row_has_something_to_train(
    trajectory: Trajectory,
) -> None:
    for row in sequences(trajectory):
        assert len(row.ids) == len(row.logprobs) == len(row.is_sampled)
        assert not row.logprobs[~row.is_sampled].any()
        assert row.sampled_tokens > 0


@given(trajectory=trajectories())
@settings(deadline=None)
def test_each_sampled_token_follows_the_prompt_that_it_was_sampled_from(
    trajectory: Trajectory,
) -> None:
    rows = sequences(trajectory)
    for t in trajectory.turns:
        whole = np.concatenate([t.prompt_ids, t.sampled.ids])
        if len(t.sampled.ids):
            assert any(np.array_equal(row.ids[: len(whole)], whole) for row in rows)


@given(trajectory=trajectories())
@settings(deadline=None)
def test_no_other_way_to_join_the_turns_gives_fewer_rows(trajectory: Trajectory) -> None:
    said = [t for t in trajectory.turns if len(t.sampled.ids)]
    assert len(sequences(trajectory)) == len(said) - _most_that_go_on(said)


def _most_that_go_on(turns: AbstractSequence[Turn]) -> int:
    """The most turns that can each go on with a turn of their own, by augmenting paths."""
    whole = [np.concatenate([t.prompt_ids, t.sampled.ids]) for t in turns]
    before = [
        [i for i, w in enumerate(whole) if np.array_equal(t.prompt_ids[: len(w)], w)] for t in turns
    ]
    taken: dict[int, int] = {}

    def finds(turn: int, tried: set[int]) -> bool:
        for i in before[turn]:
            if i not in tried:
                tried.add(i)
                if i not in taken or finds(taken[i], tried):
                    taken[i] = turn
                    return True
        return False

    return sum(finds(turn, set()) for turn in range(len(turns)))


def test_a_trajectory_tells_each_version_that_it_was_sampled_from_once() -> None:
    def of_version(version: int | None, ids: list[int]) -> Turn:
        sampled = SampledTokens(ids_of(ids), logprobs_of([-0.5] * len(ids)), "stop", version)
        return Turn(ids_of([1]), sampled)

    turns = (
        of_version(4, [7]),
        of_version(3, [7]),
        of_version(None, [7]),
        of_version(4, [7]),
        of_version(9, []),
    )
    assert Trajectory(turns).totals().policy_versions == (3, 4)


def _trained(row: Sequence) -> list[tuple[float, int]]:
    logprobs, ids = row.logprobs[row.is_sampled].tolist(), row.ids[row.is_sampled].tolist()
    return list(zip(logprobs, ids, strict=True))
