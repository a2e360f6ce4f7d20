"""One try of an attempt: lease, setup, run, grade, release, each under its clock.

A try is looked at from outside: what it came to stands on it at any moment, so that a try which is
cancelled, or left behind with its job, still tells what is known. One block lies around the lease,
so that scopes which a lease may hold open close in order. What ends the try ends it: the clock of
its setup or of its last grading. It shields the release before the lease is left.
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from pydantic import BaseModel

from loops_cookbook.attempts import Attempt, Discarded, Fate, Timing
from loops_cookbook.errors import ClockRanOut, Discard, EngineDied
from loops_cookbook.problems import said
from loops_cookbook.records import TRAIN
from loops_cookbook.rollouts.blocks import Block
from loops_cookbook.rollouts.faults import StrayCancellation, caught, place_of, told
from loops_cookbook.rollouts.grading import graded, reward_of
from loops_cookbook.rollouts.jobs import Job
from loops_cookbook.rollouts.keeper import Keeper
from loops_cookbook.rollouts.left_open import LeftOpen, blamed_on, explained, tell
from loops_cookbook.rollouts.limits import Limits, PhaseSlot, Room
from loops_cookbook.runtimes.base import Clocks, Lease, Place, Recorded, Runtime, recorded_of
from loops_cookbook.services.base import SampleParams
from loops_cookbook.tasks import Task

logger = logging.getLogger(__name__)

NOT_GRADED_YET = math.nan
"""The reward of an attempt whose runtime grades groups only, until its group is graded."""

MARGIN_SECONDS = 10.0
"""What the hard deadline allows beyond the sum of the clocks."""

Verdict: TypeAlias = float | Discarded
"""What a try came to: a reward, or why it has none."""


@dataclass(frozen=True, slots=True)
class AttemptRules:
    """What binds every attempt of a run."""

    clocks: Clocks
    max_seq_len: int | None
    """Tokens of a sequence that the trainer takes; None where nothing is trained."""
    max_rollout_retries: int = 2


@dataclass(frozen=True, slots=True)
class SamplingTerms:
    """How the attempts of one purpose sample."""

    params: SampleParams
    seed: int = 0
    """Of the run; each call's own is drawn from it."""
    max_attempt_tokens: int | None = None
    purpose: str = TRAIN
    """`TRAIN`, or the name of an evaluation set."""


_NOTHING = Recorded()


def _nobody(attempt: Attempt) -> None: ...


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """What the attempts of one purpose share."""

    runtime: Runtime
    limits: Limits
    keeper: Keeper
    rules: AttemptRules
    terms: SamplingTerms
    on_end: Callable[[Attempt], None] = _nobody
    """Told of each attempt once, when it has ended, cancelled ones included."""


