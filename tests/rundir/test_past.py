"""Where a run stood, from what it left: each row that is owed is in exactly one place."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.attempts import Fate, Flags, Timing
from loops_cookbook.records import GroupRow, RolloutRow, RunRow, StepRow
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.past import Past, Records, SFTPast, past_of, read_sft_past
from loops_cookbook.rundir.read import open_run
from loops_cookbook.rundir.rows import CheckpointRow, StartRow
from loops_cookbook.rundir.savepoints import SavePoints
from loops_cookbook.rundir.write import RunWriter

SIZE = 2
BATCHED = 1
"""The update that the last kept batch, if there is one, makes."""


def start(serial: int, update: int = 1) -> StartRow:
    return StartRow(serial=serial, task=f"t{serial}", policy_version=0, at=5.0, update=update)


def row(group: int, attempt: int, fate: Fate, transcript: str | None = None) -> RolloutRow:
    return RolloutRow(
        group=group,
        attempt=attempt,
        task=f"t{group}",
        fate=fate,
        reward=None,
        flags=Flags(),
        tries=1,
        prompt_tokens=0,
        sampled_tokens=0,
        sequences=0,
        metadata={},
        detail="",
        exception=None,
        timing=Timing(),
        started_at=0.0,
        transcript=transcript,
    )


def rows(group: int, fate: Fate) -> list[RolloutRow]:
    return [row(group, index, fate) for index in range(SIZE)]


def rejection(serial: int, *, update: int, reason: str = "no_variance") -> GroupRow:
    return GroupRow(
        serial=serial,
        epoch=0,
        task=f"t{serial}",
        task_index=serial,
        source="tasks.jsonl:1",
        rewards=(1.0, 1.0),
        mean=1.0,
        std=0.0,
        usable=False,
        reason=reason,
        policy_version=0,
        seconds=1.0,
        update=update,
    )


def past(
    starts: Sequence[StartRow],
    rollouts: Sequence[RolloutRow] = (),
    groups: Sequence[GroupRow] = (),
    transcripts: Sequence[str] = (),
    *,
    sent: Sequence[RolloutRow] = (),
    kept: tuple[int, ...] = (),
) -> Past:
    records = Records(starts, groups, rollouts, transcripts)
    return past_of(Past(kept=kept), records, sent, group_size=SIZE)


def test_a_new_run_has_no_past() -> None:
    assert past([]) == Past(groups={"groups/usable": 0})


def test_a_group_that_was_cut_is_started_again_and_its_attempts_are_told() -> None:
    names = ["1-0.json", "1-1.2.json", "held_out-1-1-1.json", "notes.json"]
    was = past([start(0), start(1)], rows(0, Fate.TRAINED), transcripts=names)
    assert was.again == (1,)
    assert was.next_serial == 2
    assert [(lost.group, lost.attempt, lost.fate) for lost in was.lost] == [
        (1, 0, Fate.CANCELLED),
        (1, 1, Fate.CANCELLED),
    ]
    assert [lost.transcript for lost in was.lost] == ["1-0.json", "1-1.2.json"]
    assert {lost.started_at for lost in was.lost} == {5.0}


def test_what_settled_after_the_first_that_was_cut_is_not_waited_for() -> None:
    """The batches come in starting order, so whoever waits must know which serials come no more."""
    told = [*rows(0, Fate.TRAINED), *rows(2, Fate.NO_VARIANCE), *rows(3, Fate.TRAINED)]
    was = past([start(s) for s in range(4)], told, [rejection(2, update=1)])
    assert was.again == (1,)
    assert was.settled == {2, 3}
    assert past([start(0)], rows(0, Fate.TRAINED)).settled == frozenset()


def test_a_group_that_was_cut_twice_owes_two_rows_an_attempt() -> None:
    """The first life's rows were written when the second began; of the second one is missing."""
    told = [*rows(0, Fate.CANCELLED), row(0, 0, Fate.CANCELLED, "0-0.2.json")]
    names = ["0-0.2.json", "0-1.2.json"]
    was = past([start(0), start(0)], told, transcripts=names)
    assert [(lost.attempt, lost.transcript) for lost in was.lost] == [(1, "0-1.2.json")]
    assert was.attempts_started == 4
    assert was.again == (0,)


def test_transcripts_of_one_place_are_those_of_its_starts_in_order() -> None:
    """By their names alone the tenth would come before the second."""
    names = ["0-0.10.json", "0-0.2.json", "0-0.json"]
    was = past([start(0)] * 3, transcripts=names)
    told = [lost.transcript for lost in was.lost if lost.attempt == 0]
    assert told == ["0-0.json", "0-0.2.json", "0-0.10.json"]


def test_a_rejected_group_counts_in_the_next_row_and_as_started_where_it_was_not_before() -> None:
    """Those of an async run that started before the last row were counted as started twice."""
    told = [*rows(0, Fate.NO_VARIANCE), *rows(1, Fate.TOO_FEW), *rows(2, Fate.NO_VARIANCE)]
    reasons = [
        rejection(0, update=1),
        rejection(1, update=2, reason="too_few"),
        rejection(2, update=2),
    ]
    was = past([start(0), start(1), start(2, update=2)], told, reasons, kept=(1,))
    assert [(len(of_group), why.reason) for of_group, why in was.rejected] == [
        (SIZE, "too_few"),
        (SIZE, "no_variance"),
    ]
    assert was.uncounted == SIZE
    assert was.told == tuple(rows(0, Fate.NO_VARIANCE))
    assert was.groups == {"groups/no_variance": 1, "groups/usable": 0}


