"""What a tracker is sent of a run, under which name, and what comes of a folder that has one."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.report.tracker_double import TrackerDouble
from typer.testing import CliRunner

from loops_cookbook.cli.app import app
from loops_cookbook.config.shared import OutputTable
from loops_cookbook.errors import RunFolderError
from loops_cookbook.recorders import Fanout
from loops_cookbook.records import EvaluationRow, RunRow, StepRow
from loops_cookbook.report.trackers import open_trackers, require_trackers
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.write import RunWriter

BOTH = OutputTable(wandb_project="w", trackio_project="t")
WANDB, TRACKIO = OutputTable(wandb_project="w"), OutputTable(trackio_project="t")


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackerDouble:
    (tmp_path / "packages").mkdir()
    return TrackerDouble(tmp_path / "packages", monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return new_run_folder("runs", tmp_path)


def run_row(*, sets: int = 0, every: int = 2) -> RunRow:
    held_out = {f"set_{number}": 4 for number in range(sets)}
    return RunRow(
        run="a-run",
        started_at=0.0,
        recipe="rl",
        scope="local",
        model="a/policy",
        updates=4,
        attempts_per_update=8,
        tasks={"train": 4, **held_out},
        service={},
        versions={"python": "3"},
        config_path="train.toml",
        config={"recipe": "rl", "evaluation": {"every": every}},
    )


def step(update: int, **metrics: float) -> StepRow:
    return StepRow(update=update, at=0.0, metrics=metrics or {"loss": 0.5}, totals={"rows": update})


def scores(update: int, name: str = "set_0", reward: float = 0.25) -> EvaluationRow:
    return EvaluationRow(
        set=name,
        update=update,
        policy_version=update,
        at=0.0,
        seconds=1.0,
        attempts=1,
        solved_at=1.0,
        reward_mean=reward,
        solve_rate=None,
        pass_at_k={},
        fates={},
        tasks=(),
    )


Notes = list[tuple[str, str]]


def note_in(notes: Notes) -> Callable[[str, str], None]:
    return lambda level, text: notes.append((level, text))


def track(folder: RunFolder, output: OutputTable, *rows: object, sets: int = 0) -> Notes:
    """A run of these rows, and what was said of it."""
    notes: Notes = []
    with (
        RunWriter(folder) as writer,
        open_trackers(output, folder, note_in(notes)) as trackers,
    ):
        recorder = Fanout((writer, *trackers))
        recorder.run_started(run_row(sets=sets))
        for row in rows:
            if isinstance(row, StepRow):
                recorder.update(row)
            elif isinstance(row, EvaluationRow):
                recorder.evaluation(row)
        recorder.run_ended("done", {"rows": 3})
    return notes


def test_without_a_project_nothing_is_started_or_written(folder: RunFolder) -> None:
    with open_trackers(OutputTable(), folder, note_in([])) as trackers:
        assert trackers == ()
    assert not (folder.root / "trackers.json").exists()


def test_wandb_has_each_row_under_its_update(double: TrackerDouble, folder: RunFolder) -> None:
    notes = track(folder, WANDB, step(1, loss=0.5), step(2, loss=0.25, entropy=2.0))
    (begun,) = double.named("init")
    assert begun == [
        {
            "project": "w",
            "id": folder.root.name,
            "name": folder.root.name,
            "resume": "allow",
            "dir": str(folder.root),
            "allow_val_change": True,
            "config": {
                "recipe": "rl",
                "evaluation": {"every": 2},
                "run": {
                    "name": "a-run",
                    "scope": "local",
                    "model": "a/policy",
                    "versions": {"python": "3"},
                    "service": {},
                },
            },
        }
    ]
    assert double.named("log") == [
        [{"update": 1, "loss": 0.5}, 1, True],
        [{"update": 2, "loss": 0.25, "entropy": 2.0}, 2, True],
    ]
    told = {"status": "done", "reason": None, "totals/rows": 3}
    assert double.calls[-2:] == [["summary", told], ["finish", 0]]
    assert notes == [("info", "wandb: the run is at http://wandb/a-run")]


def test_trackio_has_each_row_under_its_update(double: TrackerDouble, folder: RunFolder) -> None:
    track(folder, TRACKIO, step(1, loss=0.5))
    name = folder.root.name
    assert double.named("init") == [
        [{"project": "t", "name": name, "resume": "allow", "embed": False}]
    ]
    ((row, number, config),) = double.named("log")
    assert (row, number) == ({"loss": 0.5}, 1)
    assert config["recipe"] == "rl"  # pyright: ignore[reportIndexIssue]
    assert double.calls[-2:] == [["alert", "The run ended: done", None, "INFO"], ["finish"]]


def test_scores_belong_to_the_update_before_them(double: TrackerDouble, folder: RunFolder) -> None:
    """wandb closes a step when it is whole, and drops what is logged under it later."""
    evaluated = [scores(0), scores(0, "set_1"), step(1), step(2), scores(2), scores(2, "set_1")]
    track(folder, WANDB, *evaluated, step(3), sets=2)
    told = [(row["update"], number, whole) for row, number, whole in double.named("log")]  # pyright: ignore[reportIndexIssue]
    assert told == [
        (0, 0, False),
        (0, 0, True),
        (1, 1, True),
        (2, 2, False),
        (2, 2, False),
        (2, 2, True),
        (3, 3, True),
    ]


def test_scores_that_come_when_wandb_has_closed_their_step_are_not_lost(
    double: TrackerDouble, folder: RunFolder
) -> None:
    """A run that was killed during an evaluation makes it again when it is resumed."""
    double.set(WANDB_STEP="3")
    track(folder, WANDB, scores(2), step(3), step(4), sets=1)
    told = [(row["update"], number) for row, number, _ in double.named("log")]  # pyright: ignore[reportIndexIssue]
    assert told == [(2, None), (3, None), (4, None)]


def test_what_the_service_is_joins_the_config(double: TrackerDouble, folder: RunFolder) -> None:
    with open_trackers(BOTH, folder, note_in([])) as trackers:
        recorder = Fanout(trackers)
        recorder.run_started(run_row())
        recorder.run_started(replace(run_row(), service={"url": "http://trainer"}))
        recorder.update(step(1))
    ((of_wandb,),) = double.named("config")
    (of_trackio,) = [call[2] for call in double.named("log") if isinstance(call[2], dict)]
    for config in (of_wandb, of_trackio):
        assert config["run"]["service"] == {"url": "http://trainer"}  # pyright: ignore[reportIndexIssue]


def test_the_name_is_in_the_folder_before_anything_is_sent(
    double: TrackerDouble, folder: RunFolder
) -> None:
    with open_trackers(BOTH, folder, note_in([])):
        told = json.loads((folder.root / "trackers.json").read_text())
    assert told == {"wandb": folder.root.name, "trackio": folder.root.name}
    assert double.calls == []


def test_a_folder_that_was_tracked_goes_on_under_its_name_and_sends_no_row_again(
    double: TrackerDouble, folder: RunFolder
) -> None:
    track(folder, WANDB, step(1), step(2))
    (folder.root / "trackers.json").write_text('{"wandb": "of-old"}')
    before = len(double.calls)
    with open_trackers(WANDB, folder, note_in([])) as trackers:
        recorder = Fanout(trackers)
        recorder.run_started(run_row(sets=1))
        for row in (step(1), step(2), scores(2), step(3)):
            recorder.update(row) if isinstance(row, StepRow) else recorder.evaluation(row)
    again = double.calls[before:]
    assert again[0][1]["id"] == "of-old"  # pyright: ignore[reportIndexIssue]
    assert [call[1]["update"] for call in again if call[0] == "log"] == [2, 3]  # pyright: ignore[reportIndexIssue]


def test_a_tracker_that_is_new_to_a_folder_keeps_the_name_of_the_other(
    double: TrackerDouble, folder: RunFolder
) -> None:
    (folder.root / "trackers.json").write_text('{"wandb": "of-old"}')
    with open_trackers(TRACKIO, folder, note_in([])):
        told = json.loads((folder.root / "trackers.json").read_text())
    assert told == {"wandb": "of-old", "trackio": folder.root.name}


@pytest.mark.parametrize("torn", ['{"wandb": ', "[1]"])
def test_a_folder_that_does_not_say_its_names_is_refused(folder: RunFolder, torn: str) -> None:
    (folder.root / "trackers.json").write_text(torn)
    with (
        pytest.raises(RunFolderError, match=r"trackers\.json does not say how"),
        open_trackers(WANDB, folder, note_in([])),
    ):
        pass


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize("command", ["check", "run"])
def test_a_missing_package_is_one_line_and_exit_2_before_anything_is_launched(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / name).mkdir()  # as wandb leaves one
    project = f"output.{name}_project='a'"
    result = CliRunner().invoke(app, [command, "examples/counting/train.toml", "--set", project])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        f"loops: output.{name}_project needs the extra '{name}', which is not installed: "
        f'run `uv add "loops-cookbook[{name}]"` (or `pip install "loops-cookbook[{name}]"`)\n'
    )
    assert not (tmp_path / "runs").exists()


def test_a_package_that_is_there_is_not_missed(double: TrackerDouble) -> None:
    require_trackers(BOTH)
    require_trackers(OutputTable())


@pytest.mark.parametrize("name", ["a/b", "a?", "", " ", "x" * 129])
def test_a_project_that_no_tracker_takes_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="wandb_project"):
        OutputTable(wandb_project=name)
