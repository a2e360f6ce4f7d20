"""How sure an evaluation's means are: confidence intervals of 95 % over the tasks of a set.

A task is the unit, since its attempts are alike and tasks are what one wants to generalise over.
Each score is a ratio of sums over tasks, as of rewards and of attempts with a reward; its interval
is the percentile bootstrap's over tasks. A share (a mean of rewards that are 0 or 1 is one) whose
every task came out wholly one way or the other, as all do with one attempt each, has Wilson's
interval in its place, with tasks counted: resampling tasks that are all solved would claim that
nothing can fail. A set of one task has no interval, and neither have other scores of tasks that are
all alike, for the same reason.
The draws are seeded, so the same evaluation has the same intervals.

Sources: Efron and Tibshirani 1993, chapter 13 (percentile); Wilson 1927, JASA 22.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Interval: TypeAlias = tuple[float, float]

RESAMPLES = 2000
LEVEL = 0.95
_Z = 1.959963984540054
"""The normal quantile of `LEVEL`, two-sided."""
_AT_ONCE = 1_000_000
"""Draws in memory at once."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A score as a sum over tasks divided by another, a number of each for every task."""

    parts: Sequence[float]
    weights: Sequence[float]
    """0 for a task that the score does not count."""


def ratio_intervals(ratios: Sequence[Ratio]) -> list[Interval | None]:
    """Bootstrap intervals of scores over the same tasks, all from the same draws.

    None for a score that counts fewer than two tasks, or tasks that are all alike.
    """
    tasks = len(ratios[0].parts) if ratios else 0
    if tasks < 2:
        return [None] * len(ratios)
    columns = np.array([column for r in ratios for column in (r.parts, r.weights)], np.float64)
    sums = resampled_sums(columns.T)
    return [
        percentiles(_quotients(sums[:, 2 * i], sums[:, 2 * i + 1]))
        if np.count_nonzero(ratio.weights) > 1
        else None
        for i, ratio in enumerate(ratios)
    ]


def share_interval(ratio: Ratio, bootstrapped: Interval | None) -> Interval | None:
    """The interval of a share, Wilson's where every task is wholly in it or out of it.

    Args:
        ratio: the share.
        bootstrapped: what `ratio_intervals` gave for it.
    """
    pairs = [(p, w) for p, w in zip(ratio.parts, ratio.weights, strict=True) if w]
    if len(pairs) < 2 or any(p not in (0, w) for p, w in pairs):
        return bootstrapped
    share = math.fsum(p for p, _ in pairs) / math.fsum(w for _, w in pairs)
    return wilson(share, len(pairs))


def wilson(share: float, number: int) -> Interval:
    """Wilson's interval of a share of so many independent cases, which lies within it."""
    middle = share + _Z**2 / (2 * number)
    half = _Z * math.sqrt(share * (1 - share) / number + _Z**2 / (4 * number**2))
    whole = 1 + _Z**2 / number
    # Rounding would put a share of 0 or 1 outside of its interval.
    low, high = (middle - half) / whole, (middle + half) / whole
    return min(share, max(0.0, low)), max(share, min(1.0, high))


def resampled_sums(columns: Floats) -> Floats:
    """Sums over tasks drawn with replacement, as many as there are: float64[RESAMPLES, C].

    Args:
        columns: float64[N, C], a row for each task.
    """
    tasks = len(columns)
    rng = np.random.default_rng(0)
    step = max(1, _AT_ONCE // tasks)
    sums = np.empty((RESAMPLES, columns.shape[1]))
    for start in range(0, RESAMPLES, step):
        rows = min(step, RESAMPLES - start)
        drawn = rng.integers(tasks, size=(rows, tasks)) + tasks * np.arange(rows)[:, None]
        times = np.bincount(drawn.ravel(), minlength=rows * tasks).reshape(rows, tasks)
        sums[start : start + rows] = times @ columns
    return sums


def percentiles(values: Floats) -> Interval | None:
    """The middle `LEVEL` of some values; None where they are all one, up to rounding."""
    if np.allclose(values, values[0], rtol=1e-9, atol=1e-12):
        return None
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)


def _quotients(parts: Floats, weights: Floats) -> Floats:
    """Of the draws that hold a task which counts; all do but a few, where few tasks count."""
    counts = weights > 0
    return parts[counts] / weights[counts]