def test_of_a_rejected_group_that_was_cut_before_only_its_last_rows_count_in_the_next_row() -> None:
    told = [*rows(0, Fate.CANCELLED), *rows(0, Fate.TOO_FEW)]
    was = past([start(0), start(0)], told, [rejection(0, update=1, reason="too_few")])
    ((of_group, _),) = was.rejected
    assert {row.fate for row in of_group} == {Fate.TOO_FEW}
    assert {row.fate for row in was.told} == {Fate.CANCELLED}


def test_a_batch_without_a_row_is_trained_and_its_missing_rows_are_known() -> None:
    """It is applied again, so its groups are settled, whatever was written of them."""
    sent = rows(1, Fate.TRAINED)
    told = [*rows(0, Fate.NO_VARIANCE), sent[0]]
    names = ["1-0.json", "1-1.json"]
    was = past(
        [start(0), start(1)],
        told,
        [rejection(0, update=BATCHED)],
        [name for name in names if name != "1-0.json"],
        sent=sent,
        kept=(BATCHED,),
    )
    assert was.again == ()
    assert was.lost == ()
    assert was.missing == {(1, 1): "1-1.json"}
    assert was.drafted == (*rows(0, Fate.NO_VARIANCE), *sent)
    assert was.told == ()
    assert was.groups == {"groups/usable": 0}


STATES = st.sampled_from(["trained", "counted", "pending", "sent", "cut"])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(STATES, st.integers(0, 2), st.integers(0, SIZE)), max_size=6))
def test_each_row_that_is_owed_is_in_exactly_one_place(groups: list[tuple[str, int, int]]) -> None:
    """A start of a group owes one row for each of its attempts; no attempt may be counted twice, or
    in no place.

    Each group has its state, how often it was cut before, and how many rows of its last start are
    there where that has yet to be told.
    """
    has_sent = any(state == "sent" for state, _, _ in groups)
    starts: list[StartRow] = []
    rollouts: list[RolloutRow] = []
    verdicts: list[GroupRow] = []
    sent: list[RolloutRow] = []
    for serial, (state, cuts, there) in enumerate(groups):
        starts += [start(serial)] * (cuts + 1)
        rollouts += rows(serial, Fate.CANCELLED) * cuts
        if state == "trained":
            rollouts += rows(serial, Fate.TRAINED)
        elif state in ("counted", "pending"):
            rollouts += rows(serial, Fate.TOO_FEW)
            update = BATCHED + (state == "pending")
            verdicts.append(rejection(serial, update=update, reason="too_few"))
        elif state == "sent":
            sent += rows(serial, Fate.TRAINED)
            rollouts += rows(serial, Fate.TRAINED)[:there]
        else:
            rollouts += rows(serial, Fate.CANCELLED)[:there]
    was = past(starts, rollouts, verdicts, sent=sent, kept=(BATCHED,))
    assert was.again == tuple(s for s, (state, _, _) in enumerate(groups) if state == "cut")
    places = [
        *was.told,
        *was.lost,
        *was.drafted,
        *(row for of_group, _ in was.rejected for row in of_group),
    ]
    owed = [(s.serial, index) for s in starts for index in range(SIZE)]
    assert sorted((row.group, row.attempt) for row in places) == sorted(owed)
    assert was.attempts_started == len(owed)
    drafted = {row.group for row in was.drafted}
    counted = {s for s, (state, _, _) in enumerate(groups) if state == "counted"}
    assert drafted == ({row.group for row in sent} | counted if has_sent else set())
    written = {(row.group, row.attempt) for row in rollouts if row.fate is Fate.TRAINED}
    assert set(was.missing) == {(row.group, row.attempt) for row in sent} - written


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return new_run_folder("runs", tmp_path)


def saved(update: int) -> CheckpointRow:
    return CheckpointRow(update=update, name=f"u{update}", path=f"bt://u{update}", at=0.0)


def test_where_sft_stood_is_its_last_row_and_its_last_checkpoint(folder: RunFolder) -> None:
    of_run = RunRow(
        run=folder.root.name,
        started_at=0.0,
        recipe="sft",
        scope="local",
        model="m",
        updates=3,
        attempts_per_update=None,
        tasks={},
        service={},
        versions={},
        config_path="train.toml",
        config={},
    )
    with RunWriter(folder) as writer, SavePoints(folder) as savepoints:
        writer.run_started(of_run)
        assert read_sft_past(open_run(folder.root)) == SFTPast()
        for update in (1, 2, 3):
            metrics = {"learning_rate": update / 10}
            step = StepRow(update=update, at=0.0, metrics=metrics, totals={"rows": update})
            writer.update(step)
            if update == 1:
                savepoints.checkpointed(saved(1))
    was = read_sft_past(open_run(folder.root))
    assert (was.loaded, was.recorded, was.totals) == (1, 3, {"rows": 3})
    assert was.learning_rates == {2: 0.2, 3: 0.3}


def test_the_policy_has_the_updates_that_are_kept_or_else_those_of_its_checkpoint() -> None:
    assert Past().update == 0
    assert Past(checkpoint=saved(4)).update == 4
    assert replace(Past(checkpoint=saved(4)), kept=(5, 6)).update == 6
