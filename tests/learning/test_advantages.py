from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.learning.builders import attempt, group

from loops_cookbook.attempts import Group, Rejection
from loops_cookbook.learning.advantages import AdvantageKind, Advantages, judge

KINDS: tuple[AdvantageKind, ...] = ("mean", "mean_std", "rloo")

rewards_of_a_group = st.lists(
    st.none() | st.floats(-100, 100, allow_nan=False), min_size=2, max_size=16
)


def usable(settled: Group, kind: AdvantageKind = "mean") -> Advantages:
    verdict = judge(settled, advantage=kind)
    assert isinstance(verdict, Advantages)
    return verdict


def test_the_mean_is_over_the_attempts_that_have_a_reward() -> None:
    """Attempts whose sandbox could not start once counted as reward 0."""
    verdict = usable(group(None, 0.0, None, 0.0, None, 1.0, None, None))
    assert verdict.attempts == (1, 3, 5)
    assert verdict.values == pytest.approx([-1 / 3, -1 / 3, 2 / 3])


def test_mean_std_divides_by_the_sample_standard_deviation() -> None:
    values = usable(group(0.0, 1.0, 2.0), "mean_std").values
    assert values == pytest.approx([-1.0, 0.0, 1.0])


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    values = usable(group(0.0, 1.0, 5.0), "rloo").values
    assert values == pytest.approx([0 - 3, 1 - 2.5, 5 - 0.5])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rewards", [(1.0, 2.0, 3.0), (0.1, 0.2, 0.3), (1e6, 1e6 + 0.1, 1e6 + 0.2)])
def test_a_reward_at_the_mean_has_no_advantage_at_all(
    kind: AdvantageKind, rewards: tuple[float, ...]
) -> None:
    """Rounding left 0.2 among 0.1 and 0.3 an advantage of 1e-17, and a datum was sent for it."""
    low, middle, high = usable(group(*rewards), kind).values
    assert low < middle == 0 < high


def test_a_group_of_tiny_differences_keeps_them() -> None:
    assert usable(group(0.0, 1e-6, 2e-6)).values == pytest.approx([-1e-6, 0, 1e-6])


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_equal_rewards_is_rejected(kind: AdvantageKind) -> None:
    assert judge(group(0.5, 0.5, 0.5), advantage=kind) == Rejection("no_variance")


def test_rewards_that_differ_by_rounding_alone_are_equal() -> None:
    assert judge(group(0.1 + 0.2, 0.3)) == Rejection("no_variance")
    assert judge(group(0.0, 1e-6)) == Rejection("no_variance")


def test_rewards_a_thousandth_apart_differ() -> None:
    assert usable(group(0.3, 0.301)).values == pytest.approx([-0.0005, 0.0005])


@pytest.mark.parametrize("rewards", [(None, None), (1.0, None), (None, 0.0, None)])
def test_a_group_with_fewer_than_two_rewards_is_rejected(rewards: tuple[float | None, ...]) -> None:
    assert judge(group(*rewards)) == Rejection("too_few")


def test_an_attempt_without_a_sequence_to_train_does_not_count() -> None:
    settled = replace(
        group(0.0, 1.0), attempts=(attempt(0, 0.0), attempt(1, 1.0, rows=()), attempt(2, 0.0))
    )
    assert judge(settled) == Rejection("no_variance")


def test_advantages_belong_to_attempts_by_their_index() -> None:
    settled = replace(group(0.0), attempts=(attempt(4, 0.0), attempt(7, 1.0)))
    assert usable(settled).attempts == (4, 7)


@given(rewards=rewards_of_a_group, kind=st.sampled_from(KINDS))
def test_advantages_sum_to_nothing_and_keep_the_order_of_rewards(
    rewards: list[float | None], kind: AdvantageKind
) -> None:
    verdict = judge(group(*rewards), advantage=kind)
    assume(isinstance(verdict, Advantages))
    assert isinstance(verdict, Advantages)
    known = np.array([reward for reward in rewards if reward is not None])
    assert np.isfinite(verdict.values).all()
    assert verdict.values.sum() == pytest.approx(0, abs=1e-6)
    assert (verdict.values[known == known.max()] > 0).all()
    assert (verdict.values[known == known.min()] < 0).all()


@given(rewards=rewards_of_a_group, shift=st.floats(-50, 50))
def test_adding_the_same_to_every_reward_changes_no_advantage(
    rewards: list[float | None], shift: float
) -> None:
    verdict = judge(group(*rewards))
    moved = judge(group(*(None if r is None else r + shift for r in rewards)), tolerance=0)
    assume(isinstance(verdict, Advantages))
    assert isinstance(verdict, Advantages)
    assert isinstance(moved, Advantages)
    assert moved.values == pytest.approx(verdict.values, abs=1e-9)
