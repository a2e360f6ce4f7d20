"""The tool agent of `examples/`, tried with scripted replies in real sandboxes."""

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loops_cookbook.testing import Terms, Tried, attempt

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_agent"
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


def module(name: str) -> ModuleType:
    """A module of the example."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module(name)


def rows(file: str) -> list[dict[str, Any]]:
    """The lines of a tasks file."""
    return [json.loads(line) for line in (EXAMPLE / file).read_text(encoding="utf-8").splitlines()]


def row(name: str) -> dict[str, Any]:
    """The task of that name."""
    return next(each for each in rows("tasks.jsonl") if each["name"] == name)


def called(tool: str, **arguments: object) -> str:
    """What a model says to call a tool."""
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>{call}</tool_call>"


def shell(command: str) -> str:
    """What a model says to run a command."""
    return called("shell", command=command)


async def tried(task: dict[str, Any], *replies: str, episode: Any = None, **options: int) -> Tried:
    """An attempt in which the model says these replies, and then that it is done."""
    return await attempt(
        episode or module("episode").ToolEpisode,
        task,
        replies=[*replies, "Done."],
        options=options,
        terms=Terms(sandbox={"backend": "local", "timeout_seconds": 10}),
    )
