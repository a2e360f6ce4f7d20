"""Two policies are compared on the tasks of both, and chance is counted, not guessed."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.attempts import Fate
from loops_cookbook.recipes.comparison import EXACT, compare, difference, sign_flip
from loops_cookbook.records import EvaluationRow, TaskResult

gaps = st.lists(st.sampled_from([-1.0, -0.5, -0.1, 0.0, 0.3, 0.5, 1.0]), max_size=7)


def row(policy: str, **rewards: tuple[float | None, ...]) -> EvaluationRow:
    tasks = tuple(
        TaskResult(task=name, group=i, rewards=each, fates=(Fate.EVALUATED,) * len(each))
        for i, (name, each) in enumerate(rewards.items())
    )
    return EvaluationRow(
        set="held_out",
        update=0,
        policy_version=0,
        at=0.0,
        seconds=0.0,
        attempts=2,
        solved_at=1.0,
        reward_mean=None,
        solve_rate=None,
        pass_at_k={},
        fates={},
        tasks=tasks,
        policy=policy,
    )


@given(gaps)
def test_few_tasks_are_flipped_in_every_way(values: list[float]) -> None:
    signs = product((1, -1), repeat=len(values))
    sums = [abs(sum(s * v for s, v in zip(each, values, strict=True))) for each in signs]
    as_far = sum(total >= abs(sum(values)) - 1e-9 for total in sums)
    assert sign_flip(np.array(values)) == pytest.approx(as_far / len(sums))


@given(gaps)
def test_who_comes_first_changes_the_sign_alone(values: list[float]) -> None:
    zeros = [0.0] * len(values)
    if not values:
        return
    one, other = difference(zeros, values), difference(values, zeros)
    assert one is not None
    assert other is not None
    assert one.p_value == other.p_value
    assert one.difference == -other.difference
    assert (one.better, one.worse, one.equal) == (other.worse, other.better, other.equal)


def test_differences_that_come_to_nothing_but_for_rounding_are_chance() -> None:
    """They sum to 1e-16, and ways to flip them that sum to 0 were taken to be less far from it."""
    ends = [(1, 0), (0, 2), (7, 4), (8, 2), (1, 3), (0, 3), (2, 6), (1, 4), (9, 5)]
    values = np.array([a / 10 - b / 10 for a, b in ends])
    assert 0 < abs(values.sum()) < 1e-15
    assert sign_flip(values) == 1.0


def test_the_same_difference_on_all_tasks_has_no_interval() -> None:
    """Two tasks that both policies solve had one of [0.000, 0.000]."""
    found = difference([1.0, 1.0], [1.0, 1.0])
    assert found is not None
    assert found.interval is None


def test_more_tasks_are_drawn_close_to_what_counting_gives() -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(0.4, 1.0, size=EXACT + 2)
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate((sums + value, sums - value))
    exact = float((np.abs(sums) >= abs(values.sum()) - 1e-9).mean())
    assert 0.01 < exact < 0.5
    assert sign_flip(values) == pytest.approx(exact, abs=0.015)


def test_a_drawn_chance_is_never_none() -> None:
    assert 0 < sign_flip(np.ones(200)) < 1e-4


def test_policies_that_are_alike_seldom_look_different() -> None:
    rng = np.random.default_rng(5)
    found = [sign_flip(rng.choice([-0.5, 0.0, 0.5], size=12)) < 0.05 for _ in range(200)]
    assert sum(found) / len(found) <= 0.08


def test_a_difference_is_of_means_of_the_same_tasks() -> None:
    first = row("base", a=(0.0, 1.0), b=(0.0, 0.0), c=(1.0, 1.0))
    second = row("runs/x@2", a=(1.0, 1.0), b=(0.5, 0.5), c=(1.0, 1.0))
    found = compare(first, second)
    assert found is not None
    assert found.reward is not None
    assert found.solved is not None
    assert (found.first, found.second) == ("base", "runs/x@2")
    assert found.reward.difference == pytest.approx(1 / 3)
    assert (found.reward.better, found.reward.worse, found.reward.equal) == (2, 0, 1)
    assert found.reward.p_value == 0.5
    assert found.solved.difference == pytest.approx(1 / 6)
    low, high = found.reward.interval or (0, 0)
    assert 0.0 <= low < found.reward.difference < high <= 0.5
    assert [task.task for task in found.tasks] == ["a", "b", "c"]


def test_a_task_that_one_has_no_reward_for_counts_in_neither() -> None:
    found = compare(
        row("a", a=(0.0, None), b=(None, None), c=(1.0, 1.0)),
        row("b", a=(1.0, 1.0), b=(1.0, 1.0), c=(None, None)),
    )
    assert found is not None
    assert found.reward is not None
    assert found.unpaired == 2
    assert (found.reward.first, found.reward.second) == (0.0, 1.0)
    assert found.reward.interval is None
    assert compare(row("a", a=(None,)), row("b", a=(1.0,))) is None


def test_sums_of_tenths_that_should_be_equal_are() -> None:
    found = compare(row("a", a=(0.1 + 0.2,)), row("b", a=(0.3,)))
    assert found is not None
    assert found.reward is not None
    assert found.reward.equal == 1
    assert found.reward.p_value == 1.0
