"""Groups in, batches out: exactly `groups_per_update` usable groups each, in starting order.

Groups settle in any order and serials rise without a gap from the first on, so a usable group waits
here until all that started before it have settled; then it has its place in a batch. Nothing usable
is dropped: it is in one batch or among `leftovers`. Whether a group is usable is known at once, by
`judged`; of a group that is not, no more is kept than what a stop for want of a signal would tell.

Two rules stop a run. Too many unusable groups in a row teach nothing. And where every attempt of
the first few groups failed by the same exception at the same line, no other will come out better:
that is a fault in the code, and is told at once. What may pass, such as a service that does not
answer, is left to the first rule.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from loops_cookbook.attempts import Attempt, Discarded, Fate, Group, Rejection
from loops_cookbook.errors import (
    ClockRanOut,
    NoLearningSignal,
    NothingWorks,
    SandboxError,
    ServiceUnavailable,
)
from loops_cookbook.learning.advantages import AdvantageKind, Advantages, judge
from loops_cookbook.learning.datums import Aggregation, Datum, ScoredAttempt, datums

FIRST_GROUPS = 3
"""Groups that begin a run and fail alike, after which nothing better is to be expected: one task
may be a bad one, and so may two."""

_MAY_PASS = frozenset(kind.__name__ for kind in (ClockRanOut, SandboxError, ServiceUnavailable))


@dataclass(frozen=True, slots=True)
class JudgedGroup:
    """A settled group and what it teaches."""

    group: Group
    verdict: Advantages | Rejection

    @property
    def rejection(self) -> Rejection | None:
        """Why it is not trained; None where it is."""
        return self.verdict if isinstance(self.verdict, Rejection) else None

    @property
    def trained(self) -> tuple[tuple[Attempt, float], ...]:
        """The attempts that are trained, each with its advantage; none of a rejected group."""
        if isinstance(self.verdict, Rejection):
            return ()
        by_index = {attempt.index: attempt for attempt in self.group.attempts}
        pairs = zip(self.verdict.attempts, self.verdict.values.tolist(), strict=True)
        return tuple((by_index[index], value) for index, value in pairs)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one update trains on."""

    groups: tuple[JudgedGroup, ...]
    """The usable groups, in starting order."""
    datums: tuple[Datum, ...]
    """One for each sequence of `attempts`, in their order; none where the advantage is 0."""
    attempts: tuple[Attempt, ...]
    """The attempts that are trained: group after group, by index."""


@dataclass(frozen=True, slots=True)
class Placed:
    """What came of handing a group in. There is more than one of each where later groups had
    waited for this one."""

    groups: tuple[tuple[JudgedGroup, int], ...] = ()
    """Usable groups that now have their place, each with the number of its batch, from 0."""
    batches: tuple[Batch, ...] = ()
    """The batches that are now full, in the order to train them."""


def judged(group: Group, *, advantage: AdvantageKind = "mean") -> JudgedGroup:
    """Look at a settled group; `advantage` as in `judge`."""
    return JudgedGroup(group, judge(group, advantage=advantage))


