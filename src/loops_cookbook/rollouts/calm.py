"""Code that ignores cancellation, reminded of it now and then.

A scope cancels in every turn of the event loop what is in it, and code that catches that and waits
again would take the whole of a CPU. So within such a scope there is another one, a `Calm`: once the
code is known to ignore the first, the second keeps cancellation away, but for a moment each second.
"""

from types import TracebackType

import anyio
from anyio.lowlevel import checkpoint

REMINDER_SECONDS = 1.0
"""Between two cancellations of code that ignores them."""


class Calm:
    """A block that can be calmed while what is around it is cancelled."""

    def __init__(self) -> None:
        self._scope = anyio.CancelScope()
        self._is_over = False
        self._end: anyio.Event | None = None

    def __enter__(self) -> None:
        self._scope.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True
        if self._end is not None:
            self._end.set()
        self._scope.__exit__(kind, error, traceback)  # which is never cancelled itself

    async def remind(self) -> None:
        """Cancel what is in the block now and then, until it ends."""
        self._end = end = anyio.Event()
        try:
            while not self._is_over:
                self._scope.shield = True
                with anyio.move_on_after(REMINDER_SECONDS):
                    await end.wait()
                    return
                self._scope.shield = False
                await checkpoint()
        finally:
            if not self._is_over:
                self._scope.shield = True
