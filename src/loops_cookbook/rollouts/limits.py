"""How much goes on at once in each phase, first come, first served.

`sampling` and `grading` bound how many tries are in that phase. `start_ahead` bounds the tries
that are set up, or being set up, while no sampling slot is free: a try takes a place before its
setup and gives it back when it leaves the sampling slot, and there are `sampling + start_ahead`
places. A `PhaseSlot` is one stay in a phase and carries its clock, which starts with the slot, and
stands still while its block waits for a worker process or for a judge that others have (`clock`):
waiting for room costs a try nothing.

Many graders compute without awaiting, and when a policy answers a whole batch at once, hundreds of
them would run before anything else could. So once they may have computed for `TURN_SECONDS` more
than all else took meanwhile, the next one waits for another turn of the event loop, and each that
comes in the meantime for one of its own.
"""

import logging
import math
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias, cast

import anyio

from loops_cookbook.errors import Discard
from loops_cookbook.rollouts.blocks import Block
from loops_cookbook.rollouts.jobs import Timer

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.03
"""How long graders may compute before everything else gets its turn."""

ExitArguments: TypeAlias = tuple[
    type[BaseException] | None, BaseException | None, TracebackType | None
]


@dataclass(frozen=True, slots=True)
class LimitStatistics:
    """How full a phase is."""

    name: str
    held: int
    total: int
    waiting: int


class Turns:
    """When those may come in who compute without awaiting, and hold up the event loop."""

    def __init__(self) -> None:
        self._door = anyio.Lock()
        """One of those that are held back goes through it a turn."""
        self._computed = 0.0
        """Seconds since one of them did, less those of all else; never below 0."""
        self._since = -math.inf
        """When one last came, or left."""
        self._computes = False
        """Whether that one may have computed since then."""

    def is_over(self, now: float) -> bool:
        """Whether who comes now is to wait for the next turn."""
        self.left(now)
        return self._computed > TURN_SECONDS or self._door.locked()

    async def next(self) -> None:
        """Wait for the next turn, behind those that wait already."""
        async with self._door:
            self._computed = 0.0

    def came(self, now: float) -> None:
        """One comes in now, and computes."""
        self.left(now)
        self._computes = True

    def left(self, now: float) -> None:
        """Whoever came in last has computed until now, at most."""
        passed = now - self._since
        self._computed = max(0.0, self._computed + (passed if self._computes else -passed))
        self._since, self._computes = now, False


class Limit:
    """Room in one phase, by its name.

    Args:
        name: of the phase.
        total: how many it takes.
        turns: in which they come in, where they may hold up the event loop.
    """

    def __init__(self, name: str, total: int, *, turns: Turns | None = None) -> None:
        self.name = name
        self._total = total
        self._room = anyio.Semaphore(total, max_value=total, fast_acquire=True)
        self._turns = turns

    def took(self, now: float) -> bool:
        """Take room now without a wait, if that can be."""
        if self._turns is not None and self._turns.is_over(now):
            return False
        try:
            self._room.acquire_nowait()
        except anyio.WouldBlock:
            return False
        self._came(now)
        return True

    async def take(self, timer: Timer, now: float) -> float:
        """Wait for room from now on and take it; when that was.

        The hard deadline of `timer` does not run meanwhile.
        """
        with timer.standing_still(now):
            if self._turns is not None and self._turns.is_over(now):
                await self._turns.next()
            await self._room.acquire()
        now = timer.now()
        self._came(now)
        return now

    def give_back(self, timer: Timer) -> None:
        """Make room again."""
        self._room.release()
        if self._turns is not None:
            self._turns.left(timer.now())

    def statistics(self) -> LimitStatistics:
        """How full it is now."""
        held, waiting = self._total - self._room.value, self._room.statistics().tasks_waiting
        return LimitStatistics(self.name, held, self._total, waiting)

    def _came(self, now: float) -> None:
        if self._turns is not None:
            self._turns.came(now)


