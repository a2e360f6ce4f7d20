"""A grader's word is a finite number for each attempt, or it is no reward at all.

Nothing here turns a fault into a number: not None, not NaN, not a string that looks like one. A
grader is asked again up to the tries it is allowed, each in a grading slot under its own clock;
what comes out is the checked value, or the last exception.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar, cast

import numpy as np

from loops_cookbook.errors import ClockRanOut, Discard, EngineDied, GradeError
from loops_cookbook.problems import found
from loops_cookbook.rollouts.faults import caught
from loops_cookbook.rollouts.left_open import explained
from loops_cookbook.rollouts.limits import PhaseSlot

logger = logging.getLogger(__name__)

T = TypeVar("T")

LARGEST_REWARD = 1e30
"""Beyond it a reward, or its distance from others, is no longer finite as a trainer's float32."""

_NUMBERS: tuple[type[object], ...] = (float, int, np.floating, np.integer, np.bool_)


async def graded(
    call: Callable[[], Awaitable[object]],
    check: Callable[[object], T],
    slots: Callable[[], PhaseSlot],
    tries: int,
) -> T | Exception:
    """Ask a grader until it gives what `check` accepts.

    Args:
        call: the grader.
        check: turns what it gave into the result, or raises GradeError.
        slots: a new slot for each try; it carries the grading clock.
        tries: how often to ask at most.

    Returns:
        The result; or why there is none: the exception of the last try. `Discard` and the end of
        the engine are not tried again.
    """
    result: T | Exception = GradeError("the grader was not asked")
    for _ in range(tries):
        slot = slots()
        result = await caught(partial(_once, call, check, slot))
        if isinstance(result, Exception) and slot.block.left_open:
            result = explained(result, "the grading", slot.block.left_open)
        if not isinstance(result, Exception) or isinstance(result, Discard | EngineDied):
            break
        logger.debug("a grading try failed", exc_info=result)
    return result


async def _once(
    call: Callable[[], Awaitable[object]], check: Callable[[object], T], slot: PhaseSlot
) -> T:
    value: object = None
    async with slot:
        value = await call()
    if slot.timed_out:  # also where the grader took no notice, and gave a number late
        raise ClockRanOut(f"grading outlasted its clock of {slot.seconds:g} s")
    return check(value)


def reward_of(value: object, *, whose: str) -> float:
    """A grader's value as a float.

    Args:
        value: what the grader returned: a float, int, bool or numpy scalar.
        whose: the task and attempt, for the message.

    Raises:
        GradeError: it is something else, or not finite.
    """
    is_number = isinstance(value, _NUMBERS)
    reward = _as_float(cast(float, value)) if is_number else math.nan
    if -LARGEST_REWARD <= reward <= LARGEST_REWARD:
        return reward
    bound = f" from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}" if math.isfinite(reward) else ""
    raise GradeError(
        f"the grader returned {returned(value)} for {whose}: return a finite number{bound}"
        + ("" if is_number else ", as a float, int, bool or numpy scalar")
    )


def _as_float(number: float) -> float:
    """As Python's own, before it is compared: numpy compares in the number's own width, where
    every bound is infinite that float16 cannot hold."""
    try:
        return float(number)
    except OverflowError:  # a huge int
        return math.inf


def returned(value: object) -> str:
    """What Python code returned, as Python writes it."""
    return str(value) if value is None or isinstance(value, bool) else found(value)


def rewards_of(value: object, *, whose: Sequence[str], group: str) -> tuple[float, ...]:
    """A group grader's values as floats, one for each attempt that it was given.

    Raises:
        GradeError: it is not a sequence of that length, or one of its values is no finite number.
    """
    if isinstance(value, np.ndarray):
        value = cast(object, value.tolist())
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise GradeError(
            f"grade_group returned {returned(value)} for {group}: return a number for each attempt"
        )
    values = cast(Sequence[object], value)
    if len(values) != len(whose):
        raise GradeError(
            f"grade_group returned {len(values)} rewards for {group}, which has {len(whose)} "
            "attempts to grade: return one number for each, in their order"
        )
    return tuple(reward_of(v, whose=name) for v, name in zip(values, whose, strict=True))