class Batcher:
    """Collects groups into batches.

    Args:
        groups_per_update: usable groups that make a batch.
        max_consecutive_unusable: rejected groups in a row, in starting order, that end the run;
            0: never.
        aggregation: see `datums`.
        first_serial: the serial of the first group to come.
        settled: serials after it that will not come, since they were settled before.
    """

    def __init__(
        self,
        groups_per_update: int,
        *,
        max_consecutive_unusable: int = 20,
        aggregation: Aggregation = "sum",
        first_serial: int = 0,
        settled: Collection[int] = (),
    ) -> None:
        self._settled = frozenset(settled)
        self._groups_per_update = groups_per_update
        self._limit = max_consecutive_unusable
        self._aggregation: Aggregation = aggregation
        self._next = first_serial
        is_new = first_serial == 0 and not settled
        self._beginning: list[_Unusable] | None = [] if self._limit and is_new else None
        """The first groups of a run; None once it is known not to fail from its beginning on."""
        self._waiting: dict[int, JudgedGroup | _Unusable] = {}
        self._usable: list[JudgedGroup] = []
        self._full = 0
        """Batches so far."""
        self._in_a_row: list[_Unusable] = []
        """The unusable groups directly before `_next`."""

    def add(self, judged: JudgedGroup) -> Placed:
        """Take a judged group in.

        Raises:
            NoLearningSignal: it is the last of too many unusable groups in a row, or of the first
                few that all failed alike (`NothingWorks`).
            ValueError: a group with its serial was here before.
        """
        serial = judged.group.serial
        if serial < self._next or serial in self._waiting:
            raise ValueError(f"group {serial} came in twice")
        if judged.group.graded:
            self._beginning = None
        if judged.rejection is None:
            self._waiting[serial] = judged
        else:
            self._waiting[serial] = unusable = _unusable(judged.group, judged.rejection)
            self._stop_if_nothing_works(unusable)
            self._stop_if_too_many(serial)
        groups: list[tuple[JudgedGroup, int]] = []
        batches: list[Batch] = []
        while self._next in self._waiting:
            placed = self._advance(self._next)
            if placed is not None:
                groups.append((placed, self._full))
            if len(self._usable) == self._groups_per_update:
                batches.append(self._batch())
        return Placed(tuple(groups), tuple(batches))

    def flush(self) -> Placed:
        """Once no more groups come: the last, short batch, if there is a usable group for one."""
        advanced = [self._advance(serial) for serial in sorted(self._waiting)]
        groups = tuple((placed, self._full) for placed in advanced if placed is not None)
        return Placed(groups, (self._batch(),) if self._usable else ())

    @property
    def leftovers(self) -> tuple[JudgedGroup, ...]:
        """The usable groups that are in no batch, in starting order: those with a place first."""
        return (*self._usable, *self.waiting)

    @property
    def waiting(self) -> tuple[JudgedGroup, ...]:
        """Those of `leftovers` that have no place yet."""
        in_order = (self._waiting[serial] for serial in sorted(self._waiting))
        return tuple(each for each in in_order if isinstance(each, JudgedGroup))

    @property
    def full(self) -> int:
        """How many batches were full so far, the short one included."""
        return self._full

    def _stop_if_nothing_works(self, group: "_Unusable") -> None:
        """Raise where it completes the first groups, all of which failed alike."""
        beginning = self._beginning
        if beginning is None or group.serial >= FIRST_GROUPS:
            return
        beginning.append(group)
        lost = [discarded for each in beginning for discarded in each.lost]
        kinds = {(discarded.fate, discarded.exception, discarded.place) for discarded in lost}
        exception = lost[0].exception if lost else None
        if len(kinds) > 1 or exception is None or exception in _MAY_PASS:
            self._beginning = None
        elif len(beginning) == FIRST_GROUPS:
            raise NothingWorks(
                f"nothing has worked so far: all {len(lost)} attempts of the first {FIRST_GROUPS} "
                f"groups are {lost[0].fate} alike: {lost[0].detail}; mend that, then start again"
            )

    def _stop_if_too_many(self, serial: int) -> None:
        """Raise where this one makes the unbroken row of settled unusable groups too long.

        What is yet to settle cannot break a row that is whole, so none is waited for.
        """
        if not self._limit:
            return
        first = last = serial
        while isinstance(self._waiting.get(before := self._before(first)), _Unusable):
            first = before
        while isinstance(self._waiting.get(after := self._after(last)), _Unusable):
            last = after
        row = list(self._in_a_row) if first == self._next else []
        for each in (self._waiting[s] for s in range(first, last + 1) if s not in self._settled):
            assert isinstance(each, _Unusable)
            row.append(each)
        if len(row) >= self._limit:
            raise NoLearningSignal(_why_nothing_is_learnt(row))

    def _after(self, serial: int) -> int:
        """The serial of the group that comes after another."""
        serial += 1
        while serial in self._settled:
            serial += 1
        return serial

    def _before(self, serial: int) -> int:
        serial -= 1
        while serial in self._settled:
            serial -= 1
        return serial

    def _advance(self, serial: int) -> JudgedGroup | None:
        """Go past a settled group; it, where it is usable."""
        settled = self._waiting.pop(serial)
        self._next = self._after(serial)
        if isinstance(settled, JudgedGroup):
            self._usable.append(settled)
            self._in_a_row.clear()
            return settled
        if self._limit:
            self._in_a_row.append(settled)
        return None

    def _batch(self) -> Batch:
        groups = tuple(self._usable)
        self._usable.clear()
        self._full += 1
        trained = [pair for judged in groups for pair in judged.trained]
        scored = [ScoredAttempt(attempt.sequences, value) for attempt, value in trained]
        return Batch(
            groups=groups,
            datums=datums(scored, self._aggregation),
            attempts=tuple(attempt for attempt, _ in trained),
        )


