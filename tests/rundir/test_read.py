"""A run folder reads back typed, whatever a kill or a later version did to it."""

import json
import math
import shutil
from pathlib import Path

import pytest

from loops_cookbook.attempts import Attempt, Fate
from loops_cookbook.errors import RunFolderError
from loops_cookbook.journal import encode
from loops_cookbook.records import RolloutRow, RunRow, StepRow
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.read import open_run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = new_run_folder("runs", tmp_path)
    row = RunRow(
        run="r",
        recipe="rl",
        scope="local",
        model="m",
        updates=None,
        attempts_per_update=None,
        tasks={},
        service={"device": "cpu", "port": 80},
        versions={},
        config_path="train.toml",
        config={"training": {"seed": 1, "stop": ["a"]}},
        started_at=1.0,
    )
    folder.run.write_text(encode(row.to_json()))
    return folder


def rollout(**metadata: float | str | bool) -> RolloutRow:
    return RolloutRow.of(Attempt(0, 0, "orders", reward=1.0, metadata=metadata), Fate.TRAINED)


def test_a_run_row_reads_back_whole(folder: RunFolder) -> None:
    run = open_run(folder.root).run

    assert run.config == {"training": {"seed": 1, "stop": ["a"]}}
    assert run.service == {"device": "cpu", "port": 80}
    assert run.status == "running"


def test_a_run_that_has_just_begun_has_no_rows(folder: RunFolder) -> None:
    run = open_run(folder.root)

    assert (run.steps(), run.groups(), run.rollouts(), run.evaluations()) == ((), (), (), ())


def test_metadata_keeps_its_types(folder: RunFolder) -> None:
    folder.rollouts.write_text(
        encode(rollout(turns=3, share=2.0, clean=True, ended="1").to_json()) + "\n"
    )

    (row,) = open_run(folder.root).rollouts()

    assert [(k, type(v)) for k, v in row.metadata.items()] == [
        ("turns", int),
        ("share", float),
        ("clean", bool),
        ("ended", str),
    ]


def test_a_number_that_was_not_finite_reads_back_as_nan(folder: RunFolder) -> None:
    step = StepRow(update=1, at=2.0, metrics={"loss": math.inf, "entropy": 1.0})
    folder.steps.write_text(encode(step.to_json()) + "\n")
    folder.rollouts.write_text(encode(rollout(share=math.nan).to_json()) + "\n")

    run = open_run(folder.root)

    assert math.isnan(run.steps()[0].metrics["loss"])
    assert run.steps()[0].metrics["entropy"] == 1.0
    assert math.isnan(float(run.rollouts()[0].metadata["share"]))


def test_a_torn_last_line_is_passed_over(folder: RunFolder) -> None:
    line = encode(rollout().to_json())
    folder.rollouts.write_text(f"{line}\n{line[:40]}")

    assert len(open_run(folder.root).rollouts()) == 1


def test_keys_of_a_later_version_are_passed_over(folder: RunFolder) -> None:
    row = {**rollout().to_json(), "mood": "good"}
    step = {"update": 1, "at": 0.0, "loss": 0.5, "remark": "new", "parts": {}}
    folder.rollouts.write_text(encode(row))
    folder.steps.write_text(encode(step))

    run = open_run(folder.root)

    assert run.rollouts() == (rollout(),)
    assert run.steps() == (StepRow(update=1, at=0.0, metrics={"loss": 0.5}),)


def test_a_damaged_row_is_an_error_with_its_line_and_key(folder: RunFolder) -> None:
    good = rollout().to_json()
    folder.rollouts.write_text(
        f"{encode(good)}\n{encode({**good, 'tries': 'many'})}\n{encode(good)}\n"
    )

    with pytest.raises(RunFolderError, match=r"rollouts\.jsonl:2 is not .* \(tries: "):
        open_run(folder.root).rollouts()


