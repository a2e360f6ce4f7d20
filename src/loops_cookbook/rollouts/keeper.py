"""Who owns the tries of a run, and how long one may go on after its attempt.

Structured concurrency waits for every task, also for one that ignores cancellation. So a try is no
child of its attempt: it is a job of the `Keeper`, which lives as long as the run, and the attempt
waits for it until its hard deadline. Then the attempt goes on alone, the job is a *stray*, and
whatever it still does is ignored. When the run ends, strays have a last while to end; after that
`on_stuck` is told where they are.

A hard deadline counts the seconds that a job works, not those that it waits for a slot.
"""

import logging
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import cast

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from loops_cookbook.rollouts.faults import caught
from loops_cookbook.rollouts.frames import waits_at

logger = logging.getLogger(__name__)

STRAY_SECONDS = 10.0
"""How long a job that was cancelled may take beyond its release clock before it is a stray, and
how long strays have when the run ends."""

REMINDER_SECONDS = 1.0
"""Between two cancellations of a stray."""


@asynccontextmanager
async def open_group() -> AsyncGenerator[TaskGroup]:
    """A task group out of which an error comes as itself, not wrapped.

    Of several errors at once the first comes out; a cancelled task is no error.
    """
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as errors:
        first = _first_error(errors)
        raise first from first.__cause__


class HardDeadline:
    """The seconds that are left to a job, while it works."""

    def __init__(self, seconds: float) -> None:
        self.scope = anyio.CancelScope()
        self._seconds = seconds

    def start(self) -> None:
        """The time runs from now on."""
        self.scope.deadline = anyio.current_time() + self._seconds

    @contextmanager
    def standing_still(self) -> Generator[None]:
        """The time does not run within the block."""
        left = self.scope.deadline - anyio.current_time()
        self.scope.deadline = math.inf
        try:
            yield
        finally:
            self.scope.deadline = anyio.current_time() + left


class Job:
    """A try, or the grading of a group, as whoever waits for it sees it.

    Args:
        label: what it is, for people.
        seconds: its hard deadline.
        release_seconds: how long it may take to end once it is cancelled.
    """

    def __init__(self, label: str, *, seconds: float, release_seconds: float) -> None:
        self.label = label
        self.hard = HardDeadline(seconds)
        self.ended = anyio.Event()
        self.phase = "waiting"
        """What it does, in one word."""
        self.since = anyio.current_time()
        """When that began."""
        self.progress: Callable[[], int] = int
        """How far it is within the phase, in any unit: it moves when this changes."""
        self._release_seconds = release_seconds
        self._scope = anyio.CancelScope()
        self._calm = anyio.CancelScope()
        """Within the other: shielded, it keeps cancellation away for a while."""
        self._error: Exception | None = None
        self._was_ended = False
        """By its owner, before it came to an end of its own."""
        self._coroutine: Coroutine[object, object, None] | None = None

    def enter(self, phase: str) -> None:
        """It goes on to this phase."""
        self.phase = phase
        self.since = anyio.current_time()

    @property
    def where(self) -> str:
        """The line at which it waits."""
        return waits_at(self._coroutine) or "an unknown line"

    async def perform(self, work: Callable[[], Coroutine[object, object, None]]) -> None:
        """Do the work; for the Keeper."""
        coroutine = self._coroutine = work()
        try:
            with self._scope, self._calm:
                self._error = await caught(lambda: coroutine)
        except BaseException:
            self._was_ended = True
            raise
        finally:
            self.ended.set()
            self._coroutine = None

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

    async def outcome(self) -> bool:
        """Wait for the end; False where the hard deadline came first. Cancels what is left.

        Raises:
            Exception: what the work raised.
        """
        try:
            with self.hard.scope:
                await self.ended.wait()
            if self._was_ended:
                await anyio.sleep_forever()  # what ended it is about to end this too
        except anyio.get_cancelled_exc_class():
            self._scope.cancel()
            with anyio.move_on_after(self._release_seconds + STRAY_SECONDS, shield=True):
                await self.ended.wait()
            raise
        if self._error is not None:
            raise self._error
        if self.ended.is_set():
            return True
        self._scope.cancel()
        logger.warning(
            "%s ignores cancellation in its %s, at %s; it is left behind: let cancellation pass "
            "(never catch BaseException around an await), and bound what is shielded",
            self.label,
            self.phase,
            self.where,
        )
        return False


class Keeper:
    """The owner of a run's jobs; see `open_keeper`."""

    def __init__(self, group: TaskGroup) -> None:
        self.jobs: set[Job] = set()
        """Those that have not ended, strays included."""
        self._group = group

    async def outcome(self, job: Job, work: Callable[[], Coroutine[object, object, None]]) -> bool:
        """Do a job and wait for it; False where it had to be left behind.

        Cancelling this cancels the job and waits until it has released what it holds.

        Raises:
            Exception: what the work raised.
        """
        self.jobs.add(job)
        self._group.start_soon(self._perform, job, work)
        has_ended = await job.outcome()
        if not has_ended:
            self._group.start_soon(job.remind)
        return has_ended

    async def _perform(self, job: Job, work: Callable[[], Coroutine[object, object, None]]) -> None:
        try:
            await job.perform(work)
        finally:
            self.jobs.discard(job)


@asynccontextmanager
async def open_keeper(
    on_stuck: Callable[[Sequence[str]], None] | None = None,
) -> AsyncGenerator[Keeper]:
    """Own the jobs of a run; leaving the block ends those that are left.

    Args:
        on_stuck: told which jobs have not ended `STRAY_SECONDS` after they were cancelled, and at
            which line each is. The block is not left before they end, so a command that must end
            ends its process here. By default they are logged.
    """
    async with open_group() as group:
        keeper = Keeper(group)
        try:
            yield keeper
        finally:
            group.cancel_scope.cancel()
            with anyio.move_on_after(STRAY_SECONDS, shield=True):
                async with anyio.create_task_group() as reminding:
                    for job in tuple(keeper.jobs):
                        reminding.start_soon(job.remind)
            if keeper.jobs:
                stuck = tuple(f"{job.label}: {job.phase}, at {job.where}" for job in keeper.jobs)
                (on_stuck or _log_stuck)(stuck)


def _log_stuck(jobs: Sequence[str]) -> None:
    logger.error("the run cannot end, because these ignore cancellation: %s", "; ".join(jobs))


def _first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in a group that is neither a group nor a cancellation."""
    cancelled = anyio.get_cancelled_exc_class()
    for error in errors.exceptions:
        inner: BaseException = error
        if isinstance(error, BaseExceptionGroup):
            inner = _first_error(cast(BaseExceptionGroup[BaseException], error))
        if not isinstance(inner, cancelled):
            return inner
    return errors.exceptions[0]
