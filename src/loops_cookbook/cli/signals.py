"""Signals of commands that leave no records, and the one that ends nothing.

SIGINT, SIGTERM and SIGHUP end such a command by the rule of `cli.stopping`: in order, within a
bound, and at the next signal at once. SIGQUIT ends nothing: a run says what it waits for and goes
on.
"""

import signal
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

import anyio

from loops_cookbook.cli.exits import SIGNALLED, interruption, say
from loops_cookbook.cli.stopping import STOP_SECONDS, open_stopper, stopping


class _Command:
    """Implements `cli.stopping.Ended` for a command that has nothing to tell but its end."""

    def __init__(self, waits: str, left: str) -> None:
        self._waits = waits
        self.left = left

    def cancelled(self, number: signal.Signals, seconds: float) -> None:
        if self._waits:
            say([stopping(number, seconds, self._waits)])

    def held(self) -> None: ...

    def hurry(self) -> None: ...

    def last_words(self, number: signal.Signals) -> None:
        say([interruption(number, self.left)])


def run_until_signalled(
    work: Callable[[], Awaitable[None]],
    *,
    seconds: float = STOP_SECONDS,
    waits: str = "",
    left: str = "",
) -> None:
    """Run an event loop for this work; a signal cancels it.

    Args:
        work: what the loop is for.
        seconds: how long it may take to end then.
        waits: what that takes, for people; nothing is said where it takes no time.
        left: what there is of the work, and how to go on.

    Raises:
        KeyboardInterrupt: SIGINT came, and the work has ended.
        Terminated: SIGTERM or SIGHUP came, and the work has ended.
    """
    with open_stopper(_Command(waits, left), seconds) as stopper:
        anyio.run(partial(stopper.until_stopped, work))
    if stopper.number is not None:
        raise SIGNALLED[stopper.number](left)


@contextmanager
def answering_quit(tell: Callable[[FrameType | None], None]) -> Generator[None]:
    """Within the block, SIGQUIT (Ctrl-\\ on a terminal) has this told, with the frame that runs.

    By a handler of the interpreter's and not of the event loop's, so that a coroutine which holds
    the loop is told of too.
    """

    def answer(_: int, frame: FrameType | None) -> None:
        # Raised where the signal came amid a write to the same stream; the run must not end by it.
        with suppress(RuntimeError):
            tell(frame)

    before = signal.signal(signal.SIGQUIT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, before)
