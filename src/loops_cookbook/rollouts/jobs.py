"""A job of the `Keeper`, from outside: what it does, and how long it may go on doing it.

A hard deadline counts the seconds that a job works, not those that it waits for a slot. A job that
goes on beyond it ignores cancellation, and is left behind as a stray.
"""

import logging
import math
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import TypeAlias

import anyio
from anyio.lowlevel import checkpoint

from loops_cookbook.rollouts.faults import caught
from loops_cookbook.rollouts.frames import waits_at

logger = logging.getLogger(__name__)

REMINDER_SECONDS = 1.0
"""Between two cancellations of a stray."""

Work: TypeAlias = Callable[[], Coroutine[object, object, None]]
"""What a job does."""


class HardDeadline:
    """The seconds that are left to a job, while it works."""

    def __init__(self, seconds: float) -> None:
        self.at = math.inf
        """When it passes, as things stand; never while the job does not work."""
        self.expect: Callable[[float], None] = _nobody
        """Told of that moment whenever the time begins to run."""
        self._seconds = seconds

    def start(self) -> None:
        """The whole time runs from now on."""
        self._run(self._seconds)

    def stop(self) -> None:
        """The time does not run until it is started."""
        self.at = math.inf

    @contextmanager
    def standing_still(self) -> Generator[None]:
        """The time does not run within the block."""
        left = self.at - anyio.current_time()
        self.stop()
        try:
            yield
        finally:
            self._run(left)

    def _run(self, seconds: float) -> None:
        self.at = anyio.current_time() + seconds
        self.expect(self.at)


def _nobody(at: float) -> None: ...


class Job:
    """An attempt, or the grading of a group, as whoever waits for it sees it.

    Args:
        label: what it is, for people.
        seconds: its hard deadline.
        release_seconds: how long it may take to end once it is cancelled.
        on_left: told when it is left behind.
    """

    def __init__(
        self,
        label: str,
        *,
        seconds: float,
        release_seconds: float,
        on_left: Callable[[], None] | None = None,
    ) -> None:
        self.label = label
        self.hard = HardDeadline(seconds)
        self.release_seconds = release_seconds
        self.ended = anyio.Event()
        self.phase = "waiting"
        """What it does, in one word."""
        self.since = anyio.current_time()
        """When that began."""
        self.progress: Callable[[], int] = int
        """How far it is within the phase, in any unit: it moves when this changes."""
        self.is_stray = False
        """It was left behind at its hard deadline."""
        self.was_ended = False
        """By its owner, before it came to an end of its own."""
        self.error: Exception | None = None
        """What its work raised."""
        self._on_left = on_left
        self._scope = anyio.CancelScope()
        self._calm = anyio.CancelScope()
        """Within the other: shielded, it keeps cancellation away for a while."""
        self._coroutine: Coroutine[object, object, None] | None = None

    def begin(self, progress: Callable[[], int]) -> None:
        """It begins, or begins anew, and waits; its hard deadline is yet to be started."""
        self.progress = progress
        self.hard.stop()
        self.enter("waiting")

    def enter(self, phase: str) -> float:
        """It goes on to this phase, and that is now."""
        self.phase = phase
        self.since = anyio.current_time()
        return self.since

    @property
    def where(self) -> str:
        """The line at which it waits."""
        return waits_at(self._coroutine) or "an unknown line"

    def cancel(self) -> None:
        """Let it release what it holds, and end."""
        self._scope.cancel()

    async def perform(self, work: Work) -> None:
        """Do the work; for the Keeper."""
        coroutine = self._coroutine = work()
        try:
            with self._scope, self._calm:
                self.error = await caught(lambda: coroutine)
        except BaseException:
            self.was_ended = True
            raise
        finally:
            self.ended.set()
            self._coroutine = None

    def leave_behind(self) -> None:
        """Cancel it, and ignore whatever it still does; for the Keeper."""
        self.is_stray = True
        self.hard.stop()
        self.cancel()
        logger.warning(
            "%s ignores cancellation in its %s, at %s; it is left behind: let cancellation pass "
            "(never catch BaseException around an await), and bound what is shielded",
            self.label,
            self.phase,
            self.where,
        )
        if self._on_left is not None:
            self._on_left()

    async def remind(self) -> None:
        """Cancel what ignores it now and then, until it ends; for the Keeper.

        A scope cancels in every turn of the loop what is in it, and code that catches that and
        waits again would take the whole of a CPU.
        """
        try:
            while True:
                self._calm.shield = True
                with anyio.move_on_after(REMINDER_SECONDS):
                    await self.ended.wait()
                    return
                self._calm.shield = False
                await checkpoint()
        finally:
            if not self.ended.is_set():
                self._calm.shield = True
