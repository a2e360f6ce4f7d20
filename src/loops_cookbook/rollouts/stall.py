"""What a run waits for: said when it is asked, and when nothing has moved for a while.

Whoever waits for something says so to the `Narrator` for as long as it does: the trainer, an
evaluation, the gate. What the tries wait for is read from their jobs: which phase each is in, since
when, whether it works or waits for a slot, at which line its code stands. A phase that began or
ended is a move, and so is a model call that ended, or another word of whoever waits.
"""

import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import anyio

from loops_cookbook.records import Level
from loops_cookbook.rollouts.frames import users_line
from loops_cookbook.rollouts.jobs import Job
from loops_cookbook.rollouts.keeper import Keeper
from loops_cookbook.rollouts.limits import Limits, LimitStatistics

STALL_SECONDS = 120.0
"""How long nothing must have moved."""

_MOST_PLACES = 5
"""Lines of code that are told of each phase, those where a try has been longest."""
_SLOTS = {"waiting": "starting", "run": "sampling", "grading": "grading"}
"""The slot that a job waits for, by its phase."""


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """Something that is waited for."""

    what: str | Callable[[], str]
    since: float

    def words(self) -> str:
        return self.what() if callable(self.what) else self.what

    def told(self, now: float) -> str:
        """A callable says what changes, and for how long it has been so is not known."""
        return self.words() + ("" if callable(self.what) else f", for {now - self.since:.0f} s")


class Narrator:
    """Knows all that a run may wait for.

    Args:
        say: where it is said.
        now: the clock of the event loop, which a signal handler must be able to ask; asyncio's
            is `time.monotonic`.
    """

    def __init__(
        self, say: Callable[[Level, str], None], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._now = now
        self._waits: list[_Wait] = []
        self._keeper: Keeper | None = None
        self._limits: Limits | None = None

    def look_at(self, keeper: Keeper, limits: Limits) -> None:
        """Whose jobs there are, and the slots that they take."""
        self._keeper, self._limits = keeper, limits

    @contextmanager
    def waiting_for(self, what: str | Callable[[], str]) -> Generator[None]:
        """Within the block this is waited for; another word of a callable is a move."""
        wait = _Wait(what, self._now())
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)

    async def watch(self, seconds: float = STALL_SECONDS) -> None:
        """Say the situation when nothing has moved for so long, and then ever more rarely."""
        before: object = None
        quiet = 0
        while True:
            await anyio.sleep(seconds)
            now = self._state()
            quiet = quiet + 1 if now == before else 0
            before = now
            if quiet and quiet.bit_count() == 1:
                # Without a try under way all wait for others, such as a trainer at work.
                level = "warning" if self._jobs else "info"
                told = self._situation()
                self._say(level, f"nothing has moved for {quiet * seconds:g} s; {told}")

    def tell(self, frame: FrameType | None = None) -> None:
        """Say the situation now; may be called by a signal handler, with the frame it is given."""
        told = self._situation()
        held = users_line(frame)
        self._say("info", told + (f"\n  the event loop is held at {held}" if held else ""))

    @property
    def _jobs(self) -> Sequence[Job]:
        return () if self._keeper is None else tuple(self._keeper.jobs)

    def _state(self) -> object:
        jobs = [
            (id(job), job.phase, job.since, _is_queued(job), job.progress()) for job in self._jobs
        ]
        return [wait.words() for wait in self._waits], frozenset(jobs)

    def _situation(self) -> str:
        now = self._now()
        waits = [wait.told(now) for wait in self._waits]
        limits = () if self._limits is None else self._limits.statistics()
        lines = [*waits, *situation(self._jobs, limits, now)]
        if not lines:
            return "the run waits for nothing"
        return "the run waits for:" + "".join(f"\n  {line}" for line in lines)


def situation(jobs: Iterable[Job], limits: Iterable[LimitStatistics], now: float) -> list[str]:
    """How full each phase is, and what the tries in it do, those that do it longest first."""
    slots = [f"{s.name} {s.held}/{s.total} ({s.waiting} wait)" for s in limits]
    lines = [f"slots: {', '.join(slots)}"] if slots else []
    doing: dict[str, dict[str, list[Job]]] = {}
    for job in sorted(jobs, key=lambda job: job.since):
        phase, place = _doing(job)
        doing.setdefault(phase, {}).setdefault(place, []).append(job)
    for phase, places in doing.items():
        told = list(places.items())
        lines += [_told(phase, place, there, now) for place, there in told[:_MOST_PLACES]]
        if rest := sum(len(there) for _, there in told[_MOST_PLACES:]):
            lines.append(f"{phase}: {rest} more elsewhere")
    return lines


def _doing(job: Job) -> tuple[str, str]:
    """What a job does, and where its code stands; a wait for a slot is nobody's line."""
    if _is_queued(job):
        return f"a {_SLOTS.get(job.phase, job.phase)} slot", ""
    return job.phase, f" at {job.where}"


def _is_queued(job: Job) -> bool:
    """Whether it waits for a slot: time stands still for it, and nothing of it is under a clock."""
    return job.timer.hard_at == math.inf and job.timer.block is None


def _told(phase: str, place: str, jobs: Sequence[Job], now: float) -> str:
    tries = "1 try" if len(jobs) == 1 else f"{len(jobs)} tries"
    longest = jobs[0]
    which = longest.label if len(jobs) == 1 else f"longest {longest.label}"
    return f"{phase}: {tries}{place}; {which}, {now - longest.since:.0f} s"
