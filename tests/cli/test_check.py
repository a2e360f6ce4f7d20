"""`loops check` prints the report on stdout, the warnings on stderr, and launches nothing."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loops_cookbook.cli.app import app
from loops_cookbook.recipes.check import LAST_LINE

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


def test_a_fault_is_one_line_and_exit_2() -> None:
    result = CliRunner().invoke(app, ["check", COUNTING, "--set", "model.max_seq_len=65"])
    assert result.exit_code == 2
    assert result.stderr.startswith("loops: model.max_seq_len: found 65")
    assert result.stdout == ""
