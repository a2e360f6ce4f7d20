"""What a group teaches: an advantage for each attempt that can be trained, or why there is none.

Only attempts with a reward and a sequence to train count, in the mean and in the result. A group
is usable when at least two of them are left and their rewards differ. The decision is each
group's own: nothing of another group enters it, and a rejected group gives no gradient of any
kind.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from loops_cookbook.attempts import Group, Rejection

_AT_THE_MEAN = 1e-9
"""Of a group's range of rewards: what lies no further from the mean is at the mean, where rounding
would leave an advantage of 1e-17."""

AdvantageKind: TypeAlias = Literal["mean", "mean_std", "rloo"]
"""What is made of a reward beside its group's others; see `judge`."""


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """How much better than its group each attempt did."""

    attempts: tuple[int, ...]
    """The index in the group of each attempt that is trained, rising."""
    values: npt.NDArray[np.float64]
    """float64[G'], one for each of `attempts`, in reward units (`mean_std`: in deviations)."""


def judge(
    group: Group, *, advantage: AdvantageKind = "mean", tolerance: float = 1e-6
) -> Advantages | Rejection:
    """Compare a group's rewards, or say why the group teaches nothing.

    `mean` subtracts the group's mean from each reward. `mean_std` also divides by the sample
    standard deviation. `rloo` subtracts the mean of the other rewards instead. A reward at the
    group's mean has an advantage of exactly 0 in each.

    Args:
        group: attempts at one task under one policy.
        advantage: which of the three.
        tolerance: rewards that lie no further apart than this are equal, in reward units.

    Source: `mean_std`: GRPO, Shao et al. 2024 (arXiv:2402.03300), section 4.1. `mean`: the same
    without the division, Liu et al. 2025 (arXiv:2503.20783). `rloo`: Kool et al. 2019, "Buy 4
    REINFORCE samples, get a baseline for free"; Ahmadian et al. 2024 (arXiv:2402.14740).
    """
    graded = [a for a in group.attempts if a.reward is not None and a.sequences]
    if len(graded) < 2:
        return Rejection("too_few")
    rewards = np.array([attempt.reward for attempt in graded], np.float64)
    apart = rewards.max() - rewards.min()
    if apart <= tolerance:
        return Rejection("no_variance")
    values = rewards - rewards.mean()
    values[np.abs(values) <= _AT_THE_MEAN * apart] = 0.0
    if advantage == "mean_std":
        values /= rewards.std(ddof=1)
    elif advantage == "rloo":
        # r - (sum - r) / (G - 1) = (r - mean) * G / (G - 1)
        values *= len(rewards) / (len(rewards) - 1)
    values.setflags(write=False)
    return Advantages(tuple(attempt.index for attempt in graded), values)
