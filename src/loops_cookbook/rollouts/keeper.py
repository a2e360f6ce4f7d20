"""Who owns the attempts of a run, and how long one may go on after it was given up.

Structured concurrency waits for every task, also for one that ignores cancellation. So an attempt
is no child of its group: it is a job of the `Keeper`, which lives as long as the run, and the group
waits for it until its hard deadline. Then the group goes on alone, the job is a *stray*, and
whatever it still does is ignored. When the run ends, all that is left has one last while to end,
counted from the first cancellation; after that, or at once where the end is hurried, `on_stuck` is
told where they are.

The Keeper watches over all clocks and hard deadlines with one timer, for almost none ever passes.
"""

import asyncio
import logging
import math
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from typing import cast

import anyio
from anyio.abc import TaskGroup

from loops_cookbook.rollouts.jobs import Job, Work

logger = logging.getLogger(__name__)

STRAY_SECONDS = 5.0
"""How long jobs may take to end, beyond their release clock, once the run ends."""


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


class _Crew:
    """Jobs that are waited for together."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = set(jobs)
        """Those that have neither ended nor been left behind."""
        self._error: Exception | None = None
        self._was_ended = False
        self._news = anyio.Event()

    def over(self, job: Job) -> None:
        """One of them has ended, or was left behind; only the first of the two counts."""
        if job not in self._jobs:
            return
        self._jobs.remove(job)
        self._error = self._error or job.error
        self._was_ended |= job.was_ended
        if not self._jobs or job.error is not None:
            self._news.set()

    async def wait(self) -> None:
        """Wait for them all; raise what one of them raised as soon as it does."""
        await self._news.wait()
        if self._error is not None:
            raise self._error
        if self._was_ended:
            await anyio.sleep_forever()  # what ended it is about to end this too

    async def end(self) -> None:
        """Cancel those that are left, and wait until they have released what they hold."""
        for job in self._jobs:
            job.cancel()
        while self._jobs:
            self._news = anyio.Event()
            await self._news.wait()


class Keeper:
    """The owner of a run's jobs; see `open_keeper`."""

    group: TaskGroup
    """Of the jobs' tasks."""

    def __init__(self) -> None:
        self.jobs: dict[Job, _Crew] = {}
        """Those that have not ended, strays included, each with those it is waited for with."""
        self.now = clock_of_the_loop()
        self._keeping = anyio.CancelScope(shield=True)  # also jobs that are cancelled have clocks
        self._sleep = anyio.CancelScope()
        """Its deadline is the next moment at which there may be something to do."""
        self._ends_at = math.inf
        """When jobs are waited for no longer; known once the run ends."""
        self._last_waits: set[anyio.CancelScope] = set()

    async def outcomes(self, work: Mapping[Job, Work]) -> None:
        """Do jobs at once, and wait until each has ended or had to be left behind.

        Cancelling this cancels the jobs and waits until they have released what they hold; an error
        of one of them does so to the others.

        Raises:
            Exception: what the work of one raised.
        """
        crew = _Crew(work)
        for job, do in work.items():
            self.jobs[job] = crew
            job.timer.expect = self._expect
            self._expect(job.timer.at)
            job.cancel = self.group.start_soon(self._perform, job, do).cancel
        try:
            await crew.wait()
        except BaseException:  # passed on, once nothing of them is left
            with self._waiting_last():
                await crew.end()
            raise

    async def outcome(self, job: Job, work: Work) -> bool:
        """Do one job; False where it had to be left behind.

        Raises:
            Exception: what the work raised.
        """
        await self.outcomes({job: work})
        return not job.is_stray

    async def keep_time(self) -> None:
        """Cut what a clock cuts, and leave jobs behind at their hard deadlines, until `stop`."""
        with self._keeping:
            async with anyio.create_task_group() as reminding:
                while True:
                    deadline = min((job.timer.at for job in self.jobs), default=math.inf)
                    with anyio.CancelScope(deadline=deadline) as self._sleep:
                        await anyio.sleep_forever()
                    now = self.now()
                    for job in [job for job in self.jobs if job.timer.at <= now]:
                        self._look_at(job, now, reminding)

    async def end(self) -> Sequence[Job]:
        """Cancel the jobs that are left, and wait a last while; those that still go on."""
        self.group.cancel_scope.cancel()
        with self._waiting_last():
            async with anyio.create_task_group() as reminding:
                for job in tuple(self.jobs):
                    reminding.start_soon(job.remind)
                    reminding.start_soon(job.ended)
        return tuple(self.jobs)

    def hurry(self) -> None:
        """Wait no longer for jobs that are to end, now or later, whatever they hold."""
        self._ends_at = self.now()
        for wait in self._last_waits:
            wait.deadline = self._ends_at

    def stop(self) -> None:
        """No time is to be kept any more."""
        self._keeping.cancel()

    @contextmanager
    def _waiting_last(self) -> Generator[None]:
        """Within the block the end of jobs is waited for, until the last moment of them all."""
        if self._ends_at == math.inf:
            ending = (job.release_seconds for job in self.jobs if not job.is_stray)
            self._ends_at = self.now() + max(ending, default=0.0) + STRAY_SECONDS
        with anyio.CancelScope(deadline=self._ends_at, shield=True) as wait:
            self._last_waits.add(wait)
            try:
                yield
            finally:
                self._last_waits.discard(wait)

    def _look_at(self, job: Job, now: float, reminding: TaskGroup) -> None:
        if (block := job.timer.cut(now)) is not None:
            reminding.start_soon(block.remind)
        if job.timer.hard_at <= now:
            job.leave_behind()
            self.jobs[job].over(job)
            reminding.start_soon(job.remind)

    def _expect(self, at: float) -> None:
        if at < self._sleep.deadline:
            self._sleep.deadline = at

    async def _perform(self, job: Job, work: Work) -> None:
        try:
            await job.perform(work)
        finally:
            self.jobs.pop(job).over(job)


@asynccontextmanager
async def open_keeper(
    on_stuck: Callable[[Sequence[str]], None] | None = None,
) -> AsyncGenerator[Keeper]:
    """Own the jobs of a run; leaving the block ends those that are left.

    Args:
        on_stuck: told which jobs have not ended in the last while that they have, and at which
            line they are. The block is not left before they end, so a command that must end
            ends its process here. By default they are logged.
    """
    async with open_group() as around:
        keeper = Keeper()
        around.start_soon(keeper.keep_time)
        try:
            async with open_group() as keeper.group:
                try:
                    yield keeper
                finally:
                    if left := await keeper.end():
                        (on_stuck or _log_stuck)(stuck(left))
        finally:
            keeper.stop()


def stuck(jobs: Iterable[Job]) -> list[str]:
    """Where jobs are, for people: those in one phase at one line are told together."""
    places: dict[str, list[str]] = {}
    for job in jobs:
        places.setdefault(f"{job.phase}, at {job.where}", []).append(job.label)
    return [
        f"{first}{f' and {len(more)} more' if more else ''}: {place}"
        for place, (first, *more) in places.items()
    ]


def clock_of_the_loop() -> Callable[[], float]:
    """`anyio.current_time`, without its search for the loop at each look."""
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:  # another kind of loop
        return anyio.current_time


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
