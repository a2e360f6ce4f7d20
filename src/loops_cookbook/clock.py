"""The clock that code runs under, as what that code calls sees it.

Whoever keeps a clock over some code says so with `run_under`; what the code calls finds it without
being handed it, and asks two things: when it cuts, and that it stand still while the code waits for
room that it shares with others. It does so only while the code holds no such room. So each who
holds room is on his own time, every wait has an end, and code that waits in one branch and never
ends in another is cut.
"""

import math
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Protocol

import anyio


class Clock(Protocol):
    """What cuts code when its time is up."""

    @property
    def cuts_at(self) -> float:
        """When that is, as things stand, by the clock of the event loop; infinity for never."""
        ...

    def waiting(self) -> AbstractContextManager[None]:
        """Within the block the code waits for room that others have."""
        ...

    def served(self) -> AbstractContextManager[None]:
        """Within the block it has some."""
        ...


STRAY = (
    "CancelledError was raised though nothing was cancelled: a cancelled future or task was "
    "awaited, or an error cancelled a task group that is held open"
)
"""What to say of a stray one."""

_clock: ContextVar[Clock | None] = ContextVar("clock", default=None)


def run_under(clock: Clock) -> None:
    """From now on this task, and each that it starts, runs under this clock."""
    _clock.set(clock)


def cuts_at() -> float:
    """When the code that asks is cut, as things stand: by its clock, or by a scope around it."""
    clock = _clock.get()
    scope = anyio.current_effective_deadline()
    return min(scope, math.inf if clock is None else clock.cuts_at)


def is_cancelled() -> bool:
    """Whether the code that asks is being cancelled; where not, a CancelledError is a stray one."""
    return anyio.current_effective_deadline() == -math.inf


@asynccontextmanager
async def room_in(limiter: anyio.CapacityLimiter) -> AsyncGenerator[None]:
    """Wait for room, while the clock of the code that asks stands still, and hold it."""
    clock, holder = _clock.get(), object()
    with nullcontext() if clock is None else clock.waiting():
        await limiter.acquire_on_behalf_of(holder)
    try:
        with nullcontext() if clock is None else clock.served():
            yield
    finally:
        limiter.release_on_behalf_of(holder)
