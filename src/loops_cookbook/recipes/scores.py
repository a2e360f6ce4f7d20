"""How much of an evaluation set a policy solved: its row.

Means are over the attempts with a reward; the others are counted beside them, never as 0. How sure
they are is told by `recipes.intervals`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from loops_cookbook.attempts import Fate, Group
from loops_cookbook.recipes.intervals import Interval, Ratio, ratio_intervals, share_interval
from loops_cookbook.records import EvaluationRow, TaskResult

_TOLERANCE = 1e-6  # as for equal rewards: a sum of tenths may fall short of 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFacts:
    """One evaluation of one set."""

    set: str
    update: int
    """How many updates the policy had."""
    policy_version: int
    groups: Sequence[Group]
    """One for each task."""
    solved_at: float
    at: float
    """Unix time."""
    seconds: float
    policy: str | None = None
    """What was evaluated, where that was not a run's own policy."""


@dataclass(frozen=True, slots=True)
class _Intervals:
    """How sure the scores are."""

    reward: Interval | None
    solve_rate: Interval | None
    pass_at_k: Mapping[int, Interval]


def evaluation_row(facts: EvaluationFacts) -> EvaluationRow:
    """Means over the attempts with a reward; the others are counted beside them."""
    attempts = max((len(group.attempts) for group in facts.groups), default=0)
    rewards = [a.reward for group in facts.groups for a in group.attempts if a.reward is not None]
    solved = [is_solved(reward, facts.solved_at) for reward in rewards]
    tasks = [
        TaskResult(
            task=group.task,
            group=group.serial,
            rewards=tuple(attempt.reward for attempt in group.attempts),
            fates=tuple(attempt.fate(Fate.EVALUATED) for attempt in group.attempts),
        )
        for group in facts.groups
    ]
    passes = {k: _passes(k, tasks, facts.solved_at) for k in _ks(attempts)}
    sure = _intervals(tasks, facts.solved_at, passes)
    return EvaluationRow(
        set=facts.set,
        update=facts.update,
        policy_version=facts.policy_version,
        at=facts.at,
        seconds=facts.seconds,
        attempts=attempts,
        solved_at=facts.solved_at,
        reward_mean=fmean(rewards) if rewards else None,
        solve_rate=fmean(solved) if solved else None,
        pass_at_k={k: sum(r.parts) / sum(r.weights) for k, r in passes.items() if any(r.weights)},
        fates=dict(sorted(Counter(fate.value for task in tasks for fate in task.fates).items())),
        tasks=tuple(tasks),
        policy=facts.policy,
        reward_interval=sure.reward,
        solve_rate_interval=sure.solve_rate,
        pass_at_k_intervals=sure.pass_at_k,
    )


def pass_at(k: int, *, attempts: int, solved: int) -> float:
    """The chance that at least one of k attempts, drawn from these, solved the task.

    Unbiased where `k <= attempts`. Source: Chen et al. 2021 (arXiv:2107.03374), section 2.1.
    """
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def is_solved(reward: float, solved_at: float) -> bool:
    """Whether a reward counts as solved, up to what rounding takes from it."""
    return reward >= solved_at - _TOLERANCE


def _ks(attempts: int) -> list[int]:
    """The powers of two up to the number of attempts, and that number; none for one attempt."""
    powers = {2**i for i in range(1, attempts.bit_length())}
    return sorted(powers | {attempts}) if attempts > 1 else []


def _passes(k: int, tasks: Sequence[TaskResult], solved_at: float) -> Ratio:
    """pass@k over the tasks that have k attempts with a reward."""
    chances: list[float] = []
    for task in tasks:
        rewards = _graded(task)
        solved = sum(is_solved(reward, solved_at) for reward in rewards)
        has_k = len(rewards) >= k
        chances.append(pass_at(k, attempts=len(rewards), solved=solved) if has_k else 0.0)
    return Ratio(chances, [float(len(_graded(task)) >= k) for task in tasks])


def _intervals(
    tasks: Sequence[TaskResult], solved_at: float, passes: Mapping[int, Ratio]
) -> _Intervals:
    graded = [_graded(task) for task in tasks]
    numbers = [float(len(rewards)) for rewards in graded]
    solved = [float(sum(is_solved(each, solved_at) for each in rewards)) for rewards in graded]
    rewards = Ratio([math.fsum(each) for each in graded], numbers)
    shares = [Ratio(solved, numbers), *passes.values()]
    reward, *bootstrapped = ratio_intervals([rewards, *shares])
    if all(reward in (0, 1) for each in graded for reward in each):
        reward = share_interval(rewards, reward)
    solve_rate, *of_passes = [
        share_interval(share, interval)
        for share, interval in zip(shares, bootstrapped, strict=True)
    ]
    told = zip(passes, of_passes, strict=True)
    return _Intervals(reward, solve_rate, {k: each for k, each in told if each is not None})


def _graded(task: TaskResult) -> list[float]:
    return [reward for reward in task.rewards if reward is not None]
