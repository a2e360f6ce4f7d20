"""Work is recorded and shown to its end, whatever user code does to the event loop."""

import asyncio
import os
import sys
from pathlib import Path

import anyio
import pytest

from loops_cookbook.cli.launch import launched
from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.errors import RunStopped
from loops_cookbook.recipes.plans import plan_config
from loops_cookbook.recipes.rl import Surroundings
from loops_cookbook.records import Recorder
from loops_cookbook.report.console import answer_console, side_console
from loops_cookbook.report.progress import Progress
from loops_cookbook.rundir.layout import new_run_folder


def test_a_task_of_user_code_that_exits_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sys.exit(0)` in a task that an agent had started ended the run with exit status 0."""
    monkeypatch.chdir(tmp_path)
    loaded = load_config("examples/counting/train.toml")
    plan = plan_config(loaded, read_environment(loaded.directory), os.environ, None)
    folder = new_run_folder("runs", tmp_path)
    progress = Progress(
        folder.root, side=side_console(), answer=answer_console(), every_seconds=1.0
    )

    async def leave() -> None:
        sys.exit(0)

    async def work(recorder: Recorder, around: Surroundings) -> None:
        task = asyncio.create_task(leave())
        await anyio.sleep_forever()
        await task

    with pytest.raises(RunStopped, match=r"SystemExit\(0\).*test_launch.py.* in leave"):
        launched(plan, folder, progress, [], work)
    assert "SystemExit(0)" in folder.log.read_text()
