"""The one place where exceptions of user code are caught; everything else lets them pass.

User code is an Episode, a grader, a runtime: what it raises ends a try and never the run. What it
raises that is no `Exception` is a fault as well: `sys.exit()` in a library would end the run, with
the status of a success perhaps, and so would the panic of one written in Rust. Two things pass:
`KeyboardInterrupt`, by which a person ends a program, and cancellation. But a `CancelledError`
that user code raises although nobody cancelled it, as awaiting a cancelled future does, is a fault
like any other; let through, it would end the run without a word.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import anyio

from loops_cookbook.clock import STRAY, is_cancelled
from loops_cookbook.errors import LoopsError
from loops_cookbook.problems import MOST_SAID, one_line, said
from loops_cookbook.rollouts.frames import raised_at

T = TypeVar("T")


_MOST_TOLD = 3
"""Exceptions of a group that are told, one after another."""


class StrayCancellation(Exception):
    """User code raised CancelledError although nothing was cancelled."""


class StrayExit(Exception):
    """User code raised SystemExit, or another exception that is meant to end a process."""


async def caught(step: Callable[[], Awaitable[T]]) -> T | Exception:
    """Run a step of user code: what it gave, or what it raised.

    A group of one exception counts as that exception.
    """
    try:
        return await step()
    except Exception as error:
        return fault_of(error)
    except BaseException as error:  # cancellation, or what is meant to end a process
        passing = _passing(error)
        if passing is error:
            raise
        if passing is not None:
            raise passing from None
        return fault_of(error)


def fault_of(error: BaseException) -> Exception:
    """What user code raised, as the fault of a try: alone, if it came alone in a group."""
    error = _alone(error)
    if isinstance(error, Exception):
        return error
    return _stray(error).with_traceback(error.__traceback__)


def told(phase: str, error: BaseException) -> str:
    """One line for people: what was raised, and where."""
    text = (said(error) + inside(error) + _noted(error)).removeprefix("; ")
    where = place_of(error)
    what = f"{phase}: {type(error).__name__}" + (f": {text}" if text else "")
    return what + (f" ({where})" if where else "")


def inside(error: BaseException) -> str:
    """What went wrong in a group, which itself says no more than how many things did."""
    if not isinstance(error, BaseExceptionGroup):
        return ""
    errors = cast(BaseExceptionGroup[BaseException], error).exceptions
    inner = [f"{type(each).__name__}: {said(each)}" for each in errors[:_MOST_TOLD]]
    more = [f"and {len(errors) - _MOST_TOLD} more"] if len(errors) > _MOST_TOLD else []
    return ": " + "; ".join([*inner, *more])


def place_of(error: BaseException) -> str | None:
    """The line that raised it, as `file:line in function`."""
    # Our own word on what a user's code did: where we say it helps nobody.
    return raised_at(error, by_a_user=isinstance(error, LoopsError))


def _alone(error: BaseException) -> BaseException:
    """The exception in a group of one, else the exception itself."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    inner = cast(BaseExceptionGroup[BaseException], error).exceptions
    return _alone(inner[0]) if len(inner) == 1 else cast(BaseException, error)


def _noted(error: BaseException) -> str:
    """The first line of each note, such as on where another process raised it."""
    notes = cast(object, getattr(error, "__notes__", None))
    texts = cast(list[object], notes) if isinstance(notes, list) else []
    lines = [text.strip().partition("\n")[0] for text in texts if isinstance(text, str)]
    return "".join(f"; {one_line(line)[:MOST_SAID]}" for line in lines[:_MOST_TOLD] if line)


def _passing(error: BaseException) -> BaseException | None:
    """It, or the part of a group, that is not user code's to raise.

    The rest of such a group came up while the try was cut, and is part of the cut.
    """
    cancelled = (anyio.get_cancelled_exc_class(),) if is_cancelled() else ()
    kinds = (KeyboardInterrupt, *cancelled)
    if isinstance(error, BaseExceptionGroup):
        return cast(BaseExceptionGroup[BaseException], error).subgroup(kinds)
    return error if isinstance(error, kinds) else None


def _stray(error: BaseException) -> Exception:
    """The fault that it is to raise what is no `Exception`."""
    if isinstance(error, anyio.get_cancelled_exc_class()):
        return StrayCancellation(STRAY)
    return StrayExit(
        f"{type(error).__name__}({said(error)}{inside(error)}) was raised, which is meant to end "
        "more than a try: raise an Exception in its place"
    )
