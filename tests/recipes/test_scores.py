"""An evaluation counts what was solved among the attempts with a reward, and the rest beside it."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.attempts import Attempt, Discarded, Fate, Group
from loops_cookbook.recipes.scores import (
    EvaluationFacts,
    evaluation_row,
    pass_at,
)
from loops_cookbook.records import EvaluationRow


def task(name: str, *rewards: float | None) -> Group:
    lost = Discarded(Fate.UNGRADED)
    attempts = tuple(
        Attempt(7, i, name, reward=reward, discarded=lost if reward is None else None)
        for i, reward in enumerate(rewards)
    )
    return Group(7, name, 0, "held_out.jsonl:1", 0, 2, attempts)


def row(*groups: Group, solved_at: float = 1.0) -> EvaluationRow:
    return evaluation_row(
        EvaluationFacts(
            set="held_out",
            update=10,
            policy_version=2,
            groups=groups,
            solved_at=solved_at,
            at=5.0,
            seconds=1.0,
        )
    )


def test_means_are_over_the_attempts_with_a_reward() -> None:
    made = row(task("a", 1.0, 0.0, None, None), task("b", 1.0, 0.5, 0.0, None))

    assert made.reward_mean == 0.5
    assert made.solve_rate == 0.4
    assert made.fates == {"discarded/ungraded": 3, "evaluated": 5}
    assert made.attempts == 4


def test_each_tasks_rewards_and_fates_are_kept() -> None:
    result = row(task("a", 1.0, None)).tasks[0]

    assert (result.task, result.group, result.rewards) == ("a", 7, (1.0, None))
    assert result.fates == (Fate.EVALUATED, Fate.UNGRADED)


def test_a_sum_of_tenths_that_falls_short_of_one_is_solved() -> None:
    assert row(task("a", sum([0.1] * 10), 0.999)).solve_rate == 0.5


def test_what_counts_as_solved_is_the_sets_own() -> None:
    assert row(task("a", 0.4, 0.6), solved_at=0.5).solve_rate == 0.5


@given(attempts=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_solved_attempt(
    attempts: int, data: st.DataObject
) -> None:
    solved = data.draw(st.integers(0, attempts))
    k = data.draw(st.integers(1, attempts))
    draws = list(combinations(range(attempts), k))
    lucky = [draw for draw in draws if min(draw) < solved]

    assert pass_at(k, attempts=attempts, solved=solved) == pytest.approx(len(lucky) / len(draws))


def test_pass_at_k_is_told_for_powers_of_two_and_for_all_attempts() -> None:
    made = row(task("a", 1.0, *[0.0] * 5), task("b", *[0.0] * 6))

    assert list(made.pass_at_k) == [2, 4, 6]
    assert made.pass_at_k[6] == 0.5


def test_one_attempt_has_no_pass_at_k() -> None:
    assert row(task("a", 1.0), task("b", 0.0)).pass_at_k == {}


def test_pass_at_k_leaves_out_tasks_with_fewer_rewards() -> None:
    made = row(task("a", 1.0, 1.0, None), task("b", 0.0, None, None))

    assert made.pass_at_k == {2: 1.0}


def test_an_evaluation_in_which_nothing_was_graded_has_no_means() -> None:
    made = row(task("a", None, None))

    assert (made.reward_mean, made.solve_rate, made.pass_at_k) == (None, None, {})
    assert made.metrics == {}


def test_metrics_carry_the_name_of_the_set() -> None:
    assert row(task("a", 1.0, 0.0)).metrics == {
        "eval/held_out/reward_mean": 0.5,
        "eval/held_out/solve_rate": 0.5,
        "eval/held_out/pass_at_2": 1.0,
    }
