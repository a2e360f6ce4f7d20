"""`loops run` refuses before anything is launched, and leaves no folder behind when it does."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loops_cookbook.cli.app import app

PATTERN = "patterns/custom_runtime/in_process_direct/train.toml"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("BASETEN_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([PATTERN], "needs BASETEN_API_KEY"),
        (["none.toml"], "no such config"),
        ([PATTERN, "--set", "training.upates=3"], "updates"),
        ([PATTERN, "--scope", "local"], "is a hub id"),
        ([PATTERN, "--scope", "lokal"], "--scope: there is no scope 'lokal'"),
        ([PATTERN, "--env-file", "none"], "no such file"),
    ],
)
def test_what_cannot_run_is_one_line_and_exit_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("loops: ")
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not Path("runs").exists()


def test_a_key_is_in_no_message() -> None:
    Path(".env").write_text("BASETEN_API_KEY=very-secret\n")
    result = CliRunner().invoke(app, ["run", PATTERN])
    assert result.exit_code == 2
    assert "very-secret" not in result.output


def test_rows_that_cannot_be_used_stop_an_sft_run_before_anything_is_launched() -> None:
    said = '{"messages": [{"role": "user", "content": "paid"}]}'
    Path("train.jsonl").write_text(f"{said}\n")
    Path("train.toml").write_text(
        'recipe = "sft"\n[model]\nname = "models/counting"\nmax_seq_len = 64\n'
        '[data]\ntrain = "train.jsonl"\n'
    )
    result = CliRunner().invoke(app, ["run", "train.toml"])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "loops: train.jsonl:1: trains nothing: no assistant message of it is trained on",
        "loops: 1 row cannot be used: mend the data, or leave them out with "
        'data.unusable_rows = "skip"',
    ]
    assert not Path("runs").exists()
