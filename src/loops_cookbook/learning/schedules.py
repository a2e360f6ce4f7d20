"""The learning rate as a pure function of the update, so that a resumed run goes on where it was.

Updates count from 0. After the warmup the rate is the peak, and it falls towards 0 without
reaching it: no update of a run is wasted on a rate of 0.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

ScheduleKind: TypeAlias = Literal["constant", "linear", "cosine"]
"""How the rate falls after the warmup: not at all, in a line, or in half a cosine."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the learning rate moves over a run."""

    peak: float
    """The rate once warmed up."""
    updates: int
    """How many updates the run makes; `constant` does not look at it."""
    kind: ScheduleKind = "constant"
    warmup: int = 0
    """Updates over which the rate rises in a line: update `u` has `(u + 1) / (warmup + 1)` of the
    peak."""


def learning_rate(schedule: Schedule, update: int) -> float:
    """The rate of an update; one past the last has the rate of the last.

    Raises:
        ValueError: the update is negative.
    """
    if update < 0:
        raise ValueError(f"updates count from 0, not from {update}")
    if update < schedule.warmup:
        return schedule.peak * (update + 1) / (schedule.warmup + 1)
    if schedule.kind == "constant":
        return schedule.peak
    falling = max(1, schedule.updates - schedule.warmup)
    done = min(update - schedule.warmup, falling - 1) / falling
    left = 1 - done if schedule.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.peak * left
