"""Names what blocks the event loop, and ends the run where it goes on blocking.

A coroutine that does not await holds up every attempt, and no clock can cut it. One thread watches
a beat of the loop. Where the beat stays away for `lag_seconds`, the line that runs then is logged.
A block that outlasts `bound_seconds` ends the run: with `EventLoopBlocked`, released as always, if
the loop comes back within `grace_seconds`, else at once with that line on stderr and exit status 1,
for nothing in the process can take the loop from a coroutine; what the run held is in its ledger.

C code that never lets go of the interpreter (a regular expression gone wild, `5**5**5**5**5`) holds
up the thread as well. For that there is a timer of the process's own CPU time, whose signal such
code does look at.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import FrameType
from typing import NoReturn

import anyio

from loops_cookbook.errors import EventLoopBlocked
from loops_cookbook.rollouts.frames import runs_at
from loops_cookbook.rollouts.keeper import open_group

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""How long the loop may take to come back before the process ends."""


@asynccontextmanager
async def watch_event_loop(
    *, bound_seconds: float, lag_seconds: float = 1.0, grace_seconds: float = GRACE_SECONDS
) -> AsyncGenerator[None]:
    """Watch the event loop within the block.

    Args:
        bound_seconds: what no block may outlast: the longest clock of the run.
        lag_seconds: a block as long as this is logged.
        grace_seconds: how much longer than the bound the process lives.

    Raises:
        EventLoopBlocked: a block outlasted the bound and ended within the grace.
    """
    watch = _Watch(lag_seconds, bound_seconds, grace_seconds)
    async with open_group() as group:
        thread = threading.Thread(target=watch.look, name="watchdog", daemon=True)
        group.start_soon(watch.beat)
        thread.start()
        try:
            yield
        finally:
            watch.stop()
            thread.join()


class _Watch:
    """The beat and who looks at it.

    The thread counts its own ticks, not the time: a process that was stopped for a while has had
    no ticks either.
    """

    def __init__(self, lag: float, bound: float, grace: float) -> None:
        self._lag = lag
        self._bound = bound
        self._grace = grace
        self._tick = lag / 4
        self._beats = 0
        self._loop_thread = threading.get_ident()
        self._backstop = _Backstop(bound + grace)
        self._is_over = threading.Event()
        self._verdict: str | None = None
        # A run that is cancelled still releases what it holds, and its loop still turns.
        self._beating = anyio.CancelScope(shield=True)

    async def beat(self) -> None:
        """Show that the loop turns, until the watch is stopped."""
        with self._beating:
            while self._verdict is None:
                self._beats += 1
                self._backstop.arm()
                await anyio.sleep(self._tick)
            raise EventLoopBlocked(self._verdict)

    def stop(self) -> None:
        """End the watch."""
        self._beating.cancel()
        self._is_over.set()
        self._backstop.disarm()

    def look(self) -> None:
        """Count ticks without a beat; the thread."""
        seen, blocked, is_named = -1, 0.0, False
        while not self._is_over.wait(self._tick):
            if seen != self._beats:
                if is_named:
                    logger.warning("the event loop turns again after %.1f s", blocked)
                seen, blocked, is_named = self._beats, 0.0, False
                continue
            blocked += self._tick
            if blocked >= self._lag and not is_named:
                is_named = True
                logger.warning("%s", self._blocked(blocked))
            if blocked >= self._bound and self._verdict is None:
                self._verdict = self._blocked(blocked)
                logger.error("%s; no clock is that long: the run ends", self._verdict)
            if blocked >= self._bound + self._grace:
                _end_process(self._blocked(blocked))

    def _blocked(self, seconds: float) -> str:
        # The documented way to another thread's frame, in spite of its name.
        frame = sys._current_frames().get(self._loop_thread)  # pyright: ignore[reportPrivateUsage]
        return _sentence(frame, seconds)


class _Backstop:
    """Ends the process after so many seconds of its CPU time without being armed again."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._armed_at = 0.0
        self._is_usable = (
            hasattr(signal, "setitimer")
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL
        )
        if self._is_usable:
            signal.signal(signal.SIGVTALRM, self._on_signal)

    def arm(self) -> None:
        """Begin to count anew."""
        self._armed_at = time.monotonic()
        if self._is_usable:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds)

    def disarm(self) -> None:
        """Never end it."""
        if self._is_usable:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
            self._is_usable = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Threads together use more CPU seconds than went by.
        elapsed = time.monotonic() - self._armed_at
        if elapsed < self._seconds:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds - elapsed)
        else:
            _end_process(_sentence(frame, elapsed))


def _sentence(frame: FrameType | None, seconds: float) -> str:
    return (
        f"the event loop has been blocked for {seconds:.1f} s at {runs_at(frame)}: "
        "await there, or give heavy work to compute()"
    )


def _end_process(line: str) -> NoReturn:
    os.write(2, f"error: {line}; the run ends here\n".encode())
    os._exit(EventLoopBlocked.exit_status)
