"""Intervals are over tasks, cover what they claim to, and never claim that nothing can fail."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loops_cookbook.recipes.intervals import Ratio, ratio_intervals, share_interval, wilson

shares = st.lists(st.floats(0, 1), min_size=2, max_size=30).filter(lambda s: max(s) - min(s) > 1e-6)


def interval(parts: list[float], weights: list[float] | None = None) -> tuple[float, float] | None:
    return ratio_intervals([Ratio(parts, weights or [1.0] * len(parts))])[0]


@pytest.mark.parametrize(
    ("share", "number", "expected"),
    [(0.0, 10, (0.0, 0.2775)), (0.5, 100, (0.4038, 0.5962)), (1.0, 20, (0.8389, 1.0))],
)
def test_wilsons_interval_is_that_of_the_tables(
    share: float, number: int, expected: tuple[float, float]
) -> None:
    assert wilson(share, number) == pytest.approx(expected, abs=1e-4)


@given(st.floats(0, 1), st.integers(1, 10_000))
@example(0.0, 7)
@example(1.0, 7)
def test_a_share_lies_within_wilsons_interval_of_it(share: float, number: int) -> None:
    """Rounding put the lower end for 0 of 7 at 4.9e-17, so the mean was outside of its interval."""
    low, high = wilson(share, number)
    assert 0 <= low <= share <= high <= 1


@given(shares)
def test_an_interval_lies_among_the_values_and_is_the_same_each_time(values: list[float]) -> None:
    found = interval(values)
    assert found is not None
    low, high = found
    assert min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    assert interval(values) == found


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        found = interval(list(rng.beta(2, 5, size=40)))
        assert found is not None
        held += found[0] <= 2 / 7 <= found[1]
    assert 0.9 <= held / 200 <= 0.99


def test_more_attempts_at_the_same_tasks_tell_nothing_of_other_tasks() -> None:
    few = interval([1.0, 0.0, 2.0, 1.0], [2.0] * 4)
    many = interval([50.0, 0.0, 100.0, 50.0], [100.0] * 4)
    assert few == pytest.approx(many)


def test_a_task_without_a_reward_counts_in_nothing() -> None:
    """Its weight is 0, and draws of such tasks alone have no mean."""
    found = interval([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0])
    assert found == (0.0, 1.0)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [0.0, 0.0]])
def test_fewer_than_two_tasks_have_no_interval(weights: list[float]) -> None:
    assert interval([1.0] * len(weights), weights) is None


def test_tasks_that_are_all_alike_tell_no_interval() -> None:
    """They had one without a width, such as [0.000, 0.000] of two tasks."""
    assert interval([0.1] * 7) is None
    assert interval([0.3, 0.6], [1.0, 2.0]) is None


def test_a_share_of_which_all_tasks_are_is_not_certain() -> None:
    solved = Ratio([4.0] * 10, [4.0] * 10)
    found = share_interval(solved, ratio_intervals([solved])[0])
    assert found == pytest.approx((0.7225, 1.0), abs=1e-4)


def test_a_share_of_parts_of_tasks_keeps_the_interval_of_the_draws() -> None:
    solved = Ratio([4.0, 2.0, 0.0], [4.0] * 3)
    (drawn,) = ratio_intervals([solved])
    assert share_interval(solved, drawn) == drawn
