"""Sums over groups that come one by one are those over all of them at once."""

import gc
import math
import weakref
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.attempts import Attempt, Discarded, Fate, Group, Rejection
from loops_cookbook.recipes.tally import Labels, Moments, Tally, rollout_rows, told_of_cuts
from loops_cookbook.records import RolloutRow
from loops_cookbook.tokens import SampledTokens, Trajectory, Turn, ids_of, logprobs_of

WITHOUT_REWARD = [fate for fate in Fate if fate.kind == "discarded"]


def attempt(reward: float | None, *, why: Fate = Fate.FAILED, logprob: float = -0.5) -> Attempt:
    sampled = SampledTokens(ids_of([5]), logprobs_of([logprob]), "stop")
    return Attempt(
        group=0,
        index=0,
        task="orders",
        reward=reward,
        discarded=None if reward is not None else Discarded(why, "why", "OSError"),
        trajectory=Trajectory((Turn(ids_of([1, 2]), sampled),)),
    )


def group(*attempts: Attempt) -> Group:
    return Group(0, "orders", 0, "tasks.jsonl:1", 0, 3, attempts)


def rows_of(group: Group, why: Rejection | None) -> list[RolloutRow]:
    return rollout_rows(group, Fate.TRAINED if why is None else why.fate)


@pytest.mark.parametrize("why", WITHOUT_REWARD)
def test_an_attempt_without_a_reward_keeps_its_fate_in_any_group(why: Fate) -> None:
    lost = attempt(None, why=why)
    one = group(attempt(1.0), lost)

    for rewarded in (Fate.TRAINED, Fate.TOO_FEW, Fate.NO_VARIANCE):
        assert [row.fate for row in rollout_rows(one, rewarded)] == [rewarded, why]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_moments_are_those_of_all_numbers_at_once(numbers: list[float]) -> None:
    moments = Moments()
    for number in numbers:
        moments.add(number)

    assert moments.mean == pytest.approx(fmean(numbers), rel=1e-9, abs=1e-6)
    assert moments.std == pytest.approx(stdev(numbers) if len(numbers) > 1 else 0, abs=1e-3)
    assert (moments.least, moments.most) == (min(numbers), max(numbers))


def test_the_entropy_weighs_every_token_the_same() -> None:
    tally = Tally(Labels())
    tally.add(rows_of(group(attempt(1.0, logprob=-1.0), attempt(None, logprob=-2.0)), None), None)
    why = Rejection("no_variance")
    tally.add(rows_of(group(attempt(0.0, logprob=-6.0)), why), why)

    assert tally.means()["entropy"] == pytest.approx(3.0)


@pytest.mark.parametrize(("stops", "is_told"), [("ll", True), ("ls", True), ("lss", False)])
def test_half_of_the_replies_cut_are_told_and_all_are_counted(stops: str, is_told: bool) -> None:
    """A limit too low was seen in no metric and no line of a run."""
    tally = Tally(Labels())
    for stop in stops:
        whole = attempt(1.0)
        (turn,) = whole.trajectory.turns
        stop = "length" if stop == "l" else "stop"
        sampled = SampledTokens(ids_of([5, 6]), logprobs_of([-0.5, -0.5]), stop)
        one = group(replace(whole, trajectory=Trajectory((replace(turn, sampled=sampled),))))
        tally.add(rows_of(one, None), None)
    counts = tally.counts
    assert (counts["turns/sampled"], counts["turns/cut"]) == (len(stops), stops.count("l"))
    told = told_of_cuts(counts["turns/sampled"], counts["turns/cut"], max_tokens=2, enough=True)
    assert (told is not None) == is_told
    if told is not None:
        assert told.startswith(f"{stops.count('l')} of {len(stops)} replies were cut")


@pytest.mark.parametrize(
    ("max_tokens", "enough", "is_told"), [(1, True, False), (1, False, True), (256, True, True)]
)
def test_replies_of_one_token_are_meant_to_be_where_that_is_asked_for_and_enough(
    max_tokens: int, enough: bool, is_told: bool
) -> None:
    """Replies that a full context left one token for, or a limit of 1 by mistake, were silent."""
    told = told_of_cuts(8, 8, max_tokens=max_tokens, enough=enough, limit="its.max_tokens")
    assert (told is not None) == is_told
    assert told is None or "raise the limit (its.max_tokens, " in told


def test_nothing_of_a_group_is_kept() -> None:
    """A row kept its rejected groups whole, 18 KB each, until its batch was full."""
    tally = Tally(Labels())
    one = group(attempt(1.0))
    ids = weakref.ref(one.attempts[0].trajectory.turns[0].prompt_ids)
    tally.add(rows_of(one, Rejection("no_variance")), Rejection("no_variance"))
    del one
    gc.collect()

    assert ids() is None


def test_a_tally_of_nothing_has_counts_of_0_and_no_means() -> None:
    tally = Tally(Labels())

    assert set(tally.counts.values()) == {0}
    assert tally.rewards() | tally.recorded() | tally.means() == {}


def test_means_are_finite_where_logprobs_are_large() -> None:
    tally = Tally(Labels())
    large = group(*(attempt(1.0, logprob=float(np.float32(-1e30))) for _ in range(9)))
    tally.add(rows_of(large, None), None)

    assert math.isfinite(tally.means()["entropy"])


def test_a_number_that_no_mean_can_hold_counts_in_none() -> None:
    """A huge int out of a custom runtime ended the run, as a bug of this package."""
    tally = Tally(Labels())
    attempts = [replace(attempt(1.0), metadata={"n": n}) for n in (10**400, math.inf, 3)]
    tally.add(rows_of(group(*attempts), None), None)

    assert tally.recorded() == {"rollout/n": 3.0}
