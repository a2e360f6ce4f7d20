"""A run folder holds each row that its writer was told, whole, and nothing else."""

import json
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from loops_cookbook.attempts import Attempt, Discarded, Fate
from loops_cookbook.errors import RunFolderError
from loops_cookbook.records import EvaluationRow, GroupRow, RolloutRow, RunRow, StepRow, TaskResult
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.read import open_run
from loops_cookbook.rundir.write import RunWriter, Trace, versions


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return new_run_folder("runs", tmp_path)


def run_row(folder: RunFolder) -> RunRow:
    return RunRow(
        run=folder.root.name,
        recipe="rl",
        scope="local",
        model="models/counting",
        updates=2,
        attempts_per_update=16,
        tasks={"train": 3},
        service={"run_id": "r-1"},
        versions={"python": "3.11"},
        config_path="train.toml",
        config={"recipe": "rl"},
        started_at=10.0,
    )


def attempt(group: int, index: int, why: str = "left") -> Attempt:
    return Attempt(group, index, "orders", discarded=Discarded(Fate.DROPPED, why))


def group_row(serial: int) -> GroupRow:
    return GroupRow(
        serial=serial,
        epoch=0,
        task="orders",
        task_index=0,
        source="tasks.jsonl:1",
        rewards=(1.0, None),
        mean=1.0,
        std=0.0,
        usable=False,
        reason="too_few",
        policy_version=0,
        seconds=1.0,
        update=1,
    )


def evaluation_row(*tasks: TaskResult) -> EvaluationRow:
    return EvaluationRow(
        set="held_out",
        update=0,
        policy_version=0,
        at=1.0,
        seconds=2.0,
        attempts=1,
        solved_at=1.0,
        reward_mean=0.5,
        solve_rate=0.5,
        pass_at_k={},
        fates={"evaluated": 2},
        tasks=tasks,
    )


def transcripts(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.transcripts.iterdir())


def test_each_row_is_on_disk_when_its_call_returns(folder: RunFolder) -> None:
    with RunWriter(folder) as writer:
        writer.run_started(run_row(folder))
        writer.group_settled(group_row(0))
        writer.evaluation(evaluation_row())
        writer.fates([RolloutRow.of(attempt(0, 0), Fate.DROPPED)])
        writer.update(StepRow(update=1, at=11.0, metrics={"loss": 0.5}, totals={"finished": 2}))

        left = open_run(folder.root)

        assert left.groups() == (group_row(0),)
        assert left.evaluations() == (evaluation_row(),)
        assert left.rollouts() == (RolloutRow.of(attempt(0, 0), Fate.DROPPED),)
        assert [row.metrics for row in left.steps()] == [{"loss": 0.5}]
        assert (left.run.status, left.run.counts) == ("running", {"finished": 2})


def test_an_updates_row_has_the_scores_of_the_evaluations_after_it(folder: RunFolder) -> None:
    """Its row was held back until they were there, and a kill in between lost it."""
    with RunWriter(folder) as writer:
        writer.run_started(run_row(folder))
        writer.evaluation(evaluation_row())
        for update in (1, 2):
            writer.update(StepRow(update=update, at=1.0, metrics={"loss": 0.5}))
            assert open_run(folder.root).steps()[-1].metrics == {"loss": 0.5}
        for name, reward in (("a", 0.25), ("b", 0.75)):
            writer.evaluation(replace(evaluation_row(), set=name, update=2, reward_mean=reward))
        writer.update(StepRow(update=3, at=1.0, metrics={"loss": 0.5}))

    first, second, third = open_run(folder.root).steps()

    assert first.metrics == third.metrics == {"loss": 0.5}
    assert second.metrics == {
        "loss": 0.5,
        "eval/a/reward_mean": 0.25,
        "eval/a/solve_rate": 0.5,
        "eval/b/reward_mean": 0.75,
        "eval/b/solve_rate": 0.5,
    }


def test_run_json_tells_how_a_run_ended(folder: RunFolder) -> None:
    with RunWriter(folder, now=lambda: 99.0) as writer:
        writer.run_started(run_row(folder))
        writer.run_ended("stopped", {"finished": 32}, "20 groups in a row taught nothing")

    run = open_run(folder.root).run
    assert (run.status, run.ended_at, run.counts) == ("stopped", 99.0, {"finished": 32})
    assert run.reason == "20 groups in a row taught nothing"


def test_a_run_that_never_started_has_no_run_json(folder: RunFolder) -> None:
    with RunWriter(folder) as writer:
        writer.run_ended("failed", {}, "the model cannot be loaded")

    assert not folder.run.exists()


@pytest.mark.parametrize(
    ("trace", "kept"),
    [
        (
            "full",
            ["0-0.json", "0-1.json", "0-2.json", "held_out-1-9-0.json", "held_out-1-9-1.json"],
        ),
        ("samples", ["0-0.json", "0-1.json", "held_out-1-9-0.json"]),
        ("off", []),
    ],
)
def test_trace_decides_which_attempts_leave_a_transcript(
    folder: RunFolder, trace: Trace, kept: list[str]
) -> None:
    with RunWriter(folder, trace=trace) as writer:
        for index in range(3):
            writer.attempt_ended(attempt(0, index), "train")
        for index in range(2):
            writer.attempt_ended(attempt(9, index), "held_out")

    assert transcripts(folder) == kept