class Room:
    """Room in a phase that is taken once, and given back once by whoever is first to do so.

    Whatever it was taken for may go on without it.
    """

    def __init__(self, limit: Limit, timer: Timer) -> None:
        self.waited: float = 0.0
        """Seconds until there was room; of a slot, also for what its block asked for."""
        self._limit = limit
        self._timer = timer
        self._is_held = False

    async def take(self) -> float:
        """Wait for room and take it; when that was."""
        now = began = self._timer.now()
        if not self._limit.took(now):
            now = await self._limit.take(self._timer, began)
            self.waited = now - began
        self._is_held = True
        return now

    def give_back(self) -> None:
        """Make room again, if that is yet to be done."""
        if self._is_held:
            self._is_held = False
            self._limit.give_back(self._timer)


class PhaseSlot(Room):
    """One stay in a phase, with its clock: a `runtimes.base.Slot`.

    An exception that a block raises because the clock cuts it is part of the cut, and as quiet;
    `Discard` alone is meant, and passes.

    Args:
        limit: the phase.
        seconds: its clock.
        timer: which keeps that clock, and whose hard deadline does not run while the slot waits
            for room.
        around: a block that the clock cuts where the slot needs none of its own: nothing comes
            after it there but a release. The cut then passes through the slot.
    """

    def __init__(
        self, limit: Limit, seconds: float, timer: Timer, around: Block | None = None
    ) -> None:
        super().__init__(limit, timer)
        self.timed_out = False
        """The clock cut the block, also where that took no notice."""
        self.used = 0.0
        """Seconds that the block took, without those that it waited for room within it."""
        self.seconds = seconds
        """Its clock."""
        self._block = around or Block()
        self._is_own = around is None
        self._began: float | None = None
        self._stood_before = 0.0

    @property
    def block(self) -> Block:
        """What its clock cuts."""
        return self._block

    def seconds_left(self) -> float:
        """Until the cut, never below 0; the whole clock before the block."""
        if self._began is None:
            return self.seconds
        now = self._timer.now()
        return max(0.0, self.seconds - (now - self._began - self._stood_until(now)))

    async def __aenter__(self) -> Self:
        if self._began is not None:
            raise RuntimeError("a slot is entered once")
        self._began = await self.take()
        self._stood_before = self._timer.stood(self._began)
        if self._is_own:
            self._block.__enter__()
        self._timer.begin_clock(self._block, self._began + self.seconds)
        return self

    async def __aexit__(self, *exc: object) -> bool:
        kind, error, traceback = cast(ExitArguments, exc)
        assert self._began is not None
        now = self._timer.now()
        stood = self._stood_until(now)
        self.waited += stood
        self.used = now - self._began - stood
        # A block may take the cut for itself and end as if nothing was, or hold the event loop so
        # that nothing could cut it.
        self.timed_out = self._block.was_cut or self.used >= self.seconds
        self.give_back()
        self._timer.end_clock()
        if self._is_own and self._block.__exit__(kind, error, traceback):
            return True
        is_part_of_it = isinstance(error, Exception) and not isinstance(error, Discard)
        if self.timed_out and is_part_of_it:
            logger.debug("raised when its clock cut it", exc_info=error)
            return True
        return False

    def _stood_until(self, now: float) -> float:
        """Seconds of the block in which its clock stood still."""
        return self._timer.stood(now) - self._stood_before


class Limits:
    """The room of a run, shared by all that it does.

    Args:
        sampling: tries that may sample at once.
        grading: attempts, or groups, that may be graded at once.
        start_ahead: tries that may be set up beyond those that sample.
    """

    def __init__(self, sampling: int, grading: int, start_ahead: int = 0) -> None:
        self.starting = Limit("starting", sampling + start_ahead)
        self.sampling = Limit("sampling", sampling)
        self.grading = Limit("grading", grading, turns=Turns())

    def statistics(self) -> tuple[LimitStatistics, ...]:
        """How full each phase is now."""
        return tuple(limit.statistics() for limit in (self.starting, self.sampling, self.grading))
