"""A command ends when its work has: what user code left going is given a while, named and left.

A task that ignores its cancellation holds the event loop in its end, and a thread that is no daemon
holds the interpreter in its own; each would hold for ever a command whose work is done and
recorded. The work itself is bounded elsewhere: nothing here begins before it has ended.
"""

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import anyio

from loops_cookbook.cli.loop import WorkLoop
from loops_cookbook.recipes.ending import EndProcess, ending
from loops_cookbook.records import RunStatus
from loops_cookbook.rollouts.frames import runs_at, waits_at

LINGER_SECONDS = 10.0
"""How long the end may take."""


def run_to_its_end(
    work: Callable[[], Awaitable[None]],
    end_process: EndProcess,
    *,
    seconds: float = LINGER_SECONDS,
) -> None:
    """Run an event loop for this work, and end the process where the loop does not end after it.

    Args:
        work: what the loop is for.
        end_process: called in a thread of its own.
        seconds: how long the loop may take to end once the work has.
    """
    departure = _Departure(end_process, seconds)
    try:
        anyio.run(departure.after, work, backend_options={"loop_factory": WorkLoop})
    finally:
        departure.cancel()


class _Departure:
    """The end of an event loop, timed from the moment at which its work has ended."""

    def __init__(self, end_process: EndProcess, seconds: float) -> None:
        self._end_process = end_process
        self._timer: threading.Timer | None = None
        self._seconds = seconds

    async def after(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work; the loop has little time left once this returns, or raises."""
        try:
            await work()
        except BaseException as error:  # told, never kept
            self._begin(*ending(error))
            raise
        self._begin("done", None)

    def cancel(self) -> None:
        """The loop has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _begin(self, status: RunStatus, reason: str | None) -> None:
        why = [reason] if reason and status != "interrupted" else []
        loop, own = asyncio.get_running_loop(), asyncio.current_task()

        def leave() -> None:
            tasks = [task for task in asyncio.all_tasks(loop) if task is not own]
            lines = [
                f"a task at {waits_at(task.get_coro()) or 'an unknown line'}" for task in tasks
            ]
            self._end_process(status, [*why, _without([*lines, *_threads_told()])])

        self._timer = threading.Timer(self._seconds, leave)
        self._timer.daemon = True
        self._timer.start()


def leave_threads(status: int, *, seconds: float = LINGER_SECONDS) -> None:
    """Give threads that hold the interpreter a while; end the process where that is not enough.

    Args:
        status: the exit status that the process has.
        seconds: how long each of them has.
    """
    for thread in _threads():
        thread.join(seconds)
        if thread.is_alive():
            sys.stderr.write(f"loops: {_without(_threads_told())}\n")
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):
                    stream.flush()
            os._exit(status)


def _threads() -> list[threading.Thread]:
    """Those that hold the interpreter."""
    own = (threading.main_thread(), threading.current_thread())
    return [each for each in threading.enumerate() if not each.daemon and each not in own]


def _threads_told() -> list[str]:
    # The documented way to another thread's frame, in spite of its name.
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    return [f"a thread at {runs_at(frames.get(thread.ident or 0))}" for thread in _threads()]


def _without(left: Sequence[str]) -> str:
    lines = [line if n == 1 else f"{line} ({n} times)" for line, n in Counter(left).items()]
    return f"ended without waiting for what user code left: {'; '.join(lines) or 'unknown'}"
