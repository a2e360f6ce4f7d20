"""A job of the `Keeper`, from outside: what it does, and how long it may go on doing it.

A job is under one clock at a time, that of its phase, and under its hard deadline. Both count the
seconds that it works, and not those that it waits for a slot, or for other room that it shares with
others (`clock`). The clock cuts a `Block`; where that takes no notice it is reminded, until the
hard deadline passes and the job is left behind as a stray. No clock is a timer of its own: a
`Timer` tells the Keeper when there is something to do.
"""

import logging
import math
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, TypeAlias

import anyio

from loops_cookbook.clock import run_under
from loops_cookbook.rollouts.blocks import REMINDER_SECONDS, Block
from loops_cookbook.rollouts.faults import caught
from loops_cookbook.rollouts.frames import thread_of, waits_at
from loops_cookbook.rollouts.left_open import close_nurseries

logger = logging.getLogger(__name__)

Work: TypeAlias = Callable[[], Coroutine[object, object, None]]
"""What a job does."""


_Part: TypeAlias = Literal["queues", "waits", "served"]


class Timer:
    """What time may do to a job: cut the block of its phase, remind it of that, leave it behind.

    It is the `clock.Clock` of what the job does. While it stands still, none of this comes nearer.

    Args:
        seconds: until its hard deadline, while it works.
        now: the clock of the event loop.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = anyio.current_time) -> None:
        self.now = now
        self.expect: Callable[[float], None] = _nobody
        """Told of each moment at which there may be something to do."""
        self.block: Block | None = None
        """What is under a clock."""
        self._hard_at = math.inf
        """As all moments here: by the time that it has not stood still."""
        self._block_at = math.inf
        """When that is to be cut, or reminded of it."""
        self._is_cut = False
        self._seconds = seconds
        self._stood = 0.0
        self._still_since: float | None = None
        self._parts: dict[_Part, int] = {"queues": 0, "waits": 0, "served": 0}
        """How many parts of the job do what decides whether it stands still."""

    @property
    def at(self) -> float:
        """When there may be something to do."""
        return self._moment(min(self._hard_at, self._block_at))

    @property
    def hard_at(self) -> float:
        """When the hard deadline passes, as things stand; never while the job does not work."""
        return self._moment(self._hard_at)

    @property
    def cuts_at(self) -> float:
        """When the block is cut, as things stand."""
        return self._moment(self._block_at)

    def stood(self, now: float) -> float:
        """For how long it has stood still, until now."""
        return self._stood + (0.0 if self._still_since is None else now - self._still_since)

    def start(self, now: float) -> None:
        """The hard deadline runs, from its beginning, from now on."""
        self._hard_at = now + self._seconds - self.stood(now)
        self.expect(now + self._seconds)

    def stop(self) -> None:
        """The hard deadline does not run until it is started."""
        self._hard_at = math.inf

    def standing_still(self, now: float) -> AbstractContextManager[None]:
        """It stands still within the block, which begins now: the job waits for a slot."""
        return self._part("queues", now)

    def waiting(self) -> AbstractContextManager[None]:
        """It stands still within the block, but while a part of the job is `served`."""
        return self._part("waits", self.now())

    def served(self) -> AbstractContextManager[None]:
        """Within the block a part of the job has the room that others of it may wait for."""
        return self._part("served", self.now())

    def begin_clock(self, block: Block, cut_at: float) -> None:
        """Cut this block then, or by as much later as it stands still."""
        stood = self._stood if self._still_since is None else self.stood(self.now())
        self.block, self._block_at, self._is_cut = block, cut_at - stood, False
        self.expect(cut_at)

    def end_clock(self) -> None:
        """Cut nothing."""
        self.block, self._block_at = None, math.inf

    def cut(self, now: float) -> Block | None:
        """Cut the block if its clock has run out; the block, once, if it ignored that since."""
        if now < self.cuts_at or self.block is None:
            return None
        if self._is_cut:
            self._block_at = math.inf
            return self.block
        self.block.cut()
        self._is_cut, self._block_at = True, now + REMINDER_SECONDS - self._stood
        return None

    def _moment(self, own: float) -> float:
        """A moment of its own time, as things stand."""
        return own + self._stood if self._still_since is None else math.inf

    @contextmanager
    def _part(self, does: _Part, now: float) -> Generator[None]:
        self._parts[does] += 1
        self._turn(now)
        try:
            yield
        finally:
            self._parts[does] -= 1
            self._turn(self.now())

    def _turn(self, now: float) -> None:
        """Stand still, or go on, as it should."""
        parts = self._parts
        is_still = parts["queues"] > 0 or (parts["waits"] > 0 and parts["served"] == 0)
        if is_still and self._still_since is None:
            self._still_since = now
        elif not is_still and self._still_since is not None:
            self._stood = self.stood(now)
            self._still_since = None
            self.expect(self.at)


def _nobody(at: float) -> None: ...


class Job:
    """An attempt, or the grading of a group, as whoever waits for it sees it.

    Args:
        label: what it is, for people.
        seconds: its hard deadline.
        release_seconds: how long it may take to end once it is cancelled.
        on_left: told when it is left behind.
        now: the clock of the event loop.
    """

    def __init__(
        self,
        label: str,
        *,
        seconds: float,
        release_seconds: float,
        on_left: Callable[[], None] | None = None,
        now: Callable[[], float] = anyio.current_time,
    ) -> None:
        self.label = label
        self.timer = Timer(seconds, now)
        self.release_seconds = release_seconds
        self.phase = "waiting"
        """What it does, in one word."""
        self.since = now()
        """When that began."""
        self.progress: Callable[[], int] = int
        """How far it is within the phase, in any unit: it moves when this changes."""
        self.is_stray = False
        """It was left behind at its hard deadline."""
        self.was_ended = False
        """By its owner, before it came to an end of its own."""
        self.error: Exception | None = None
        """What its work raised."""
        self.cancel: Callable[[], None] = _no_task
        """Let it release what it holds, and end."""
        self.block: Block | None = None
        """What it does now, to be reminded where it ignores that."""
        self._on_left = on_left
        self._coroutine: Coroutine[object, object, None] | None = None
        self._is_over = False
        self._end_told: anyio.Event | None = None

    def begin(self, progress: Callable[[], int]) -> None:
        """It begins, or begins anew, and waits; its hard deadline is yet to be started."""
        self.progress = progress
        self.timer.stop()
        self.enter("waiting")

    def start(self, phase: str, now: float) -> None:
        """It begins to work, with this phase; its hard deadline runs from now on."""
        self.phase = phase
        self.since = now
        self.timer.start(now)

    def enter(self, phase: str) -> float:
        """It goes on to this phase, and that is now."""
        self.phase = phase
        self.since = self.timer.now()
        return self.since

    @property
    def where(self) -> str:
        """The line at which it waits, and what runs in a thread where it waits for that."""
        line, thread = waits_at(self._coroutine) or "an unknown line", self._thread
        return line if thread is None else f"{line}, which waits for a thread that runs {thread}"

    @property
    def stayed(self) -> str:
        """What it did when it was cancelled, in place of ending, and what to do, for people."""
        if self._thread is None:
            return (
                f"ignored cancellation at {self.where}: let cancellation pass (never catch "
                "BaseException around an await), and bound what is shielded"
            )
        return (
            f"could not be cancelled at {self.where}: give such work to compute(), whose process "
            "is ended at the clock"
        )

    async def perform(self, work: Work) -> None:
        """Do the work; for the Keeper."""
        run_under(self.timer)
        coroutine = self._coroutine = work()
        try:
            self.error = await caught(lambda: coroutine)
            await close_nurseries()
        except BaseException:
            self.was_ended = True
            raise
        finally:
            self._end()

    def _end(self) -> None:
        """Let go of whoever asked for it: all that an attempt holds is then freed with it, and not
        when the garbage collector comes by."""
        self._coroutine = self._on_left = self.block = None
        self.progress, self.cancel = int, _no_task
        self.timer.end_clock()
        self._is_over = True
        if self._end_told is not None:
            self._end_told.set()

    def leave_behind(self) -> None:
        """Cancel it, and ignore whatever it still does; for the Keeper."""
        self.is_stray = True
        self.timer.stop()
        self.cancel()
        logger.warning("%s is left behind: its %s %s", self.label, self.phase, self.stayed)
        if self._on_left is not None:
            self._on_left()

    async def remind(self) -> None:
        """Cancel what ignores it now and then, until it ends; for the Keeper."""
        async with anyio.create_task_group() as group:
            for block in {self.block, self.timer.block}:
                if block is not None:
                    group.start_soon(block.remind)

    @property
    def _thread(self) -> str | None:
        return thread_of(self._coroutine)

    async def ended(self) -> None:
        """Wait until it has ended."""
        if not self._is_over:
            self._end_told = self._end_told or anyio.Event()
            await self._end_told.wait()


def _no_task() -> None: ...
