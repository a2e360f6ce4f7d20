"""One group: all attempts at a task at once, then the word of a group grader where there is one.

A group settles when its last attempt has ended. Each of its attempts is reported once, when its
reward is final: at its own end, or after `grade_group`. A group grader sees the attempts that could
be graded, with their leases, which are released by then; it replaces all their rewards or, by a
fault or by `Discard`, takes all of them away.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from loops_cookbook.attempts import Attempt, Discarded, Fate, Group
from loops_cookbook.errors import ClockRanOut, EngineDied
from loops_cookbook.rollouts.attempt import Finished, GroupStart, never_begun, run_attempts
from loops_cookbook.rollouts.grading import graded, rewards_of
from loops_cookbook.rollouts.jobs import Job
from loops_cookbook.rollouts.left_open import tell
from loops_cookbook.rollouts.limits import PhaseSlot
from loops_cookbook.rollouts.trial import MARGIN_SECONDS, AttemptContext, group_label, ungraded
from loops_cookbook.runtimes.base import Graded, Recorded, recorded_of


async def run_group(
    context: AttemptContext,
    start: GroupStart,
    *,
    size: int,
    on_cut: Callable[[Group], None] | None = None,
) -> Group:
    """Run `size` attempts and settle them.

    Args:
        context: what all attempts share.
        start: the group.
        size: how many attempts.
        on_cut: told what the group came to, where this raises.

    Raises:
        EngineDied: no model call can succeed any more.
    """
    running = _RunningGroup(context, start, size)
    try:
        await running.run()
    except BaseException:  # reported, never kept
        group = running.cut()
        if on_cut is not None:
            on_cut(group)
        raise
    return running.settled()


class _RunningGroup:
    """A group, and how far it came."""

    def __init__(self, context: AttemptContext, start: GroupStart, size: int) -> None:
        self._context = context
        self._start = start
        self._size = size
        self._began = context.keeper.now()
        self._grades_groups = context.runtime.capabilities.grades_groups
        self._ended: dict[int, Attempt] = {}
        """Reported, by index."""
        self._to_grade: dict[int, Finished] = {}
        """Ended with a reward, or ready for one, that the group grader decides."""

    async def run(self) -> None:
        """Run the attempts, then the group grader."""
        await run_attempts(self._context, self._start, range(self._size), on_end=self._end)
        if self._to_grade:
            await self._grade()

    def settled(self) -> Group:
        """The group, when every attempt is reported."""
        start = self._start
        return Group(
            serial=start.serial,
            task=start.task.name,
            task_index=start.task.index,
            source=start.task.source,
            epoch=start.epoch,
            policy_version=start.policy_version,
            attempts=tuple(self._ended[index] for index in range(self._size)),
            seconds=self._context.keeper.now() - self._began,
        )

    def cut(self) -> Group:
        """The group as the end of the run finds it; what is not settled is cancelled."""
        cancelled = Discarded(Fate.CANCELLED, "the run stopped before its group was graded")
        for index in range(self._size):
            if index in self._to_grade:
                self._withhold(self._to_grade[index].attempt, cancelled)
            elif index not in self._ended:
                self._report(never_begun(self._start, index))
        return self.settled()

    def _end(self, finished: Finished) -> None:
        if self._grades_groups and finished.attempt.reward is not None:
            self._to_grade[finished.attempt.index] = finished
        else:
            self._report(finished.attempt)

    async def _grade(self) -> None:
        finished = [self._to_grade[index] for index in sorted(self._to_grade)]
        result = await _group_grade(self._context, self._start, finished)
        finished = [replace(each, attempt=_with_all_calls(each)) for each in finished]
        self._to_grade.clear()
        if isinstance(result, Exception):
            for each in finished:
                self._withhold(each.attempt, ungraded(result))
            if isinstance(result, EngineDied):
                raise result
        else:
            for each, reward in zip(finished, result, strict=True):
                self._report(replace(each.attempt, reward=reward))

    def _withhold(self, attempt: Attempt, why: Discarded) -> None:
        self._report(replace(attempt, reward=None, discarded=why))

    def _report(self, attempt: Attempt) -> None:
        self._ended[attempt.index] = attempt
        self._context.on_end(attempt)


def _with_all_calls(finished: Finished) -> Attempt:
    """The attempt with the calls that its lease has recorded since, such as a judge's."""
    if finished.lease is None:
        return finished.attempt
    before = Recorded(calls=finished.attempt.calls)
    return replace(finished.attempt, calls=recorded_of(finished.lease, before).calls)


async def _group_grade(
    context: AttemptContext, start: GroupStart, finished: Sequence[Finished]
) -> Sequence[float] | Exception:
    """Ask the group grader for a reward for each attempt; what it gave, or why it gave none."""
    clocks, tries = context.rules.clocks, 1 + context.runtime.capabilities.grading_retries
    name = group_label(context.terms.purpose, start.serial, start.task)
    job = Job(
        f"the grading of {name}",
        seconds=clocks.grading_seconds * tries + MARGIN_SECONDS,
        release_seconds=clocks.release_seconds,
        now=context.keeper.now,
    )
    slots: list[PhaseSlot] = []
    results: list[Sequence[float] | Exception] = []

    def new_slot() -> PhaseSlot:
        slots.append(PhaseSlot(context.limits.grading, clocks.grading_seconds, job.timer))
        return slots[-1]

    async def grade() -> None:
        job.start("grading", job.timer.now())
        given = [Graded(f.lease, f.attempt) for f in finished if f.lease is not None]
        whose = [f"attempt {f.attempt.index} of {name}" for f in finished]
        results.append(
            await graded(
                partial(context.runtime.grade_group, start.task, given),
                partial(rewards_of, whose=whose, group=name),
                new_slot,
                tries,
            )
        )

    try:
        if not await context.keeper.outcome(job, grade):
            return ClockRanOut(f"grade_group of {name} {job.stayed}")
    finally:
        for slot in slots:
            slot.give_back()
            tell(job.label, "grade_group()", slot.block.left_open)
    return results[0]