def test_a_newer_schema_is_refused(folder: RunFolder) -> None:
    row = json.loads(folder.run.read_text())
    folder.run.write_text(encode({**row, "schema": 99}))

    with pytest.raises(RunFolderError, match=r"schema 99, and .* up to 1: install a newer"):
        open_run(folder.root)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"schema": None}, "has schema null, which is no number of one: it was changed"),
        ({"schema": "1"}, "has schema '1', which is no number of one"),
        ({"schema": True}, "has schema true, which is no number of one"),
        ({"schema": 0}, "has schema 0, which is no number of one"),
        ({}, "has no schema, so no run wrote it as it is: it was changed or damaged"),
    ],
)
def test_a_schema_that_is_none_is_told_as_what_it_is(
    folder: RunFolder, changed: dict[str, object], told: str
) -> None:
    """A `run.json` without one asked for a newer version of this package."""
    row = json.loads(folder.run.read_text())
    del row["schema"]
    folder.run.write_text(encode({**row, **changed}))
    with pytest.raises(RunFolderError, match=told):
        open_run(folder.root)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ([], "has no run.json: name the folder of a run"),
        (["1/run.json", "2/run.json"], "holds 2 runs and is none: name one, such as .*/2$"),
        (["b/1/run.json", "a/2/run.json"], "holds 2 runs and is none: name one, such as .*/a/2$"),
        (["transcripts/.empty"], "was killed before it did, and nothing of it is there"),
        (["loops.json"], "what `loops export` wrote: name the run that it is from"),
    ],
)
def test_a_folder_that_is_no_run_is_refused_by_what_it_is(
    tmp_path: Path, files: list[str], told: str
) -> None:
    """Whatever was named, the message was that it has no run.json."""
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    with pytest.raises(RunFolderError, match=told):
        open_run(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"there is no folder .*/nowhere: .* of a run$"):
        open_run(tmp_path / "nowhere")


def test_instead_of_a_run_that_is_not_there_one_beside_it_is_named(folder: RunFolder) -> None:
    """Of a name with a slip in it only was said that there is none."""
    newer = folder.root.with_name("zzz")
    shutil.copytree(folder.root, newer)
    slip = folder.root.with_name(f"{folder.root.name[:-1]}_")
    with pytest.raises(RunFolderError, match=f"of a run, such as {folder.root}$"):
        open_run(slip)
    with pytest.raises(RunFolderError, match=f"of a run, such as {newer}$"):
        open_run(folder.root.with_name("another"))


def test_a_file_is_told_as_one_and_the_run_that_it_is_of(folder: RunFolder) -> None:
    """`run.json has no run.json` was told."""
    with pytest.raises(RunFolderError, match=f"/run.json is a file: .* of the run, {folder.root}$"):
        open_run(folder.run)


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 1}'])
def test_a_damaged_run_json_is_refused(folder: RunFolder, content: str) -> None:
    folder.run.write_text(content)

    with pytest.raises(RunFolderError, match=r"run\.json"):
        open_run(folder.root)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "is not there"),
        ("{}", "is not a record of its kind"),
    ],
)
def test_a_transcript_that_cannot_be_read_is_an_error(
    folder: RunFolder, content: str | None, match: str
) -> None:
    if content is not None:
        (folder.transcripts / "0-0.json").write_text(content)

    with pytest.raises(RunFolderError, match=match):
        open_run(folder.root).transcript("0-0.json")


@pytest.mark.parametrize(
    "turn",
    [
        {"continues": 5, "context_ids": [], "sampled_ids": [], "logprobs": []},
        {"continues": None, "context_ids": [2**40], "sampled_ids": [], "logprobs": []},
        {"continues": None, "context_ids": [], "sampled_ids": [1], "logprobs": []},
    ],
)
def test_a_transcript_whose_tokens_cannot_be_is_an_error(
    folder: RunFolder, turn: dict[str, object]
) -> None:
    whole = {
        **{"purpose": "train", "group": 0, "attempt": 0, "task": "t", "reward": None},
        **{"fate": None, "detail": "", "exception": None, "tries": 1, "flags": {}},
        **{"metadata": {}, "timing": {}, "started_at": 0.0, "calls": []},
        "turns": [{"origin": "first", "policy_version": 0, "stop": "stop", **turn}],
    }
    (folder.transcripts / "0-0.json").write_text(encode(whole))

    with pytest.raises(RunFolderError, match="is not a record of its kind"):
        open_run(folder.root).transcript("0-0.json")
