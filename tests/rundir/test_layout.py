"""A run folder is new, named by its time, and written by one process."""

import shutil
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from loops_cookbook.errors import RunFolderError, RunIsAlive
from loops_cookbook.rundir.layout import RunFolder, locked, new_run_folder, transcript_stem


def test_a_run_folder_is_named_by_its_time_in_utc(tmp_path: Path) -> None:
    evening = datetime(2026, 1, 2, 23, 4, 5, tzinfo=timezone(timedelta(hours=-2)))

    folder = new_run_folder("runs/counting", tmp_path, now=evening)

    assert folder.root.parent == tmp_path / "runs" / "counting"
    stamp, _, suffix = folder.root.name.rpartition("-")
    assert stamp == "20260103-010405"
    assert len(suffix) == 4
    assert int(suffix, 16) >= 0
    assert folder.transcripts.is_dir()


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    roots = {new_run_folder("runs", tmp_path, now=now).root for _ in range(20)}

    assert len(roots) == 20


def test_an_absolute_output_dir_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = new_run_folder(tmp_path / "elsewhere", Path("/nowhere"))

    assert folder.root.parent == tmp_path / "elsewhere"


def test_a_folder_that_cannot_be_made_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")

    with pytest.raises(RunFolderError, match=r"runs.*output\.output_dir"):
        new_run_folder("runs", tmp_path)


@pytest.mark.parametrize(
    ("evaluation", "stem"),
    [("", "12-3"), ("held_out-1", "held_out-1-12-3"), ("a/b c-1", "a_b_c-1-12-3")],
)
def test_a_transcript_is_named_by_its_place(evaluation: str, stem: str) -> None:
    assert transcript_stem(12, 3, evaluation=evaluation) == stem


def test_a_run_that_another_process_writes_is_refused_until_that_process_ends(
    tmp_path: Path,
) -> None:
    script = """
        import sys
        from pathlib import Path
        from loops_cookbook.rundir.layout import RunFolder, locked

        with locked(RunFolder(Path(sys.argv[1]))):
            sys.stdout.write("held\\n")
            sys.stdout.flush()
            sys.stdin.read()
    """
    folder = new_run_folder("runs", tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), folder.root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"

    with pytest.raises(RunFolderError, match=f"written by process {holder.pid}"), locked(folder):
        pass
    holder.kill()
    holder.communicate()
    with locked(folder):
        assert folder.lock.exists()


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    folder = new_run_folder("runs", tmp_path)
    with locked(folder):
        pass

    with locked(folder), pytest.raises(RunFolderError), locked(folder):
        pass


def test_a_folder_that_is_not_there_cannot_be_locked(tmp_path: Path) -> None:
    with (
        pytest.raises(RunFolderError, match="cannot be locked"),
        locked(RunFolder(tmp_path / "gone")),
    ):
        pass


def copied(folder: RunFolder, to: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(folder.root, to)))


def test_a_copy_of_a_folder_that_is_held_cannot_be_held(tmp_path: Path) -> None:
    folder = new_run_folder("runs", tmp_path)
    with locked(folder, claims=True):
        copy = copied(folder, tmp_path / "copy")
        with pytest.raises(RunIsAlive, match=f"is a copy of {folder.root}"), locked(copy):
            pass
    with locked(copy) as origin:
        assert origin is not None
        assert origin.folder == str(folder.root)


def test_who_writes_a_copy_makes_it_a_run_of_its_own(tmp_path: Path) -> None:
    folder = new_run_folder("runs", tmp_path)
    with locked(folder, claims=True):
        pass
    copy = copied(folder, tmp_path / "copy")
    for claims, is_copy in ((False, True), (True, True), (False, False)):
        with locked(copy, claims=claims) as origin:
            assert (origin is not None) == is_copy
    with locked(folder, claims=True), locked(copy):
        pass


def test_a_folder_that_was_moved_or_put_back_is_no_copy_of_another(tmp_path: Path) -> None:
    folder = new_run_folder("runs", tmp_path)
    with locked(folder, claims=True):
        pass
    moved = RunFolder(folder.root.rename(tmp_path / "moved"))
    with locked(moved) as origin:
        assert origin is None
    shutil.copytree(moved.root, folder.root)
    with locked(folder, claims=True):  # its claim names this very folder, by another file
        pass


@pytest.mark.parametrize("left", ["", "17", "17\n", '17\n{"host": "a", "fol'])
def test_a_lock_without_a_whole_claim_is_of_no_copy(tmp_path: Path, left: str) -> None:
    folder = new_run_folder("runs", tmp_path)
    folder.lock.write_text(left)
    with locked(folder) as origin:
        assert origin is None
