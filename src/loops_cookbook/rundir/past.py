"""Where a run stood when it was stopped or killed, read from its folder.

An update that was kept is applied when the run goes on, whether or not it was before, so its groups
are trained. A group is settled when it was trained or its rejection was written; every other one
that was started was cut, and is started again under its serial. Each start of a group owes one row
to `rollouts.jsonl` for each of its attempts: the rows that are missing are those of attempts that a
kill cut, or of an update that a kill kept from being recorded.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from loops_cookbook.attempts import Fate, Flags, Rejection, Timing
from loops_cookbook.errors import RunFolderError
from loops_cookbook.journal import Row
from loops_cookbook.records import (
    EvaluationRow,
    GroupRow,
    RolloutRow,
    StepRow,
)
from loops_cookbook.rundir.read import RecordedRun, rollout_row
from loops_cookbook.rundir.references import kept_checkpoints
from loops_cookbook.rundir.rows import CheckpointRow, StartRow
from loops_cookbook.rundir.updates import UpdateStore

_TRANSCRIPT = re.compile(r"(\d+)-(\d+)(?:\.(\d+))?\.json\Z")
_CUT = "cut when the run was killed; its group was started again"

Place = tuple[int, int]
"""A group's serial and an attempt's index."""


@dataclass(frozen=True, slots=True)
class Past:
    """What a run that goes on has to know of before."""

    checkpoint: CheckpointRow | None = None
    """What to load; None: the first weights."""
    checkpoints: tuple[CheckpointRow, ...] = ()
    """All that are there, the oldest first."""
    kept: tuple[int, ...] = ()
    """Updates to apply again after it, in order."""
    recorded: int = 0
    """The last update that has a row."""
    again: tuple[int, ...] = ()
    """Groups that were cut, in starting order."""
    settled: frozenset[int] = frozenset()
    """Groups started after the first of them that were settled."""
    next_serial: int = 0
    attempts_started: int = 0
    """Ever, also those that were cut."""
    told: tuple[RolloutRow, ...] = ()
    """The rows of attempts in training that count in the row of an update, or in none for ever."""
    rejected: tuple[tuple[tuple[RolloutRow, ...], Rejection], ...] = ()
    """Groups that count in the row of the next update."""
    uncounted: int = 0
    """Attempts of these that count as started there too: the others did in an earlier row, as those
    of an async run that had started before it."""
    drafted: tuple[RolloutRow, ...] = ()
    """Those that count in the row of the last kept update, where that is yet to be written; in the
    order in which they were counted."""
    lost: tuple[RolloutRow, ...] = ()
    """Rows to write, of attempts that a kill cut."""
    missing: Mapping[Place, str | None] = field(default_factory=dict[Place, str | None])
    """Attempts of the last kept update without a row, each with its transcript."""
    groups: Mapping[str, int] = field(default_factory=dict[str, int])
    """Counts of the groups in the rows of updates, by their metrics."""
    trained_tokens: int = 0
    evaluations: tuple[EvaluationRow, ...] = ()
    """Those after the last update."""

    @property
    def update(self) -> int:
        """How many updates the policy has once it is as it was."""
        if self.kept:
            return self.kept[-1]
        return 0 if self.checkpoint is None else self.checkpoint.update


@dataclass(frozen=True, slots=True)
class SFTPast:
    """What an SFT run that goes on has to know of before."""

    checkpoints: tuple[CheckpointRow, ...] = ()
    """All that are there, the oldest first; the last is loaded."""
    recorded: int = 0
    """The last update that has a row."""
    totals: Mapping[str, int] = field(default_factory=dict[str, int])
    """Counts over the run up to it."""
    learning_rates: Mapping[int, float] = field(default_factory=dict[int, float])
    """By update, of those that have a row and are applied again: what they were trained with."""
    evaluations: tuple[EvaluationRow, ...] = ()
    """Those after it."""

    @property
    def loaded(self) -> int:
        """How many updates the policy has once it is loaded."""
        return self.checkpoints[-1].update if self.checkpoints else 0


def read_sft_past(run: RecordedRun) -> SFTPast:
    """Where a run of the SFT recipe stood; its batches follow from its rows, so none is kept.

    Their learning rates do not: a schedule has another length where the run is to go further.

    Raises:
        RunFolderError: what is needed to go on is damaged.
    """
    steps = run.steps()
    recorded = steps[-1].update if steps else 0
    checkpoints = tuple(kept_checkpoints(run))
    loaded = checkpoints[-1].update if checkpoints else 0
    return SFTPast(
        checkpoints=checkpoints,
        recorded=recorded,
        totals=steps[-1].totals if steps else {},
        learning_rates={
            row.update: row.metrics["learning_rate"] for row in steps if row.update > loaded
        },
        evaluations=tuple(row for row in run.evaluations() if row.update == recorded),
    )


def read_past(run: RecordedRun, *, group_size: int) -> Past:
    """Where a run of the RL recipe stood.

    Args:
        run: its folder.
        group_size: attempts of a group.

    Raises:
        RunFolderError: what is needed to go on is missing or damaged.
    """
    store = UpdateStore(run.folder.updates)
    checkpoints = tuple(kept_checkpoints(run))
    steps = run.steps()
    starts, rollouts = run.starts(), run.rollouts()
    if rollouts and not starts:
        raise RunFolderError(
            f"{run.folder.root} cannot be resumed: its trainer has no `save` and `load`, so "
            "nothing was kept of it; begin another run"
        )
    kept = _kept(run.folder.root, store, checkpoints, steps)
    base = Past(checkpoints[-1] if checkpoints else None, checkpoints, kept)
    recorded = steps[-1].update if steps else 0
    unrecorded: list[RolloutRow] = []
    if base.update > recorded:
        rows = cast("list[Row]", store.read(base.update).facts["rows"])
        unrecorded = [rollout_row(row) for row in rows]
    records = Records(
        starts=starts,
        groups=run.groups(),
        rollouts=rollouts,
        transcripts=sorted(path.name for path in run.folder.transcripts.glob("*.json")),
    )
    past = past_of(base, records, unrecorded, group_size=group_size)
    return replace(
        past,
        recorded=recorded,
        trained_tokens=sum(int(row.metrics.get("tokens/trained", 0)) for row in steps),
        evaluations=tuple(row for row in run.evaluations() if row.update == past.update),
    )


@dataclass(frozen=True, slots=True)
class Records:
    """What a run left of its groups."""

    starts: Sequence[StartRow]
    groups: Sequence[GroupRow]
    rollouts: Sequence[RolloutRow]
    transcripts: Sequence[str]


def past_of(base: Past, records: Records, sent: Sequence[RolloutRow], *, group_size: int) -> Past:
    """The groups of a past, from what was written of them.

    Args:
        base: its checkpoint and kept updates.
        records: what was written.
        sent: the attempts of the last kept update, if that has no row.
        group_size: attempts of a group.
    """
    unrecorded = {row.group for row in sent}
    starts = Counter(row.serial for row in records.starts)
    last_starts = {row.serial: row for row in records.starts}
    rejections = {row.serial: row for row in records.groups if not row.usable}
    trained = {row.group for row in records.rollouts if row.fate is Fate.TRAINED} | unrecorded
    settled = trained | rejections.keys()
    again = tuple(sorted(starts.keys() - settled))
    rows: dict[Place, list[RolloutRow]] = {}
    for row in records.rollouts:
        rows.setdefault((row.group, row.attempt), []).append(row)
    orphans = _orphans(records)

    def last(serial: int) -> list[RolloutRow]:
        """The rows of a group's last start."""
        owed = starts[serial]
        places = (rows.get((serial, index), []) for index in range(group_size))
        return [of_place[owed - 1] for of_place in places if len(of_place) >= owed]

    lost = [
        _lost(last_starts[serial], index, orphans.get((serial, index), []), number)
        for serial in again
        for index in range(group_size)
        for number in range(starts[serial] - len(rows.get((serial, index), [])))
    ]
    pending = {s: row for s, row in rejections.items() if row.update > base.update}
    # What counts in an update's row that is still to be written is in what was kept of it.
    drafted = [s for s, row in rejections.items() if unrecorded and row.update == base.update]
    apart = {id(row) for s in (*pending, *drafted, *unrecorded) for row in last(s)}
    missing = {
        place: (orphans.get(place) or [None])[-1]
        for place in ((row.group, row.attempt) for row in sent)
        if len(rows.get(place, [])) < starts[place[0]]
    }
    counted = rejections.keys() - pending.keys() - set(drafted)
    groups = Counter(f"groups/{rejections[serial].reason}" for serial in counted)
    groups["groups/usable"] = len(trained - unrecorded)
    return replace(
        base,
        again=again,
        settled=frozenset(s for s in settled if again and s > again[0]),
        next_serial=max(starts, default=-1) + 1,
        attempts_started=starts.total() * group_size,
        told=tuple(row for row in records.rollouts if id(row) not in apart),
        rejected=tuple((tuple(last(s)), _rejection(row)) for s, row in sorted(pending.items())),
        uncounted=group_size * sum(last_starts[s].update > base.update for s in pending),
        drafted=(*(row for serial in drafted for row in last(serial)), *sent),
        lost=tuple(lost),
        missing=missing,
        groups=groups,
    )


