"""The one place where exceptions of user code are caught; everything else lets them pass.

User code is an Episode, a grader, a runtime: what it raises ends a try and never the run. Only
`Exception` is caught. Cancellation passes, with one exception that is not one: a
`CancelledError` that user code raises although nobody cancelled it, as awaiting a cancelled future
does, is a fault like any other; let through, it would end the run without a word.
"""

import math
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import anyio

from loops_cookbook.errors import LoopsError
from loops_cookbook.problems import one_line
from loops_cookbook.rollouts.frames import raised_at

T = TypeVar("T")


class StrayCancellation(Exception):
    """User code raised CancelledError although nothing was cancelled."""


async def caught(step: Callable[[], Awaitable[T]]) -> T | Exception:
    """Run a step of user code: what it gave, or what it raised.

    A group of one exception counts as that exception.
    """
    try:
        return await step()
    except Exception as error:
        return _alone(error)
    except anyio.get_cancelled_exc_class() as cancelled:
        if anyio.current_effective_deadline() == -math.inf:
            raise
        fault = StrayCancellation(
            "CancelledError was raised though nothing was cancelled: a cancelled future or task "
            "was awaited"
        )
        return fault.with_traceback(cancelled.__traceback__)


def told(phase: str, error: Exception) -> str:
    """One line for people: what was raised, and where."""
    text = one_line(str(error))
    # Our own word on what a user's code did: where we say it helps nobody.
    where = raised_at(error, by_a_user=isinstance(error, LoopsError))
    what = f"{phase}: {type(error).__name__}" + (f": {text}" if text else "")
    return what + (f" ({where})" if where else "")


def _alone(error: Exception) -> Exception:
    """The exception in a group of one, else the exception itself."""
    if not isinstance(error, ExceptionGroup):
        return error
    inner = cast(ExceptionGroup[Exception], error).exceptions
    return _alone(inner[0]) if len(inner) == 1 else cast(Exception, error)
