"""How much of an evaluation set a policy solved: its row.

Means are over the attempts with a reward; the others are counted beside them, never as 0.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from loops_cookbook.attempts import Fate, Group
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


def evaluation_row(facts: EvaluationFacts) -> EvaluationRow:
    """Means over the attempts with a reward; the others are counted beside them."""
    attempts = max((len(group.attempts) for group in facts.groups), default=0)
    rewards = [a.reward for group in facts.groups for a in group.attempts if a.reward is not None]
    solved = [_is_solved(reward, facts.solved_at) for reward in rewards]
    tasks = [
        TaskResult(
            task=group.task,
            group=group.serial,
            rewards=tuple(attempt.reward for attempt in group.attempts),
            fates=tuple(
                Fate.EVALUATED if attempt.discarded is None else attempt.discarded.fate
                for attempt in group.attempts
            ),
        )
        for group in facts.groups
    ]
    passes = {k: _mean_pass_at(k, tasks, facts.solved_at) for k in _ks(attempts)}
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
        pass_at_k={k: value for k, value in passes.items() if value is not None},
        fates=dict(sorted(Counter(fate.value for task in tasks for fate in task.fates).items())),
        tasks=tuple(tasks),
    )


def pass_at(k: int, *, attempts: int, solved: int) -> float:
    """The chance that at least one of k attempts, drawn from these, solved the task.

    Unbiased where `k <= attempts`. Source: Chen et al. 2021 (arXiv:2107.03374), section 2.1.
    """
    return 1.0 - math.comb(attempts - solved, k) / math.comb(attempts, k)


def _is_solved(reward: float, solved_at: float) -> bool:
    return reward >= solved_at - _TOLERANCE


def _ks(attempts: int) -> list[int]:
    """The powers of two up to the number of attempts, and that number; none for one attempt."""
    powers = {2**i for i in range(1, attempts.bit_length())}
    return sorted(powers | {attempts}) if attempts > 1 else []


def _mean_pass_at(k: int, tasks: Sequence[TaskResult], solved_at: float) -> float | None:
    chances: list[float] = []
    for task in tasks:
        rewards = [reward for reward in task.rewards if reward is not None]
        if len(rewards) >= k:
            solved = sum(_is_solved(reward, solved_at) for reward in rewards)
            chances.append(pass_at(k, attempts=len(rewards), solved=solved))
    return fmean(chances) if chances else None