def _kept(
    root: Path,
    store: UpdateStore,
    checkpoints: Sequence[CheckpointRow],
    steps: Sequence[StepRow],
) -> tuple[int, ...]:
    """The updates to apply again: all of them, up to the last that was sent.

    Raises:
        RunFolderError: one is missing.
    """
    first = checkpoints[-1].update + 1 if checkpoints else 1
    kept = [update for update in store.kept() if update >= first]
    last = max(kept[-1] if kept else first - 1, steps[-1].update if steps else 0)
    if kept != list(range(first, last + 1)):
        absent = min(set(range(first, last + 1)) - set(kept))
        raise RunFolderError(
            f"{root} cannot be resumed: the batch of update {absent} is neither in its updates/ "
            "nor in a checkpoint; begin another run"
        )
    return tuple(kept)


def _rejection(row: GroupRow) -> Rejection:
    return Rejection("no_variance" if row.reason == "no_variance" else "too_few")


def _lost(start: StartRow, index: int, orphans: Sequence[str], number: int) -> RolloutRow:
    return RolloutRow(
        group=start.serial,
        attempt=index,
        task=start.task,
        fate=Fate.CANCELLED,
        reward=None,
        flags=Flags(),
        tries=1,
        prompt_tokens=0,
        sampled_tokens=0,
        sequences=0,
        metadata={},
        detail=_CUT,
        exception=None,
        timing=Timing(),
        started_at=start.at,
        transcript=orphans[number] if number < len(orphans) else None,
    )


def _orphans(records: Records) -> dict[Place, list[str]]:
    """Transcripts of training attempts that no row names, the oldest of a place first."""
    named = {row.transcript for row in records.rollouts}
    found: dict[Place, list[tuple[int, str]]] = {}
    for name in records.transcripts:
        if name not in named and (match := _TRANSCRIPT.match(name)):
            group, attempt, number = match.groups()
            found.setdefault((int(group), int(attempt)), []).append((int(number or 1), name))
    return {place: [name for _, name in sorted(names)] for place, names in found.items()}
