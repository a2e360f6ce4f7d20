"""The patterns with sandboxes: their configs stand, right work earns, and cheats do not."""

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loops_cookbook.cli.app import app
from loops_cookbook.testing import Terms, Tried, attempt

PATTERNS = Path(__file__).parents[2] / "patterns" / "custom_runtime"
CLASSES = {
    "sandbox_per_attempt": ("files_episode", "FilesEpisode"),
    "separate_grader": ("checked_episode", "CheckedEpisode"),
    "test_suite_credit": ("suite_episode", "SuiteEpisode"),
}
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def tried(pattern: str, task: str, *replies: str) -> Tried:
    module, name = CLASSES[pattern]
    sys.path.insert(0, str(PATTERNS / pattern))
    episode: Any = getattr(importlib.import_module(module), name)
    lines = (PATTERNS / pattern / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    value = next(row for row in map(json.loads, lines) if row["name"] == task)
    options = {} if pattern == "sandbox_per_attempt" else None
    terms = Terms(sandbox={"backend": "local", "timeout_seconds": 10})
    return await attempt(episode, value, replies=replies, options=options, terms=terms)


@pytest.mark.parametrize("pattern", CLASSES)
def test_a_config_stands(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner().invoke(app, ["check", f"patterns/custom_runtime/{pattern}/train.toml"])
    assert result.exit_code == 0, result.output
    assert "no sandbox or Loops trainer launched" in result.stdout


@needs_bubblewrap
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("pattern", "task", "replies", "reward"),
    [
        (
            "sandbox_per_attempt",
            "paid-orders",
            ["ls", "grep -c ,paid$ orders.csv > answer.txt", "DONE"],
            1.0,
        ),
        ("sandbox_per_attempt", "paid-orders", ["grep -c paid orders.csv > answer.txt", "DONE"], 0),
        ("sandbox_per_attempt", "paid-orders", ["DONE"], 0),
        ("sandbox_per_attempt", "paid-orders", ["mkfifo answer.txt", "DONE"], 0),
        ("sandbox_per_attempt", "longest-line", ["grep longest notes.txt > longest.txt"] * 4, 1.0),
        ("separate_grader", "totals", ["printf 'ann,5\\nbo,7\\n' > totals.csv"], 1.0),
        ("separate_grader", "totals", ["printf 'ann,5\\nbo,3\\nbo,4\\n' > totals.csv"], 0),
        ("separate_grader", "totals", ["ln -s /dev/stdin totals.csv"], 0),
        ("separate_grader", "totals", ["kill -9 -1"], 0),
        ("separate_grader", "valid-json", ['echo "{}" > config.json'], 0),
        (
            "separate_grader",
            "valid-json",
            ['echo \'{"host": "localhost", "port": 8080}\' > config.json'],
            1.0,
        ),
        (
            "test_suite_credit",
            "reverse-words",
            ["```python\nimport sys\nfor s in sys.stdin: print(*s.split()[::-1])\n```"],
            1.0,
        ),
        ("test_suite_credit", "reverse-words", ["print(input())"], 0.5),
        ("test_suite_credit", "reverse-words", ["import os\nos._exit(0)"], 0),
        (
            "test_suite_credit",
            "leap-years",
            ["import os\nos.remove('program.py')\nprint('no')"],
            0.5,
        ),
    ],
)
async def test_what_is_earned(pattern: str, task: str, replies: list[str], reward: float) -> None:
    result = await tried(pattern, task, *replies)
    assert (result.reward, result.detail) == (reward, "")


@needs_bubblewrap
@pytest.mark.anyio
async def test_the_agent_sees_what_its_commands_wrote() -> None:
    result = await tried("sandbox_per_attempt", "paid-orders", "echo hi; ls nowhere", "DONE")
    assert "hi\nls: cannot access 'nowhere'" in result.prompts[1]
    assert "[status 2]" in result.prompts[1]
    assert result.metadata == {"ended": "done", "commands": 1}
