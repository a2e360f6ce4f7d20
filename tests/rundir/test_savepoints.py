"""What a run needs to go on is there before it is relied on."""

import json
import os
from pathlib import Path

import pytest

from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.rows import CheckpointRow
from loops_cookbook.rundir.savepoints import SavePoints
from loops_cookbook.rundir.updates import KeptUpdate


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return new_run_folder("runs", tmp_path)


def saved(update: int, folder: str | None = None) -> CheckpointRow:
    return CheckpointRow(update=update, name="n", path="bt://n", folder=folder, at=1.0)


def kept(update: int) -> KeptUpdate:
    return KeptUpdate(update, f"update-{update}", (), {}, {})


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_start_is_written_when_it_is_told(folder: RunFolder) -> None:
    with SavePoints(folder, now=lambda: 12.5) as savepoints:
        savepoints.started(3, "task a", policy_version=2, update=4)
        (row,) = lines(folder.starts)
    assert row == {"serial": 3, "task": "task a", "policy_version": 2, "update": 4, "at": 12.5}


def test_a_checkpoint_takes_the_place_of_the_batches_that_it_has(folder: RunFolder) -> None:
    with SavePoints(folder) as savepoints:
        for update in (1, 2, 3):
            savepoints.keep(kept(update))
        savepoints.checkpointed(saved(2))
        assert savepoints.updates.kept() == [3]
    assert [row["update"] for row in lines(folder.checkpoint_rows)] == [2]


def test_a_checkpoint_has_its_row_before_a_batch_is_dropped(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the two must find the batch in the one or in the other."""

    def killed(update: int) -> None:
        raise KeyboardInterrupt

    with SavePoints(folder) as savepoints:
        savepoints.keep(kept(1))
        monkeypatch.setattr(savepoints.updates, "drop", killed)
        with pytest.raises(KeyboardInterrupt):
            savepoints.checkpointed(saved(1))
        assert savepoints.updates.kept() == [1]
    assert [row["update"] for row in lines(folder.checkpoint_rows)] == [1]


def test_what_was_recorded_before_a_checkpoint_is_on_the_disk_before_its_row(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts and evaluations were not: a machine that crashed then could not resume its run."""
    rows = [folder.rollouts, folder.groups, folder.steps, folder.evaluations]
    with SavePoints(folder) as savepoints:
        for path in rows:
            path.touch()
        savepoints.started(0, "t", policy_version=0, update=1)
        synced: list[int] = []
        sync = os.fsync

        def seen(file: int) -> None:
            sync(file)
            synced.append(os.fstat(file).st_ino)

        monkeypatch.setattr(os, "fsync", seen)
        savepoints.checkpointed(saved(1))
    assert synced[-1] == folder.checkpoint_rows.stat().st_ino
    assert {path.stat().st_ino for path in [folder.starts, *rows]} <= set(synced[:-1])


def test_who_goes_on_adds_to_what_is_there(folder: RunFolder) -> None:
    for serial in (0, 1):
        with SavePoints(folder) as savepoints:
            savepoints.started(serial, "t", policy_version=0, update=1)
            savepoints.checkpointed(saved(serial))
    assert [row["serial"] for row in lines(folder.starts)] == [0, 1]
    assert [row["update"] for row in lines(folder.checkpoint_rows)] == [0, 1]


def test_only_what_the_engine_put_into_the_folder_has_a_place_there(folder: RunFolder) -> None:
    place = folder.checkpoints / "run" / "weights" / "u1"
    with SavePoints(folder) as savepoints:
        assert savepoints.folder_of("bt://loops:run/weights/u1") is None  # a server's own
        place.mkdir(parents=True)
        assert savepoints.folder_of("bt://loops:run/weights/u1") == "checkpoints/run/weights/u1"
        assert savepoints.folder_of("tinker://run/weights/u1") is None


def test_a_checkpoint_that_is_removed_is_gone_and_a_services_is_let_be(folder: RunFolder) -> None:
    for name in ("u1", "u2"):
        (folder.checkpoints / name).mkdir(parents=True)
        (folder.checkpoints / name / "weights").touch()
    with SavePoints(folder) as savepoints:
        savepoints.remove([saved(1, "checkpoints/u1"), saved(3), saved(4, "checkpoints/gone")])
    assert [path.name for path in folder.checkpoints.iterdir()] == ["u2"]
