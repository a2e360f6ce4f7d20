"""SIGINT and SIGTERM end a run in order: its work is cancelled once, and all is released.

Signals that follow change nothing, until the process has ended: release is bounded, and a second
one must not cut it short, nor show a traceback of the interpreter's own end.
SIGQUIT ends nothing: the run says what it waits for and goes on.
"""

import signal
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType

import anyio

from loops_cookbook.cli.exits import Terminated


async def until_signalled(work: Callable[[], Awaitable[None]]) -> None:
    """Do the work; a signal cancels it.

    Raises:
        KeyboardInterrupt: SIGINT came, and the work has ended.
        Terminated: SIGTERM came, and the work has ended.
    """
    received: list[signal.Signals] = []
    working = anyio.CancelScope()
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:

        async def listen() -> None:
            async for number in signals:
                received.append(number)
                working.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(listen)
            try:
                with working:
                    await work()
            finally:
                group.cancel_scope.cancel()
    if received:
        _ignore_more()
        raise KeyboardInterrupt if received[0] == signal.SIGINT else Terminated


def _ignore_more() -> None:
    """Ignore what ends a process: this one is ending.

    The event loop, when it takes its handlers back, puts Python's default ones in their place and
    not those that were there before.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


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