class Trial:
    """One try, and how far it came.

    Args:
        context: what all attempts share.
        task: what it works at.
        place: which try it is.
        job: the attempt's, which it enters its phases in.
    """

    def __init__(
        self, context: AttemptContext, task: Task[BaseModel], place: Place, job: Job
    ) -> None:
        self.verdict: Verdict | None = None
        """What it came to, once that is known."""
        self.may_retry = False
        """Whether another try may do better."""
        self.fatal: EngineDied | None = None
        """What ends the run."""
        self.lease: Lease | None = None
        self.recorded = _NOTHING
        self.started_at = time.time()
        self.timed_out = False
        self._context = context
        self._task = task
        self._place = place
        self._job = job
        self._clocks = clocks = context.rules.clocks
        self._grading_tries = 1 + context.runtime.capabilities.grading_retries
        self._block = Block()
        self._setup_seconds = 0.0
        self._cut_in: str | None = None
        """The phase that came to nothing, once its release has begun."""
        self._manager: AbstractAsyncContextManager[Lease] | None = None
        self._release_fault: Exception | None = None
        self._start = Room(context.limits.starting, job.timer)
        self._sampling = PhaseSlot(context.limits.sampling, clocks.rollout_seconds, job.timer)
        self._grading: list[PhaseSlot] = []

    @property
    def timing(self) -> Timing:
        """Seconds in each phase."""
        grading = waiting = 0.0
        for slot in self._grading:
            grading += slot.used
            waiting += slot.waited
        return Timing(
            setup=self._setup_seconds,
            sampling=self._sampling.used,
            grading=grading,
            waiting=waiting + self._start.waited + self._sampling.waited,
        )

    async def live(self) -> None:
        """Go from the lease to its release; for the Keeper."""
        job, clocks, block = self._job, self._clocks, self._block
        job.begin(self._calls)
        try:
            job.start("setup", await self._start.take())
            fault = await caught(self._hold_lease)
            if isinstance(fault, StrayCancellation):
                self._judge_stray(fault)
            elif isinstance(fault, Exception):
                raise fault
            if block.was_cut and self.verdict is None:
                self._judge_cut()
            if block.left_open:
                self._tell_left_open()
            if block.release_was_cut:
                late = _ran_out("release", clocks.release_seconds)
                logger.warning("%s: %s; what it held may be left over", job.label, late)
        finally:
            job.timer.end_clock()
            self._start.give_back()

    def give_back(self) -> None:
        """Make room for others in every phase."""
        for room in (self._start, self._sampling, *self._grading):
            room.give_back()

    def leave_behind(self) -> None:
        """Judge a try that outlasted its hard deadline by the phase that it is in."""
        self.give_back()
        self.may_retry = False
        if self.verdict is not None:
            return
        self._look()
        fate = Fate.UNGRADED if self._job.phase == "grading" else Fate.FAILED
        fault = f"{self._job.phase} {self._job.stayed}"
        self.verdict = Discarded(fate, fault, ClockRanOut.__name__)

    def cut(self) -> None:
        """Judge a try that the end of the run cut: what is known stands."""
        self.give_back()
        if self.verdict is None or self.may_retry:
            self._look()
            cut_in = self._cut_in if self.verdict is None else None
            during = cut_in or self._job.phase
            self.verdict = Discarded(Fate.CANCELLED, f"the run stopped during {during}")

    async def _hold_lease(self) -> None:
        job, block = self._job, self._block
        with block:
            job.block = block
            job.timer.begin_clock(block, job.since + self._clocks.setup_seconds)
            await self._use_lease()

    async def _use_lease(self) -> None:
        lease = self.lease = await self._open()
        if lease is None:
            return
        job = self._job
        try:
            is_ready = await self._setup(lease)
            self._setup_seconds = job.timer.now() - job.since
            if is_ready and await self._run(lease):
                await self._grade(lease)
        finally:
            self.give_back()
            if self.verdict is None:
                self._cut_in = job.phase
            self._block.release()
            release_ends = job.enter("release") + self._clocks.release_seconds
            job.timer.begin_clock(self._block, release_ends)
            await self._release()

    def _judge_cut(self) -> None:
        """Judge a try whose block was cut, by the clock of its setup or of its last grading."""
        if self._grading:
            self._look()
            self.verdict = ungraded(_ran_out("grading", self._clocks.grading_seconds))
        else:
            self._setup_seconds = self._clocks.setup_seconds
            self._fail("setup", _ran_out("setup", self._clocks.setup_seconds))

    def _judge_stray(self, fault: StrayCancellation) -> None:
        """Judge a try that a scope cancelled which its lease held open, of a client perhaps."""
        if self.verdict is not None:
            return
        self._look()
        phase = self._cut_in or "setup"
        method = "grade()" if phase == "grading" else f"{phase}()"
        why = explained(fault, method, self._block.left_open)
        if why is fault and self._release_fault is not None:  # raised as such a client is closed
            why = blamed_on(self._release_fault, fault, method)
        if phase == "grading":
            self.verdict = ungraded(why)
        else:
            self._fail(phase, why)

    async def _open(self) -> Lease | None:
        async def enter() -> Lease:
            self._manager = self._context.runtime.open(self._task, self._place)
            return await self._manager.__aenter__()

        lease = await caught(enter)
        if isinstance(lease, Exception):
            self._fail("setup", lease)
            return None
        return lease

    async def _setup(self, lease: Lease) -> bool:
        fault = await caught(lease.setup)
        if self._block.was_cut and not isinstance(fault, Exception):  # it kept that to itself
            fault = _ran_out("setup", self._clocks.setup_seconds)
        if isinstance(fault, Exception):  # what else it gives is nobody's
            self._fail("setup", fault)
            return False
        self._job.timer.end_clock()
        return True

    async def _run(self, lease: Lease) -> bool:
        """Let the agent work; whether there is something to grade."""
        self._job.enter("run")
        slot = self._sampling
        takes_slot_itself = "sampling" in self._context.runtime.capabilities.acquires

        async def run() -> None:
            if takes_slot_itself:
                await lease.run(slot)
            else:
                async with slot:
                    await lease.run(slot)

        fault = await caught(run) or self._block.death_in("run()")
        self._start.give_back()
        slot.give_back()
        self.timed_out = slot.timed_out
        self._look()
        if left_open := slot.block.left_open:
            fault = explained(fault, "run()", left_open)
            tell(self._job.label, "run()", left_open)
        if not isinstance(fault, Discard):  # what failed before tells more than what came of it
            fault = self.recorded.failure or fault
        if fault is not None:
            self._fail("run", fault)
        elif self.recorded.trajectory.sampled_tokens == 0:
            why = "its clock cut it" if self.timed_out else "it ended"
            self.verdict = Discarded(Fate.NO_REPLY, f"{why} before the policy had said anything")
        return self.verdict is None

    async def _grade(self, lease: Lease) -> None:
        self._job.enter("grading")
        if not self._context.runtime.capabilities.grades_attempts:
            self.verdict = NOT_GRADED_YET
            return
        result = await graded(
            partial(lease.grade, timed_out=self.timed_out),
            partial(reward_of, whose=self._job.label),
            self._grading_slot,
            self._grading_tries,
        )
        if not isinstance(result, Exception):
            result = self._block.death_in("grade()") or result
        for slot in self._grading:
            if slot.block is not self._block:
                tell(self._job.label, "grade()", slot.block.left_open)
        self._look()
        if isinstance(result, Exception):
            self.verdict = ungraded(result)
            self.fatal = result if isinstance(result, EngineDied) else None
        else:
            self.verdict = result

    def _grading_slot(self) -> PhaseSlot:
        is_last = len(self._grading) + 1 == self._grading_tries
        slot = PhaseSlot(
            self._context.limits.grading,
            self._clocks.grading_seconds,
            self._job.timer,
            around=self._block if is_last else None,
        )
        self._grading.append(slot)
        return slot

    async def _release(self) -> None:
        assert self._manager is not None
        fault = await caught(partial(self._manager.__aexit__, None, None, None))
        if isinstance(fault, Exception) and not self._block.release_was_cut:
            self._release_fault = fault
            late = told("release", fault)
            logger.warning("%s: %s; what it held may be left over", self._job.label, late)

    def _tell_left_open(self) -> None:
        opened: dict[str, list[LeftOpen]] = {}
        for left in self._block.left_open:
            opened.setdefault(self._where_opened(left), []).append(left)
        for method, those in opened.items():
            tell(self._job.label, method, those)

    def _where_opened(self, left: LeftOpen) -> str:
        """The method that opened what is left open at the end, as far as that is known."""
        is_of_setup = self._sampling.block.was_entered_within(left.what)
        if is_of_setup:
            return "setup()"
        later = "grade() or close()" if self._grading else "close()"
        return later if is_of_setup is False and self.timing.sampling else f"setup(), {later}"

    def _calls(self) -> int:
        return 0 if self.lease is None else len(recorded_of(self.lease, self.recorded).calls)

    def _look(self) -> None:
        """Take what the lease has recorded so far."""
        if self.lease is not None:
            self.recorded = recorded_of(self.lease, self.recorded)

    def _fail(self, phase: str, error: Exception) -> None:
        if isinstance(error, Discard):
            self.verdict = dropped(error)
            return
        logger.debug("%s: a try failed", self._job.label, exc_info=error)
        self.verdict = _lost(Fate.FAILED, phase, error)
        self.fatal = error if isinstance(error, EngineDied) else None
        self.may_retry = self.fatal is None


