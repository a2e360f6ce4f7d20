"""A job of the `Keeper`, from outside: what it does, and how long it may go on doing it.

A hard deadline counts the seconds that a job works, not those that it waits for a slot. A job that
goes on beyond it ignores cancellation, and is left behind as a stray. A block that goes on beyond
the clock of its phase ignores that, and is only reminded of it until then.
"""

import logging
import math
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import TypeAlias

import anyio

from loops_cookbook.rollouts.calm import REMINDER_SECONDS, Calm
from loops_cookbook.rollouts.faults import caught
from loops_cookbook.rollouts.frames import waits_at

logger = logging.getLogger(__name__)

Work: TypeAlias = Callable[[], Coroutine[object, object, None]]
"""What a job does."""


class HardDeadline:
    """The seconds that are left to a job, while it works."""

    def __init__(self, seconds: float) -> None:
        self.at = math.inf
        """When it passes, as things stand; never while the job does not work."""
        self.expect: Callable[[float], None] = _nobody
        """Told of each moment at which there may be something to see."""
        self.block: Calm | None = None
        """What runs under the clock of a phase."""
        self._ignored_at = math.inf
        """When that will have ignored its clock for a while."""
        self._seconds = seconds

    @property
    def next_look(self) -> float:
        """When there may be something to see: it passes, or a clock is ignored."""
        return min(self.at, self._ignored_at)

    def start(self, now: float) -> None:
        """The whole time runs from now on."""
        self._run(self._seconds, now)

    def stop(self) -> None:
        """The time does not run until it is started."""
        self.at = math.inf

    @contextmanager
    def standing_still(self, now: float) -> Generator[None]:
        """The time does not run within the block, which begins now."""
        left = self.at - now
        self.stop()
        try:
            yield
        finally:
            self._run(left, anyio.current_time())

    def clock(self, block: Calm, cut_at: float) -> None:
        """A clock will cut this block."""
        self.block, self._ignored_at = block, cut_at + REMINDER_SECONDS
        self.expect(self._ignored_at)

    def clock_is_over(self) -> None:
        """The block has ended."""
        self.block, self._ignored_at = None, math.inf

    def ignored(self, now: float) -> Calm | None:
        """The block that ignores its clock, told once."""
        if now < self._ignored_at:
            return None
        self._ignored_at = math.inf
        return self.block

    def _run(self, seconds: float, now: float) -> None:
        self.at = now + seconds
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
        self._calm = Calm()
        self._coroutine: Coroutine[object, object, None] | None = None

    def begin(self, progress: Callable[[], int]) -> None:
        """It begins, or begins anew, and waits; its hard deadline is yet to be started."""
        self.progress = progress
        self.hard.stop()
        self.enter("waiting")

    def start(self, phase: str, now: float) -> None:
        """It begins to work, with this phase; its hard deadline runs from now on."""
        self.phase = phase
        self.since = now
        self.hard.start(now)

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
            self._end()

    def _end(self) -> None:
        """Let go of whoever asked for it: all that an attempt holds is then freed with it, and not
        when the garbage collector comes by."""
        self._coroutine = self._on_left = None
        self.progress = int

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
        """Cancel what ignores it now and then, until it ends; for the Keeper."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._calm.remind)
            if self.hard.block is not None:
                group.start_soon(self.hard.block.remind)
