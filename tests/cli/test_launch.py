"""Work is recorded and shown to its end, whatever user code does to the event loop."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from loops_cookbook.cli.launch import evaluated_attempts, launched
from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.recipes.frame import Surroundings
from loops_cookbook.recipes.plans import plan_config
from loops_cookbook.records import Recorder
from loops_cookbook.report.console import answer_console, side_console
from loops_cookbook.report.progress import Progress
from loops_cookbook.rundir.layout import RunFolder, new_run_folder

Work = Callable[[Recorder, Surroundings], Awaitable[None]]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Work], RunFolder]:
    """Does work as a run of the counting example; its folder."""
    monkeypatch.chdir(tmp_path)
    loaded = load_config("examples/counting/train.toml")
    plan = plan_config(loaded, read_environment(loaded.directory), os.environ, None)
    folder = new_run_folder("runs", tmp_path)
    progress = Progress(
        folder.root, side=side_console(), answer=answer_console(), every_seconds=1.0
    )

    def launch(work: Work) -> RunFolder:
        launched(plan, folder, progress, [], work)
        return folder

    return launch


async def leave() -> None:
    sys.exit(0)


def test_a_task_of_user_code_that_exits_does_not_end_the_run(
    launch: Callable[[Work], RunFolder],
) -> None:
    """`sys.exit(0)` in a task that an agent had started ended the run, once with exit status 0, and
    `run.json` said that a signal had."""
    done: list[str] = []

    async def work(recorder: Recorder, around: Surroundings) -> None:
        asyncio.create_task(leave())  # noqa: RUF006 - as an agent does
        await anyio.sleep(0.01)
        done.append("all of it")

    folder = launch(work)
    assert done == ["all of it"]
    assert "SystemExit(0) was raised at " in folder.log.read_text()


def test_a_run_whose_tasks_were_cancelled_does_not_end_as_one_that_is_done(
    launch: Callable[[Work], RunFolder],
) -> None:
    """An Episode that cancelled `asyncio.all_tasks()` ended its run with exit status 0 and without
    a word: a scope around the work took the cancellation for its own."""

    async def work(recorder: Recorder, around: Surroundings) -> None:
        assert around.ending is not None
        with anyio.CancelScope() as scope:
            scope.cancel()
            try:
                await anyio.sleep_forever()
            except BaseException as error:
                around.ending.tell_error(error)
                raise

    with pytest.raises(asyncio.CancelledError):
        launch(work)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("examples/tool_agent/train.toml", {"held_out": 144}),
        ("examples/sft_orders/train.toml", {"held_out": 128}),
    ],
)
def test_how_many_attempts_an_evaluation_has_is_known_before_it_begins(
    config: str, expected: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress told how many had ended, and not of how many."""
    monkeypatch.chdir(tmp_path)
    loaded = load_config(config)
    plan = plan_config(loaded, read_environment(loaded.directory), os.environ, None)
    assert evaluated_attempts(plan) == expected
