"""Two policies on the same tasks: how far apart they are, and whether that could be chance.

Each task that both have a reward for gives one difference, of its mean rewards or of its shares of
solved attempts, and each held-out row one of its loss; so what makes it hard for both falls out.
The p-value is that of the sign-flip
permutation test on the mean difference, two-sided: if the policies were alike, each difference
might as well have had the other sign. All ways to flip are counted where at most `EXACT` tasks
differ; beyond that `FLIPS` seeded draws. The interval is the paired bootstrap's over tasks.

Sources: Fisher 1935, The Design of Experiments, section 21; Phipson and Smyth 2010 (+1 in drawn
p-values).
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from loops_cookbook.recipes.intervals import Floats, Interval, percentiles, resampled_sums
from loops_cookbook.recipes.scores import is_solved
from loops_cookbook.records import EvaluationRow, Row, TaskResult
from loops_cookbook.values import value

EXACT = 16
"""Tasks that differ, up to which every way to flip them is counted."""
FLIPS = 20_000
_AT_ONCE = 1_000_000
_CLOSE = 1e-9
"""Sums closer than this, for the size of what they add, are equal: they are of the same numbers,
added otherwise than in the same order."""


@value(kw_only=True)
class Difference(Row):
    """A score of one policy minus that of another, over the tasks of both."""

    first: float
    second: float
    difference: float
    """Second minus first."""
    interval: Interval | None
    """Of the difference; None of one task, or of the same difference on all."""
    p_value: float
    better: int
    """Tasks on which the second is; of a loss, on which it is lower."""
    worse: int
    equal: int


@value(kw_only=True)
class PairedTask(Row):
    """One task, and what both came to on average."""

    task: str
    first_reward: float
    second_reward: float
    first_solved: float
    second_solved: float


@value(kw_only=True)
class Comparison(Row):
    """Two policies on one set."""

    set: str
    first: str
    second: str
    """Each as it was named."""
    loss: Difference | None
    """Of held-out rows: the mean over rows, whatever their lengths."""
    reward: Difference | None
    solved: Difference | None
    tasks: tuple[PairedTask, ...]
    unpaired: int
    """Tasks on which one of them has no attempt with a reward; they count in nothing here."""


def compare(first: EvaluationRow, second: EvaluationRow) -> Comparison | None:
    """Compare two policies on one set; None where nothing has a score of both."""
    before, after = _graded(first), _graded(second)
    names = [name for name in before if name in after]
    rows = [row for row in first.row_losses if row in second.row_losses]
    if not names and not rows:
        return None
    tasks = tuple(
        PairedTask(
            task=name[0],
            first_reward=fmean(before[name]),
            second_reward=fmean(after[name]),
            first_solved=fmean(is_solved(reward, first.solved_at) for reward in before[name]),
            second_solved=fmean(is_solved(reward, second.solved_at) for reward in after[name]),
        )
        for name in names
    )
    return Comparison(
        set=first.set,
        first=first.policy or "",
        second=second.policy or "",
        loss=difference(
            [first.row_losses[row] for row in rows],
            [second.row_losses[row] for row in rows],
            lower_is_better=True,
        ),
        reward=difference([t.first_reward for t in tasks], [t.second_reward for t in tasks]),
        solved=difference([t.first_solved for t in tasks], [t.second_solved for t in tasks]),
        tasks=tasks,
        unpaired=len(before.keys() | after.keys() | _all(first) | _all(second)) - len(names),
    )


def difference(
    first: Sequence[float], second: Sequence[float], *, lower_is_better: bool = False
) -> Difference | None:
    """How far apart two policies are, by a number of each for every task; None without a task.

    Args:
        first: of the one policy.
        second: of the other, in the same order.
        lower_is_better: as of a loss.
    """
    if not first:
        return None
    gaps = np.array(second, np.float64) - np.array(first, np.float64)
    gaps[np.abs(gaps) < _CLOSE] = 0.0
    sums = resampled_sums(gaps[:, None])[:, 0] if len(gaps) > 1 else None
    higher, lower = int((gaps > 0).sum()), int((gaps < 0).sum())
    return Difference(
        first=fmean(first),
        second=fmean(second),
        difference=float(gaps.mean()),
        interval=None if sums is None else percentiles(sums / len(gaps)),
        p_value=sign_flip(gaps),
        better=lower if lower_is_better else higher,
        worse=higher if lower_is_better else lower,
        equal=len(gaps) - higher - lower,
    )


def sign_flip(gaps: Floats) -> float:
    """The chance of a mean as far from 0, or farther, were each number's sign a coin's."""
    gaps = gaps[gaps != 0]  # whichever its sign, a 0 adds nothing
    if not len(gaps):
        return 1.0
    least = abs(gaps.sum()) - _CLOSE * np.abs(gaps).sum()
    if len(gaps) <= EXACT:
        sums = np.zeros(1)
        for gap in gaps:
            sums = np.concatenate((sums + gap, sums - gap))
        return float((np.abs(sums) >= least).mean())
    rng = np.random.default_rng(0)
    step = max(1, _AT_ONCE // len(gaps))
    as_far = 0
    for start in range(0, FLIPS, step):
        signs = 2.0 * rng.integers(2, size=(min(step, FLIPS - start), len(gaps))) - 1.0
        as_far += int((np.abs(signs @ gaps) >= least).sum())
    return (1 + as_far) / (1 + FLIPS)


def _graded(row: EvaluationRow) -> Mapping[tuple[str, int], list[float]]:
    """The rewards of each task that has any, by its name and place."""
    found: dict[tuple[str, int], list[float]] = {}
    for task in row.tasks:
        if rewards := [reward for reward in task.rewards if reward is not None]:
            found[_key(task)] = rewards
    return found


def _all(row: EvaluationRow) -> set[tuple[str, int]]:
    return {_key(task) for task in row.tasks}


def _key(task: TaskResult) -> tuple[str, int]:
    return task.task, task.group
