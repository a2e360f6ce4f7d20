"""`loops check` prints the report on stdout, the warnings on stderr, and launches nothing."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loops_cookbook.cli.app import app
from loops_cookbook.recipes.check import LAST_LINE
from loops_cookbook.recipes.sft_check import LAST_LINE as SFT_LAST_LINE

COUNTING = "examples/counting/train.toml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_report_is_the_answer() -> None:
    result = CliRunner().invoke(app, ["check", COUNTING])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == LAST_LINE
    assert not list(Path.cwd().iterdir())


def test_as_json_it_is_one_object() -> None:
    result = CliRunner().invoke(app, ["check", COUNTING, "--json"])
    told = json.loads(result.stdout)
    assert told["report"]["Mode"] == "sync; batch: 8 × 16"
    assert told["turns_extend"] is True


def test_what_an_episode_prints_at_its_import_is_no_part_of_the_answer(tmp_path: Path) -> None:
    """It stood before the JSON, which no reader could parse then."""
    CliRunner().invoke(app, ["init", str(tmp_path)])
    episode = tmp_path / "episode.py"
    episode.write_text('print("imported")\n' + episode.read_text())
    result = CliRunner().invoke(app, ["check", "train.toml", "--json"])
    assert json.loads(result.stdout)["report"]["Loss"] == "cispo"
    assert "imported" in result.stderr


def test_a_fault_as_json_is_one_object_too() -> None:
    result = CliRunner().invoke(app, ["check", COUNTING, "--json", "--set", "model.max_seq_len=65"])
    assert result.exit_code == 2
    (error,) = json.loads(result.stdout)["errors"]
    assert error.startswith("model.max_seq_len: found 65")


def test_a_fault_is_one_line_and_exit_2() -> None:
    result = CliRunner().invoke(app, ["check", COUNTING, "--set", "model.max_seq_len=65"])
    assert result.exit_code == 2
    assert result.stderr.startswith("loops: model.max_seq_len: found 65")
    assert result.stdout == ""


def test_an_sft_config_is_checked_with_one_of_its_rows_shown() -> None:
    result = CliRunner().invoke(app, ["check", "examples/sft_tools/train.toml"])
    assert result.exit_code == 0
    assert SFT_LAST_LINE in result.stdout.splitlines()
    assert '{"name": "look_up", "arguments": {"order": "#' in result.stdout
    assert "<|end|>»" in result.stdout
