"""SIGINT and SIGTERM end a run in order: its work is cancelled once, and all is released.

Signals that follow change nothing: release is bounded, and a second one must not cut it short.
"""

import signal
from collections.abc import Awaitable, Callable

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
        raise KeyboardInterrupt if received[0] == signal.SIGINT else Terminated
