"""Names what blocks the event loop, and ends the run where it goes on blocking.

A coroutine that does not await holds up every attempt, and no clock can cut it. One thread watches
a beat of the loop. Where the beat stays away for `lag_seconds`, the line that runs then is logged.
A block is one step of one coroutine: many that each hold the loop for a while, one after the other,
are as many blocks. One that outlasts `bound_seconds` ends the run: with `EventLoopBlocked`,
released as always, if the loop comes back within `grace_seconds`, else at once with that line on
stderr and exit status 1, for nothing in the process can take the loop from a coroutine; what the
run held is in its ledger.

Short blocks that come again and again make a run slow, and none of them is long enough to be named.
So at each tick the line of a user's code that runs then is noted, and where that is so in half of
the last `MANY` ticks, the commonest one is logged, once.

C code that never lets go of the interpreter (a regular expression gone wild, `5**5**5**5**5`) holds
up the thread as well. For that there is a timer of the process's own CPU time, whose signal such
code does look at.
"""

import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from types import FrameType
from typing import NoReturn

import anyio

from loops_cookbook.errors import EventLoopBlocked
from loops_cookbook.rollouts.frames import held_at, runs_at, users_line
from loops_cookbook.rollouts.keeper import open_group

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""How long the loop may take to come back before the process ends."""
LAST_WORDS_SECONDS = 5.0
"""How long whoever is told of that end may take."""
MANY = 40
"""Ticks, of a quarter of the lag each, that tell what mostly holds the loop."""


def mostly_at(seen: Collection[str | None]) -> str | None:
    """The commonest line of a user's code, where such code ran in half of the looks, or more.

    Args:
        seen: the line at each look; None where no code of a user's ran.
    """
    lines = Counter(line for line in seen if line is not None)
    if 2 * lines.total() < max(len(seen), 1):
        return None
    return lines.most_common(1)[0][0]


@asynccontextmanager
async def watch_event_loop(
    *,
    bound_seconds: float,
    lag_seconds: float = 1.0,
    grace_seconds: float = GRACE_SECONDS,
    on_end: Callable[[str], None] | None = None,
) -> AsyncGenerator[None]:
    """Watch the event loop within the block.

    Args:
        bound_seconds: what no block may outlast: the longest clock of the run.
        lag_seconds: a block as long as this is logged.
        grace_seconds: how much longer than the bound the process lives.
        on_end: told why the process ends, in a thread of its own, before it does; by default the
            line is printed.

    Raises:
        EventLoopBlocked: a block outlasted the bound and ended within the grace.
    """
    watch = _Watch(lag_seconds, bound_seconds, grace_seconds, on_end or _say)
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

    def __init__(
        self, lag: float, bound: float, grace: float, on_end: Callable[[str], None]
    ) -> None:
        self._lag = lag
        self._bound = bound
        self._grace = grace
        self._on_end = on_end
        self._tick = lag / 4
        self._beats = 0
        self._loop_thread = threading.get_ident()
        self._backstop = _Backstop(bound + grace, on_end)
        self._is_over = threading.Event()
        self._verdict: str | None = None
        self._seen: deque[str | None] | None = deque(maxlen=MANY)
        """The user's line at each of the last ticks; None once it is told what mostly runs."""
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
        """Count ticks without a beat, those of each step apart; the thread."""
        seen, step = -1, None
        blocked, is_named = 0.0, False
        while not self._is_over.wait(self._tick):
            self._look_at_users()
            if seen != self._beats:
                if is_named:
                    logger.warning("the event loop turns again")
                seen, step, blocked, is_named = self._beats, None, 0.0, False
                continue
            running = _step(self._frame())
            if running is not step:
                step, blocked, is_named = running, 0.0, False
                self._backstop.count_anew()
            blocked += self._tick
            if blocked >= self._lag and not is_named:
                is_named = True
                logger.warning("%s", self._blocked(blocked))
            if blocked >= self._bound and self._verdict is None:
                self._verdict = self._blocked(blocked)
                logger.error("%s; no clock is that long: the run ends", self._verdict)
            if blocked >= self._bound + self._grace:
                _end_process(self._blocked(blocked), self._on_end)

    def _look_at_users(self) -> None:
        """Note which line of a user's code runs, and tell once where that is so too often."""
        if self._seen is None or self._verdict is not None:
            return
        frame = self._frame()
        self._seen.append(None if _step(frame) is None else held_at(frame))
        if len(self._seen) == MANY and (line := mostly_at(self._seen)) is not None:
            self._seen = None
            logger.warning(
                "for half of the last %.0f s the event loop ran code that does not await, mostly "
                "at %s: all attempts wait meanwhile; await there, or give heavy work to compute()",
                MANY * self._tick,
                line,
            )

    def _frame(self) -> FrameType | None:
        # The documented way to another thread's frame, in spite of its name.
        return sys._current_frames().get(self._loop_thread)  # pyright: ignore[reportPrivateUsage]

    def _blocked(self, seconds: float) -> str:
        return _sentence(self._frame(), seconds)


def _step(frame: FrameType | None) -> FrameType | None:
    """What holds the loop: the frame of the coroutine that it runs, which is alive as long as it is
    looked at, so that no other has its identity; None between two of them."""
    step = None
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_COROUTINE:
            step = frame
        frame = frame.f_back
    return step


class _Backstop:
    """Ends the process after so many seconds of its CPU time in one and the same step."""

    def __init__(self, seconds: float, on_end: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._on_end = on_end
        self._began = 0.0
        self._is_usable = (
            hasattr(signal, "setitimer")
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL
        )
        if self._is_usable:
            signal.signal(signal.SIGVTALRM, self._on_signal)

    def arm(self) -> None:
        """Begin to count; on the loop's own thread."""
        self.count_anew()
        if self._is_usable:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds)

    def count_anew(self) -> None:
        """Another step runs; from any thread."""
        self._began = time.monotonic()

    def disarm(self) -> None:
        """Never end it."""
        if self._is_usable:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
            self._is_usable = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Threads together use more CPU seconds than went by.
        elapsed = time.monotonic() - self._began
        if elapsed < self._seconds:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds - elapsed)
        else:
            _end_process(_sentence(frame, elapsed), self._on_end)


def _sentence(frame: FrameType | None, seconds: float) -> str:
    blocked = f"the event loop has been blocked for {seconds:.1f} s at"
    if (line := users_line(frame)) is not None:
        return f"{blocked} {line}: await there, or give heavy work to compute()"
    return (
        f"{blocked} {runs_at(frame)}: no code of yours runs there, but loops-cookbook's own, or a "
        "library's for it; where it was not handed something huge, please report this"
    )


def _say(line: str) -> None:
    os.write(2, f"loops: {line}\n".encode())


def _end_process(line: str, on_end: Callable[[str], None]) -> NoReturn:
    """Let the last words be said, and end: what they wait for may be held by what blocks."""
    words = threading.Thread(target=on_end, args=(f"{line}; the run ends here",), daemon=True)
    words.start()
    words.join(LAST_WORDS_SECONDS)
    os._exit(EventLoopBlocked.exit_status)
