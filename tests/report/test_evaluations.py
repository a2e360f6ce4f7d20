"""Scores and differences stand in columns, each with how sure it is."""

from dataclasses import replace

from loops_cookbook.attempts import Fate
from loops_cookbook.recipes.comparison import compare
from loops_cookbook.records import EvaluationRow, TaskResult
from loops_cookbook.report.evaluations import evaluation_lines

ROW = EvaluationRow(
    set="held_out",
    update=0,
    policy_version=0,
    at=0.0,
    seconds=1.0,
    attempts=2,
    solved_at=1.0,
    reward_mean=0.25,
    solve_rate=0.25,
    pass_at_k={2: 0.5},
    fates={"discarded/failed": 1, "evaluated": 4},
    tasks=(),
    policy="base",
    reward_interval=(0.0, 0.5),
    solve_rate_interval=(0.0, 0.5),
    pass_at_k_intervals={2: (0.095, 0.905)},
)


def tasks(*rewards: tuple[float | None, ...]) -> tuple[TaskResult, ...]:
    return tuple(
        TaskResult(task=str(i), group=i, rewards=each, fates=(Fate.EVALUATED,) * len(each))
        for i, each in enumerate(rewards)
    )


def test_each_policy_of_a_set_is_a_line_with_its_intervals_and_its_losses() -> None:
    other = replace(ROW, policy="runs/a@10", fates={"evaluated": 5})
    greedy = replace(ROW, set="greedy", pass_at_k={}, fates={"evaluated": 1})
    assert evaluation_lines([ROW, other, greedy], []) == [
        "held_out: 5 attempts each",
        "policy     reward                solved               pass@2               lost",
        "base       0.250 [0.000, 0.500]  25.0% [0.0%, 50.0%]  50.0% [9.5%, 90.5%]  1",
        "runs/a@10  0.250 [0.000, 0.500]  25.0% [0.0%, 50.0%]  50.0% [9.5%, 90.5%]",
        "",
        "greedy: 1 attempt",
        "policy  reward                solved",
        "base    0.250 [0.000, 0.500]  25.0% [0.0%, 50.0%]",
        "",
        "[low, high]: 95 % confidence, over tasks",
    ]


def test_a_policy_that_is_called_as_runs_are_has_its_line_in_120_columns() -> None:
    """A line had 135: the set and `(k = 4)` stood in each."""
    named = replace(ROW, policy="runs/terminal_bench/20260101-120000-4f2a@1000")
    assert max(map(len, evaluation_lines([named], []))) <= 120


def test_a_loss_alone_has_no_columns_of_attempts() -> None:
    row = replace(ROW, loss=0.4, fates={}, pass_at_k={}, reward_mean=None, solve_rate=None)
    assert evaluation_lines([row], [])[:3] == ["held_out", "policy  loss", "base    0.400"]


def test_two_policies_stand_side_by_side() -> None:
    first = replace(ROW, tasks=tasks((0.0, 0.5), (0.0, 0.0), (None, None)))
    second = replace(ROW, policy="runs/a@10", tasks=tasks((1.0, 1.0), (0.0, 1.0), (1.0, 1.0)))
    compared = compare(first, second)
    assert compared is not None
    assert compared.loss is None
    assert evaluation_lines([first], [compared])[-5:] == [
        "held_out: runs/a@10 minus base",
        "        difference                p    better  worse  equal",
        "reward  +0.625 [+0.500, +0.750]   0.5  2       0      0",
        "solved  +75.0% [+50.0%, +100.0%]  0.5  2       0      0",
        "left out: 1 task without a reward of both policies",
    ]


def test_a_lower_loss_is_better() -> None:
    first = replace(ROW, row_losses={"a:1": 0.5, "a:2": 1.0})
    second = replace(ROW, policy="runs/a@10", row_losses={"a:1": 0.25, "a:2": 0.75})
    compared = compare(first, second)
    assert compared is not None
    assert evaluation_lines([first], [compared])[-2:] == [
        "      difference  p    better  worse  equal",
        "loss  -0.250      0.5  2       0      0",
    ]