@dataclass(frozen=True, slots=True)
class _Unusable:
    """What is kept of a rejected group."""

    serial: int
    task: str
    reason: str
    rewards: tuple[float, ...]
    lost: tuple[Discarded, ...]
    turns: int
    cut_turns: int


def _unusable(group: Group, rejection: Rejection) -> _Unusable:
    return _Unusable(
        serial=group.serial,
        task=group.task,
        reason=rejection.reason,
        rewards=tuple(a.reward for a in group.attempts if a.reward is not None),
        lost=tuple(a.discarded for a in group.attempts if a.discarded is not None),
        turns=sum(len(attempt.trajectory.turns) for attempt in group.attempts),
        cut_turns=sum(attempt.trajectory.cut_turns for attempt in group.attempts),
    )


def _why_nothing_is_learnt(row: Sequence[_Unusable]) -> str:
    """One line: how many groups, why, what their rewards looked like, what to change."""
    reasons = Counter(each.reason for each in row)
    rewards = Counter(f"{reward:.6g}" for each in row for reward in each.rewards)
    lost = [discarded for each in row for discarded in each.lost]
    first, last = row[0], row[-1]
    why = _told(reasons) if len(reasons) > 1 else row[0].reason
    parts = [
        f"{len(row)} groups in a row taught nothing ({why}): "
        f"{first.serial} ({first.task}) to {last.serial} ({last.task})",
        f"rewards {_told(rewards) or 'none'}",
    ]
    if lost:
        fates = Counter(discarded.fate.value for discarded in lost)
        parts.append(f"attempts without a reward: {_told(fates)}, {_commonest(lost)}")
        if fates.keys() == {Fate.NO_REPLY.value}:
            parts.append("see that run() calls generate() of its model, and awaits it")
    if cut := sum(each.cut_turns for each in row):
        turns = sum(each.turns for each in row)
        parts.append(f"{cut} of {turns} replies were cut at a token limit: see sampling.max_tokens")
    if len(rewards) == 1:
        parts.append("all rewards are one number: see that the grader can give another")
    parts.extend(advice for reason, advice in _ADVICE.items() if reasons[reason])
    return "; ".join(parts)


def _commonest(lost: Sequence[Discarded]) -> str:
    """The commonest way to be lost, by the words of the first that was lost like that."""
    kinds = Counter((discarded.fate, discarded.exception) for discarded in lost)
    [(kind, number)] = kinds.most_common(1)
    detail = next(d.detail for d in lost if (d.fate, d.exception) == kind)
    how_often = "all alike" if number == len(lost) else f"most often ({_times(number)})"
    return f"{how_often}: {detail or kind[0].value}"


def _told(counts: Counter[str], most: int = 5) -> str:
    """Counts in words, the largest first: `0 (12 times), 1 (4 times)`."""
    told = [f"{what} ({_times(number)})" for what, number in counts.most_common(most)]
    rest = counts.total() - sum(number for _, number in counts.most_common(most))
    return ", ".join([*told, f"others ({_times(rest)})"] if rest else told)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


_ADVICE = {
    "no_variance": "attempts at a task all scored the same: choose tasks that the model solves "
    "some of the time (easier where it never does, harder where it always does), or raise "
    "training.group_size or sampling.temperature",
    "too_few": "groups had fewer than two attempts that can be trained: mend what discards them "
    "first (rollouts.jsonl says what)",
}
