"""One attempt: tries until one of them counts, and the one end that comes of them.

Whatever user code does, an attempt ends exactly once, with a reward or with the reason why it has
none, and the run goes on; only the death of the engine ends more than the attempt. A try that
failed is tried again on a new lease; every other end is final. An attempt is one job of the Keeper,
from its first try to its last; what it still does after it was left behind is ignored.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from anyio.lowlevel import checkpoint
from pydantic import BaseModel

from loops_cookbook.attempts import Attempt, Discarded, Fate, Flags, Timing
from loops_cookbook.rollouts.jobs import Job
from loops_cookbook.rollouts.order import CallSeeds
from loops_cookbook.rollouts.trial import AttemptContext, Trial, group_label, hard_deadline
from loops_cookbook.runtimes.base import Lease, Place
from loops_cookbook.tasks import Task
from loops_cookbook.tokens import Sequence, sequences
from loops_cookbook.values import value


@dataclass(frozen=True, slots=True)
class GroupStart:
    """A group as it starts: what its attempts have in common."""

    serial: int
    task: Task[BaseModel]
    epoch: int = 0
    policy_version: int = 0
    """The version that is served now, and the oldest that may sample."""


@value
class Finished:
    """An attempt that ended, and the lease of its last try, released: a group grader asks it."""

    attempt: Attempt
    lease: Lease | None


async def run_attempts(
    context: AttemptContext,
    start: GroupStart,
    indices: Iterable[int],
    *,
    on_end: Callable[[Finished], None],
) -> None:
    """Run attempts of a group at once, each until one of its tries counts or no more are allowed.

    Args:
        context: what all attempts share; its own `on_end` is for the caller to tell.
        start: the group.
        indices: each attempt's place in the group.
        on_end: told of the end of each, once, also where this raises.

    Raises:
        EngineDied: no model call can succeed any more.
    """
    group = group_label(context.terms.purpose, start.serial, start.task)
    running = [
        _RunningAttempt(context, start, index, f"attempt {index} of {group}", on_end)
        for index in indices
    ]
    try:
        await context.keeper.outcomes({attempt.job: attempt.live for attempt in running})
    except BaseException:  # reported, never kept
        with ExitStack() as each:  # also where what is told of another one raises
            for attempt in running:
                each.callback(attempt.cut)
        raise


class _RunningAttempt:
    """An attempt, and how far it came."""

    def __init__(
        self,
        context: AttemptContext,
        start: GroupStart,
        index: int,
        label: str,
        on_end: Callable[[Finished], None],
    ) -> None:
        clocks = context.rules.clocks
        self.job = Job(
            label,
            seconds=hard_deadline(clocks, context.runtime.capabilities.grading_retries),
            release_seconds=clocks.release_seconds,
            on_left=self._leave_behind,
            now=context.keeper.now,
        )
        self._context = context
        self._start = start
        self._index = index
        self._on_end = on_end
        self._has_ended = False
        self._trials = [self._new_trial(0)]

    async def live(self) -> None:
        """Try, and try again while that may do better; for the Keeper."""
        rules = self._context.rules
        while True:
            trial = self._trials[-1]
            await trial.live()
            if self._has_ended:  # without it
                return
            if not trial.may_retry or len(self._trials) > rules.max_rollout_retries:
                break
            await checkpoint()  # a run that ends meanwhile makes none
            self._trials.append(self._new_trial(len(self._trials)))
        self._end()
        if trial.fatal is not None:
            raise trial.fatal

    def cut(self) -> None:
        """End it, if that is yet to be done, as the end of the run finds it."""
        if not self._has_ended:
            self._trials[-1].cut()
            self._end()

    def _leave_behind(self) -> None:
        if not self._has_ended:
            self._trials[-1].leave_behind()
            self._end()

    def _new_trial(self, trial: int) -> Trial:
        place = _place(self._context, self._start, self._index, trial=trial)
        return Trial(self._context, self._start.task, place, self.job)

    def _end(self) -> None:
        self._has_ended = True
        max_seq_len = self._context.rules.max_seq_len
        attempt = _attempt(self._start, self._index, self._trials, max_seq_len)
        self._on_end(Finished(attempt, self._trials[-1].lease))


def never_begun(start: GroupStart, index: int) -> Attempt:
    """An attempt that the end of the run cut before it did anything."""
    why = Discarded(Fate.CANCELLED, "the run stopped before it began")
    return Attempt(group=start.serial, index=index, task=start.task.name, discarded=why)


def _place(context: AttemptContext, start: GroupStart, index: int, *, trial: int) -> Place:
    terms = context.terms
    return Place(
        group=start.serial,
        attempt=index,
        trial=trial,
        params=terms.params,
        policy_version=start.policy_version,
        call_seed=CallSeeds(terms.seed, terms.purpose, start.serial, index, trial),
        max_attempt_tokens=terms.max_attempt_tokens,
        purpose=terms.purpose,
    )


def _attempt(
    start: GroupStart, index: int, trials: list[Trial], max_seq_len: int | None
) -> Attempt:
    """The attempt that these tries make; the last one counts."""
    last = trials[-1]
    recorded, verdict = last.recorded, last.verdict
    rows = sequences(recorded.trajectory)
    fitting = tuple(row for row in rows if _fits(row, max_seq_len))
    if isinstance(verdict, float) and not fitting:
        shortest = min((len(row.ids) for row in rows), default=0)
        verdict = Discarded(
            Fate.TOO_LONG,
            f"the shortest of its {len(rows)} sequences has {shortest} tokens, and the trainer "
            f"takes {max_seq_len} (model.max_seq_len)",
        )
    return Attempt(
        group=start.serial,
        index=index,
        task=start.task.name,
        reward=verdict if isinstance(verdict, float) else None,
        discarded=verdict if isinstance(verdict, Discarded) else None,
        flags=Flags(
            timed_out=last.timed_out, context_full=recorded.context_full, retried=len(trials) > 1
        ),
        tries=len(trials),
        trajectory=recorded.trajectory,
        sequences=fitting,
        metadata=recorded.metadata,
        calls=recorded.calls,
        timing=_timing(trials),
        started_at=trials[0].started_at,
    )


def _timing(trials: list[Trial]) -> Timing:
    """That of the last try, with the waits of them all."""
    last = trials[-1].timing
    if len(trials) == 1:
        return last
    return replace(last, waiting=sum(trial.timing.waiting for trial in trials))


def _fits(row: Sequence, max_seq_len: int | None) -> bool:
    """Whether a trainer can use it: it is not too long, and a position predicts its last token."""
    return len(row.ids) > 1 and (max_seq_len is None or len(row.ids) <= max_seq_len)
