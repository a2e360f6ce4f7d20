"""`--resume` may stand alone; where a run goes on is told in one line."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from tests.report.test_progress import run_row

from loops_cookbook.cli.resuming import (
    UV_RUN,
    Resumed,
    program_of,
    resume_command,
    told,
    with_resume_value,
)
from loops_cookbook.recipes.memory import Memory
from loops_cookbook.records import RunStatus
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.past import Past, SFTPast
from loops_cookbook.rundir.read import RecordedRun, open_run
from loops_cookbook.rundir.rows import CheckpointRow
from loops_cookbook.rundir.write import RunWriter


def saved(update: int) -> CheckpointRow:
    name = f"update-{update:06}"
    return CheckpointRow(update=update, name=name, path=f"bt://{name}", folder=name, at=0.0)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["run", "a.toml", "--resume"], ["run", "a.toml", "--resume", ""]),
        (["run", "--resume", "runs/a", "a.toml"], ["run", "--resume", "runs/a", "a.toml"]),
        (["--resume", "--debug"], ["--resume", "", "--debug"]),
        (["--resume", "a.toml"], ["--resume", "", "a.toml"]),
    ],
)
def test_resume_without_a_folder_means_the_newest(given: list[str], meant: list[str]) -> None:
    """A config after it was taken for the folder, and then missed."""
    assert with_resume_value(given) == meant


@pytest.mark.parametrize(
    ("past", "line"),
    [
        (
            SFTPast(checkpoints=(saved(110), saved(120)), recorded=129),
            "goes on after update 129, from the checkpoint of update 120, "
            "9 updates are applied again",
        ),
        (
            SFTPast(checkpoints=(saved(120),), recorded=121),
            "goes on after update 121, from the checkpoint of update 120, "
            "1 update is applied again",
        ),
        (
            SFTPast(checkpoints=(saved(120),), recorded=120),
            "goes on after update 120, from the checkpoint of update 120",
        ),
        (SFTPast(), "goes on after update 0, from the first weights"),
        (
            Past(saved(10), (saved(10),), (11, 12)),
            "goes on after update 12, from the checkpoint of update 10, "
            "2 updates are applied again",
        ),
    ],
)
def test_it_is_told_where_a_run_goes_on(past: Past | SFTPast, line: str) -> None:
    """Of one update it said `1 updates are`; of supervised fine-tuning no checkpoint at all."""
    assert told(past) == line


def test_the_command_that_goes_on_has_all_that_the_first_one_had() -> None:
    settings = ["training.updates=9", 'model.name="a b"']
    told = resume_command("train.toml", settings, "remote", Path(".env.gpu"), Path("/runs/a"))
    assert shlex.split(told) == [
        *("loops", "run", "train.toml"),
        *("--set", "training.updates=9", "--set", 'model.name="a b"'),
        *("--scope", "remote", "--env-file", ".env.gpu", "--resume", "/runs/a"),
    ]
    assert resume_command("train.toml", [], None, None, Path("/runs/a")) == (
        "loops run train.toml --resume /runs/a"
    )


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A virtual environment's folder of programs, with this one in it."""
    program = tmp_path / "bin" / "loops"
    program.parent.mkdir()
    program.touch(mode=0o755)
    return program.parent


def test_a_run_goes_on_by_what_it_was_started_by(bin_folder: Path, tmp_path: Path) -> None:
    """It was told to begin with `loops`, which a project of uv does not find."""
    program = str(bin_folder / "loops")
    on_path = {"PATH": str(bin_folder)}
    assert program_of(program, on_path) == ("loops",)
    assert program_of(program, on_path | {UV_RUN: "1"}) == ("uv", "run", "loops")
    assert program_of(program, {"PATH": str(tmp_path)}) == (program,)
    assert program_of("/usr/bin/pytest", {"PATH": str(tmp_path)}) == ("loops",)
    told = resume_command("t.toml", [], None, None, Path("/runs/a"), program=("uv", "run", "loops"))
    assert told == "uv run loops run t.toml --resume /runs/a"


@pytest.mark.parametrize(
    ("status", "beginning"),
    [("running", "b"), ("interrupted", None), ("failed", None), ("stopped", None), ("done", None)],
)
def test_only_of_a_run_that_was_killed_is_it_asked_what_the_trainer_still_has(
    tmp_path: Path, status: RunStatus, beginning: str | None
) -> None:
    """What was on its way when a run came to an end in order may yet arrive there."""
    row = replace(run_row(), status=status, service={"beginning": "b"})
    resumed = Resumed(RecordedRun(RunFolder(tmp_path), row))
    memory = resumed.remember(Memory[Past](start="bt://loops:x/weights/y"), Past())
    assert (memory.beginning, memory.life) == (beginning, 1)
    assert memory.start == "bt://loops:x/weights/y"


def test_a_run_is_read_again_once_its_folder_is_held(tmp_path: Path) -> None:
    """Two resumes in one moment would have had the same names for their calls at the trainer."""
    folder = new_run_folder("runs", tmp_path)
    with RunWriter(folder) as writer:
        writer.run_started(run_row())
    resumed = Resumed(open_run(folder.root))
    with RunWriter(folder) as writer:
        writer.run_started(replace(run_row(), resumed_at=(1.0,)))
    assert resumed.life == 1
    assert resumed.read_again().life == 2
