"""`loops export` answers with the folder alone, and refuses in one line."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from loops_cookbook.cli.app import app


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("nowhere", "there is no folder"),
        ("bt://loops:r/weights/u2", "the service that trained it keeps it"),
    ],
)
def test_what_cannot_be_exported_is_one_line_and_exit_2(reference: str, words: str) -> None:
    result = CliRunner().invoke(app, ["export", reference, "out"])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("loops: ")
    assert words in line
    assert not Path("out").exists()
