"""A command that will be silent for a while says what it reads."""

from pathlib import Path

import pytest

from loops_cookbook.cli import reading
from loops_cookbook.cli.reading import tell_reading
from loops_cookbook.config.load import load_config

SFT = """
recipe = "sft"
[model]
name = "models/counting"
[data]
train = "train.jsonl"
"""
RL = """
recipe = "rl"
[model]
name = "models/counting"
[episode]
class = "episode:AnswerEpisode"
tasks = "train.jsonl"
"""


@pytest.mark.parametrize(
    ("config", "rows", "told"),
    [
        (SFT, 1000, "reading train.jsonl, 0 MB\n"),
        (SFT, 999, ""),
        (SFT, None, ""),
        (RL, 1000, ""),
    ],
)
def test_many_rows_are_told_before_they_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: str,
    rows: int | None,
    told: str,
) -> None:
    """`loops run` of fifteen thousand rows was silent for ten seconds, its folder not yet named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reading, "MANY_BYTES", 1000)
    Path("train.toml").write_text(config)
    if rows is not None:
        Path("train.jsonl").write_text("x" * rows)
    tell_reading(load_config("train.toml"))
    assert capsys.readouterr().err == told
