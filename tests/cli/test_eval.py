"""`loops eval` refuses before anything is launched, and leaves no folder behind when it does."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loops_cookbook.cli.app import app
from loops_cookbook.records import RunRow
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.rows import CheckpointRow

COUNTING = "examples/counting/train.toml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("BASETEN_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["patterns/custom_runtime/in_process_direct/train.toml"], "has no set to evaluate"),
        ([COUNTING, "--checkpoint", "nowhere"], "there is no folder"),
        ([COUNTING, "--checkpoint", "bt://loops:r/weights/u"], "use that service's scope"),
        ([COUNTING, "--checkpoint", "base", "--checkpoint", "base"], "base: is given twice"),
        ([COUNTING, "--set", "model.lora_rnk=3"], "lora_rank"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line_and_exit_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("loops: ")
    assert words in line
    assert not Path("runs").exists()


def test_a_refusal_is_json_where_the_answer_would_be() -> None:
    result = CliRunner().invoke(app, ["eval", COUNTING, "--checkpoint", "nowhere", "--json"])
    told = json.loads(result.stdout)
    assert told["exit_status"] == result.exit_code == 2
    assert "there is no folder" in told["errors"][0]


def test_a_copy_of_a_run_is_not_taken_for_the_run() -> None:
    """Both have their checkpoints under the same paths, and the first one was evaluated twice."""
    model = {"name": "models/counting", "lora_rank": 16, "lora_alpha": 32.0}
    run = RunRow(
        run="r",
        started_at=0.0,
        recipe="rl",
        scope="local",
        model="models/counting",
        updates=2,
        attempts_per_update=4,
        tasks={},
        service={},
        versions={},
        config_path="train.toml",
        config={"model": model},
    )
    path = "bt://loops:r/weights/u2"
    row = CheckpointRow(update=2, name="u2", path=path, folder="checkpoints/r/weights/u2", at=0.0)
    for name in ("a", "b"):
        folder = RunFolder(Path(name))
        (folder.checkpoints / "r" / "weights" / "u2").mkdir(parents=True)
        folder.run.write_text(json.dumps(run.to_json()))
        folder.checkpoint_rows.write_text(json.dumps(row.to_json()) + "\n")
    asked = ["eval", COUNTING, "--checkpoint", "a", "--checkpoint", "b"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2
    assert f"a and b: both are {path} to the engine" in result.stderr
