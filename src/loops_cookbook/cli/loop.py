"""The event loop of a command: it ends when its work has, and not when user code says so.

In a task that user code started by itself there is nobody to catch `SystemExit`, and asyncio lets
it end the loop, and with it a run that may be hours old. Here the task alone ends by it; whoever
awaits the task meets it, as any other exception. `stop()` ends the loop as well, and is refused
where it is called. What such a task ended by, or a thread, is told in one line, each place once.

A process that `os.fork()` made has a copy of the loop, with all attempts in it and on the same
connections. It ends as soon as the code that forked comes back to the loop, before anything else
that is ready there: what a callback of the copy registers, the loop of the run has registered.
"""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

from loops_cookbook.errors import EpisodeError
from loops_cookbook.problems import said
from loops_cookbook.rollouts.frames import raised_at

logger = logging.getLogger(__name__)


class WorkLoop(asyncio.SelectorEventLoop):
    """Runs until what it was given is done."""

    _ready: deque[asyncio.Handle]
    """asyncio's own: what is called next. No method of a loop puts anything but last."""

    def __init__(self) -> None:
        super().__init__()
        self._work: asyncio.Future[Any] | None = None
        self._told: set[str] = set()
        if hasattr(os, "register_at_fork"):  # which never forgets, so it is not to keep the loop
            os.register_at_fork(after_in_child=partial(_leave_soon, ref(self)))

    def run_until_complete(self, future: Any) -> Any:
        """What comes of the work; `SystemExit` of its own task is let through."""
        work: asyncio.Future[Any] = asyncio.ensure_future(future, loop=self)
        self._work = work
        with self._telling_of_threads():
            return super().run_until_complete(work)

    def run_forever(self) -> None:
        """Run, and go on after the `SystemExit` of a task that is not the work."""
        while True:
            try:
                return super().run_forever()
            except SystemExit as error:
                if not self._is_at_work:
                    raise
                self._tell(error)

    def stop(self) -> None:
        """End the loop, once the work is done.

        Raises:
            EpisodeError: it is not; user code calls this.
        """
        if self._is_at_work:
            raise EpisodeError(
                "stop() of the event loop was called, which would end the run: let the method "
                "return, or raise an Exception, to end an attempt"
            )
        super().stop()

    def put_first(self, callback: Callable[[], object]) -> None:
        """Call it before all that is ready."""
        self._ready.appendleft(asyncio.Handle(callback, (), self))

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Tell what ended a task or a callback of user code that nobody awaits."""
        error = context.get("exception")
        if not isinstance(error, BaseException) or not self._tell(error):
            super().default_exception_handler(context)

    @contextmanager
    def _telling_of_threads(self) -> Generator[None]:
        """Within the block, what ends a thread of user code is told; others as they were."""
        before = threading.excepthook

        def hook(args: threading.ExceptHookArgs) -> None:
            error = args.exc_value
            if error is None or isinstance(error, SystemExit) or not self._tell(error, "thread"):
                before(args)

        threading.excepthook = hook
        try:
            yield
        finally:
            threading.excepthook = before

    @property
    def _is_at_work(self) -> bool:
        return self._work is not None and not self._work.done()

    def _tell(self, error: BaseException, what: str = "task") -> bool:
        """Tell of what ended a task or a thread; False where no user code has part in it."""
        place = raised_at(error, by_a_user=True)
        if place is not None and place not in self._told:
            self._told.add(place)
            logger.warning(
                "%s(%s) was raised at %s, in a %s that user code started: it ended that %s alone",
                *(type(error).__name__, said(error), place, what, what),
            )
        return place is not None


def _leave_soon(loop: "ref[WorkLoop]") -> None:
    """In a process that was forked: end it when its copy of the loop runs on."""
    copy = loop()
    if copy is not None and copy.is_running():
        copy.put_first(_leave)


def _leave() -> None:
    line = (
        "loops: a process that os.fork() made came back to the event loop, and ends: end it by "
        "os._exit(), or use subprocess or compute()\n"
    )
    os.write(2, line.encode())
    os._exit(1)