def test_a_rollout_row_names_its_transcript_where_there_is_one(folder: RunFolder) -> None:
    with RunWriter(folder, trace="samples") as writer:
        writer.run_started(run_row(folder))
        attempts = [attempt(4, index) for index in range(3)]
        for one in attempts:
            writer.attempt_ended(one, "train")
        writer.attempt_ended(attempt(4, 2), "held_out")
        writer.fates([RolloutRow.of(one, Fate.DROPPED) for one in attempts])

    left = open_run(folder.root)
    assert [row.transcript for row in left.rollouts()] == ["4-0.json", "4-1.json", None]
    assert left.transcript("4-1.json").detail == "left"


def test_each_evaluation_has_transcripts_of_its_own_and_its_row_names_them(
    folder: RunFolder,
) -> None:
    """Every evaluation of a set gives its groups the same serials."""
    result = TaskResult(task="a", group=9, rewards=(None, None), fates=(Fate.DROPPED,) * 2)
    for _ in range(2):
        with RunWriter(folder, trace="samples") as writer:
            writer.run_started(run_row(folder))
            for index in range(2):
                writer.attempt_ended(attempt(9, index), "held_out")
            writer.evaluation(evaluation_row(result))

    named = [row.tasks[0].transcripts for row in open_run(folder.root).evaluations()]
    assert named == [("held_out-1-9-0.json", None), ("held_out-2-9-0.json", None)]
    assert transcripts(folder) == ["held_out-1-9-0.json", "held_out-2-9-0.json"]


def test_a_transcript_is_never_written_over(folder: RunFolder) -> None:
    with RunWriter(folder) as writer:
        writer.run_started(run_row(folder))
        for why in ("first", "second", "third"):
            writer.attempt_ended(attempt(4, 0, why), "train")
        writer.fates([RolloutRow.of(attempt(4, 0, "third"), Fate.DROPPED)])

    left = open_run(folder.root)
    assert transcripts(folder) == ["4-0.2.json", "4-0.3.json", "4-0.json"]
    assert left.transcript("4-0.json").detail == "first"
    assert left.rollouts()[0].transcript == "4-0.3.json"


def test_the_log_has_a_time_and_a_level_on_every_note(folder: RunFolder) -> None:
    with RunWriter(folder, now=lambda: 1_767_323_045.9) as writer:
        writer.note("warning", "two things:\none\nother \ud83d")
        writer.note("info", "on")

    assert folder.log.read_text() == (
        "2026-01-02T03:04:05Z warning two things:\n    one\n    other \\ud83d\n"
        "2026-01-02T03:04:05Z info on\n"
    )


def test_a_second_writer_is_refused_and_changes_nothing(folder: RunFolder) -> None:
    with RunWriter(folder) as writer:
        writer.run_started(run_row(folder))
        writer.group_settled(group_row(0))
        with pytest.raises(RunFolderError, match="is being written"), RunWriter(folder):
            pass
        writer.group_settled(group_row(1))

    assert [row.serial for row in open_run(folder.root).groups()] == [0, 1]


def test_a_writer_goes_on_where_a_killed_one_stopped(folder: RunFolder) -> None:
    with RunWriter(folder) as writer:
        writer.run_started(run_row(folder))
        writer.group_settled(group_row(0))
    with folder.groups.open("a") as file:
        file.write('{"serial": 1, "epo')

    with RunWriter(folder) as writer:
        writer.group_settled(group_row(1))

    assert [row.serial for row in open_run(folder.root).groups()] == [0, 1]


def test_a_killed_run_left_every_attempt_that_had_ended(folder: RunFolder) -> None:
    """Case D8: every finished attempt is on disk as it finishes."""
    script = """
        import os, signal, sys
        from pathlib import Path
        from loops_cookbook.attempts import Attempt, Discarded, Fate
        from loops_cookbook.records import RolloutRow
        from loops_cookbook.rundir.layout import RunFolder
        from loops_cookbook.rundir.write import RunWriter

        with RunWriter(RunFolder(Path(sys.argv[1]))) as writer:
            for index in range(16):
                ended = Attempt(0, index, "orders", discarded=Discarded(Fate.DROPPED))
                writer.attempt_ended(ended, "train")
                if index < 8:
                    writer.fates([RolloutRow.of(ended, Fate.DROPPED)])
            os.kill(os.getpid(), signal.SIGKILL)
    """
    with RunWriter(folder) as writer:
        writer.run_started(run_row(folder))
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), folder.root], check=False)

    left = open_run(folder.root)
    assert [row.attempt for row in left.rollouts()] == list(range(8))
    assert transcripts(folder) == sorted(f"0-{index}.json" for index in range(16))
    assert all(left.transcript(name).fate == Fate.DROPPED for name in transcripts(folder))


def test_run_json_is_indented_for_people(folder: RunFolder) -> None:
    with RunWriter(folder) as writer:
        writer.run_started(run_row(folder))

    text = folder.run.read_text()
    assert '\n  "service": {\n    "run_id": "r-1"\n  }' in text
    assert json.loads(text)["schema"] == 1


def test_versions_name_this_package_and_python_and_leave_out_what_is_not_here() -> None:
    found = versions()

    assert found["python"].startswith("3.")
    assert "loops-cookbook" in found
    assert all(found.values())
