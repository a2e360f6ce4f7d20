"""`loops cleanup` says what it did."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loops_cookbook.cli.app import app
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.sandboxes.base import Entry
from loops_cookbook.sandboxes.ledger import Ledger
from loops_cookbook.sandboxes.plain import Plain


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return new_run_folder("runs", tmp_path)


def left_over(folder: RunFolder, kind: str = "plain") -> str:
    """A sandbox that the ledger holds; its name."""
    name = f"loops-{folder.root.name}-1"
    place = Plain().place(name)
    with Ledger(folder.sandboxes) as ledger:
        ledger.opens(Entry(name, folder.root.name, kind, place))
    Path(place).mkdir()
    return name


def said(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["cleanup", *words])
    return result.exit_code, result.output


def test_what_is_released_is_named_and_a_second_time_there_is_nothing(folder: RunFolder) -> None:
    name = left_over(folder)
    run = f"runs/{folder.root.name}"
    assert said("--dry-run") == (0, f"{run}: would release {name}\n")
    assert said() == (0, f"{run}: released {name}\n")
    assert said() == (0, "nothing to release in 1 run\n")


def test_where_nothing_is_left_the_number_of_runs_looked_at_is_told(
    folder: RunFolder, tmp_path: Path
) -> None:
    """`nothing to release` was also what a search in too few of them would have said."""
    for one in (folder, new_run_folder("runs", tmp_path)):
        left_over(one)
    said()
    assert said("--dry-run") == (0, "nothing to release in 2 runs\n")


def test_a_link_to_a_run_is_cleaned_as_the_run(folder: RunFolder) -> None:
    """What bears the run's label was looked for under the link's name, and was not found."""
    Path("latest").symlink_to(folder.root)
    name = left_over(folder)
    (folder.root / "sandboxes.jsonl").write_text("")
    assert said("latest") == (0, f"runs/{folder.root.name}: released {name}\n")


def test_what_could_not_be_released_is_a_status(folder: RunFolder) -> None:
    name = left_over(folder, kind="zeppelin")
    status, text = said(f"runs/{folder.root.name}")
    assert status == 1
    assert f"not released: {name}: this version of loops-cookbook knows no backend" in text


def test_where_there_is_no_run_it_is_not_said_that_all_is_released(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another folder than that of the runs it said `nothing to release`, and they billed on."""
    left_over(folder)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    status, text = said()
    assert status == 0
    assert text.startswith("no run was found, and nothing was released: ")


def test_a_folder_that_is_not_there_is_told_as_one(folder: RunFolder) -> None:
    """`no such config` was told of it."""
    assert said("runs/nope") == (
        2,
        "loops: runs/nope: no such folder; name the folder of a run, or a config\n",
    )


def test_a_folder_of_runs_is_refused_with_how_they_are_named(folder: RunFolder) -> None:
    """`runs is not a run's folder` was all, beside a command that means every run under it."""
    left_over(folder)
    assert said("runs") == (
        2,
        "loops: runs holds runs and is none: name them, as in `loops cleanup runs/*`; without any "
        "name every run under ./runs is meant\n",
    )


def test_what_is_no_run_is_refused_by_what_it_is(folder: RunFolder) -> None:
    """A file of a run was read as a config, and a checkpoint told as a folder that is not there."""
    left_over(folder)
    run = f"runs/{folder.root.name}"
    Path("empty").mkdir()
    for target, told in (
        ("empty", "empty is not a run's folder (it has no run.json): name"),
        (f"{run}@2", f"{run}@2: sandboxes are of a whole run, not of an update; name {run}"),
        (f"{run}/sandboxes.jsonl", f"is a file of a run; name its folder, {run}"),
    ):
        status, text = said(target)
        assert status == 2
        assert told in text


def test_a_damaged_ledger_does_not_keep_the_other_runs_from_being_cleaned(
    folder: RunFolder, tmp_path: Path
) -> None:
    """It ended the command: runs after it were not looked at, those before it were not told."""
    names = [left_over(folder), *(left_over(new_run_folder("runs", tmp_path)) for _ in range(2))]
    first, broken, last = (tmp_path / "runs" / name[len("loops-") : -2] for name in names)
    (broken / "sandboxes.jsonl").write_text('{"event": "?"}\n')
    status, text = said()
    assert status == 2
    for run, name in ((first, names[0]), (last, names[2])):
        assert f"runs/{run.name}: released {name}\n" in text
    assert f"loops: {broken}/sandboxes.jsonl:1 is not a row of a ledger" in text


def test_a_reader_that_leaves_does_not_keep_the_other_runs_from_being_cleaned(
    folder: RunFolder, tmp_path: Path
) -> None:
    """`loops cleanup | head -1` released what one run held, and the others billed on."""
    for one in (folder, new_run_folder("runs", tmp_path)):
        left_over(one)
    code = "import sys; sys.argv = ['loops', 'cleanup']\n"
    code += f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n"
    code += "from loops_cookbook.cli.main import main; main()"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
    assert not list(tmp_path.glob("loops-*"))
