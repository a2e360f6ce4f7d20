"""Groups in, batches out: exactly `groups_per_update` usable groups each, in starting order.

Groups settle in any order and serials rise without a gap from the first on, so a group waits here
until all that started before it have settled; then it is trained, or it is one more unusable
group in a row. Whether a group is usable is known at once: a caller need not wait to replace it.
Nothing is dropped: every group that came in is in one batch or among `leftovers`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loops_cookbook.attempts import Attempt, Group, Rejection
from loops_cookbook.errors import NoLearningSignal
from loops_cookbook.learning.advantages import AdvantageKind, Advantages, judge
from loops_cookbook.learning.datums import Aggregation, Datum, ScoredAttempt, datums


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
    rejected: tuple[JudgedGroup, ...]
    """The groups rejected since the batch before, in starting order: they count in this row."""
    datums: tuple[Datum, ...]
    """One for each sequence of `attempts`, in their order."""
    attempts: tuple[Attempt, ...]
    """The attempts that are trained: group after group, by index."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What came of handing a group in."""

    group: JudgedGroup
    batches: tuple[Batch, ...] = ()
    """The batches that it completed, in the order to train them: none for most groups, several
    where later groups had waited for this one."""


class Batcher:
    """Collects groups into batches.

    Args:
        groups_per_update: usable groups that make a batch.
        max_consecutive_unusable: rejected groups in a row, in starting order, that end the run;
            0: never.
        advantage: see `judge`.
        aggregation: see `datums`.
        first_serial: the serial of the first group to come.
    """

    def __init__(
        self,
        groups_per_update: int,
        *,
        max_consecutive_unusable: int = 20,
        advantage: AdvantageKind = "mean",
        aggregation: Aggregation = "sum",
        first_serial: int = 0,
    ) -> None:
        self._groups_per_update = groups_per_update
        self._limit = max_consecutive_unusable
        self._advantage: AdvantageKind = advantage
        self._aggregation: Aggregation = aggregation
        self._next = first_serial
        self._waiting: dict[int, JudgedGroup] = {}
        self._usable: list[JudgedGroup] = []
        self._rejected: list[JudgedGroup] = []
        self._in_a_row: list[JudgedGroup] = []
        """The unusable groups directly before `_next`."""

    def add(self, group: Group) -> Judged:
        """Judge a group and take it in.

        Raises:
            NoLearningSignal: it is the last of too many unusable groups in a row.
            ValueError: a group with its serial was here before.
        """
        if group.serial < self._next or group.serial in self._waiting:
            raise ValueError(f"group {group.serial} came in twice")
        judged = JudgedGroup(group, judge(group, advantage=self._advantage))
        self._waiting[group.serial] = judged
        row = self._row_around(group.serial)
        if self._limit and len(row) >= self._limit:
            raise NoLearningSignal(_why_nothing_is_learnt(row))
        batches: list[Batch] = []
        while self._next in self._waiting:
            self._advance(self._waiting.pop(self._next))
            if len(self._usable) == self._groups_per_update:
                batches.append(self._batch())
        return Judged(judged, tuple(batches))

    def flush(self) -> Batch | None:
        """The last, short batch, once no more groups come; None without a usable group."""
        for serial in sorted(self._waiting):
            self._advance(self._waiting.pop(serial))
        return self._batch() if self._usable else None

    @property
    def leftovers(self) -> tuple[JudgedGroup, ...]:
        """The groups that are in no batch, in starting order."""
        left = [*self._usable, *self._rejected, *self._waiting.values()]
        return tuple(sorted(left, key=lambda judged: judged.group.serial))

    def _row_around(self, serial: int) -> list[JudgedGroup]:
        """The unbroken row of settled unusable groups that this one is part of.

        What is yet to settle cannot break a row that is whole, so none is waited for.
        """
        if self._waiting[serial].rejection is None:
            return []
        first = last = serial
        while self._is_waiting_unusable(first - 1):
            first -= 1
        while self._is_waiting_unusable(last + 1):
            last += 1
        before = self._in_a_row if first == self._next else []
        return [*before, *(self._waiting[s] for s in range(first, last + 1))]

    def _is_waiting_unusable(self, serial: int) -> bool:
        judged = self._waiting.get(serial)
        return judged is not None and judged.rejection is not None

    def _advance(self, judged: JudgedGroup) -> None:
        self._next = judged.group.serial + 1
        if judged.rejection is None:
            self._usable.append(judged)
            self._in_a_row.clear()
            return
        self._rejected.append(judged)
        if self._limit:
            self._in_a_row.append(judged)

    def _batch(self) -> Batch:
        groups, rejected = tuple(self._usable), tuple(self._rejected)
        self._usable.clear()
        self._rejected.clear()
        trained = [pair for judged in groups for pair in judged.trained]
        scored = [ScoredAttempt(attempt.sequences, value) for attempt, value in trained]
        return Batch(
            groups=groups,
            rejected=rejected,
            datums=datums(scored, self._aggregation),
            attempts=tuple(attempt for attempt, _ in trained),
        )


def _why_nothing_is_learnt(row: Sequence[JudgedGroup]) -> str:
    """One line: how many groups, why, what their rewards looked like, what to change."""
    attempts = [attempt for judged in row for attempt in judged.group.attempts]
    reasons = Counter(judged.rejection.reason for judged in row if judged.rejection is not None)
    rewards = Counter(f"{a.reward:.6g}" for a in attempts if a.reward is not None)
    fates = Counter(a.discarded.fate.value for a in attempts if a.discarded is not None)
    first, last = row[0].group, row[-1].group
    parts = [
        f"{len(row)} groups in a row taught nothing ({_told(reasons)}): "
        f"{first.serial} ({first.task}) to {last.serial} ({last.task})",
        f"rewards {_told(rewards) or 'none'}",
    ]
    if fates:
        parts.append(f"attempts without a reward: {_told(fates)}")
    parts.extend(advice for reason, advice in _ADVICE.items() if reasons[reason])
    return "; ".join(parts)


def _told(counts: Counter[str], most: int = 5) -> str:
    """Counts in words, the largest first: `0 (12 times), 1 (4 times)`."""
    told = [f"{what} ({number} times)" for what, number in counts.most_common(most)]
    rest = counts.total() - sum(number for _, number in counts.most_common(most))
    return ", ".join([*told, f"others ({rest} times)"] if rest else told)


_ADVICE = {
    "no_variance": "attempts at a task all scored the same: choose tasks that the model solves "
    "some of the time (easier where it never does, harder where it always does), or raise "
    "training.group_size, sampling.temperature or, where replies are cut, sampling.max_tokens",
    "too_few": "groups had fewer than two attempts that can be trained: mend what discards them "
    "first (rollouts.jsonl says what)",
}