def group_label(purpose: str, serial: int, task: Task[BaseModel]) -> str:
    """A group, for people."""
    of = "" if purpose == TRAIN else f" of {purpose}"
    return f"group {serial}{of} (task {task.name!r})"


def hard_deadline(clocks: Clocks, grading_retries: int) -> float:
    """Seconds after which a try is left behind; every clock in it should have ended it long before.

    They count its work, not its waits for a slot.
    """
    grading = clocks.grading_seconds * (1 + grading_retries)
    once = clocks.setup_seconds + clocks.rollout_seconds + clocks.release_seconds
    return once + grading + MARGIN_SECONDS


def dropped(error: Discard) -> Discarded:
    """The end of what an Episode dropped on purpose."""
    return Discarded(Fate.DROPPED, said(error))


def ungraded(error: Exception) -> Discarded:
    """The end of what could not be graded, or was dropped by its grader."""
    if isinstance(error, Discard):
        return dropped(error)
    return _lost(Fate.UNGRADED, "grading", error)


def _lost(fate: Fate, phase: str, error: Exception) -> Discarded:
    return Discarded(fate, told(phase, error), type(error).__name__, place_of(error))


def _ran_out(phase: str, seconds: float) -> ClockRanOut:
    return ClockRanOut(f"{phase} outlasted its clock of {seconds:g} s")
