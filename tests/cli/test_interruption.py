"""An interrupted run tells what it waits for, what it kept, and how to go on."""

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest
from tests.recipes.notebook import Notebook

from loops_cookbook.cli.exits import Terminated
from loops_cookbook.cli.interruption import Interruption, left
from loops_cookbook.recipes.ending import Ending
from loops_cookbook.records import RunStatus
from loops_cookbook.report.closing import Closing, Evaluated
from loops_cookbook.rollouts.blocks import Block
from loops_cookbook.rollouts.jobs import Job
from loops_cookbook.rollouts.keeper import open_keeper
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.sandboxes.base import Entry
from loops_cookbook.sandboxes.ledger import Ledger

pytestmark = pytest.mark.anyio

ONWARD = "go on with: loops run t.toml --resume runs/x/1"


def closing(status: RunStatus = "interrupted", onward: str | None = None) -> Closing:
    return Closing(
        status=status,
        folder=Path("runs/x/1"),
        updates=3,
        seconds=1.0,
        curve=[],
        evaluations={},
        counts={},
        onward=onward,
    )


@pytest.mark.parametrize(
    ("holding", "told"),
    [
        (0, "info: stopping, at most 15 s; press Ctrl-C again to end now"),
        (
            1,
            "info: stopping: 1 attempt releases what it holds, at most 15 s; press Ctrl-C again to "
            "end now",
        ),
        (
            1024,
            "info: stopping: 1,024 attempts release what they hold, at most 15 s; press Ctrl-C "
            "again to end now",
        ),
    ],
)
async def test_what_is_waited_for_is_said_at_once(tmp_path: Path, holding: int, told: str) -> None:
    notebook = Notebook()
    made = interruption(tmp_path, notebook)
    async with open_keeper() as keeper, anyio.create_task_group() as group:
        made.ending.keeper = keeper  # type: ignore[union-attr]
        jobs = [Job(f"attempt {n}", seconds=9, release_seconds=5) for n in range(holding + 1)]
        for job in jobs[:holding]:
            job.block = Block()  # the last one waits for a slot, and holds nothing
        group.start_soon(keeper.outcomes, dict.fromkeys(jobs, anyio.sleep_forever))
        await anyio.wait_all_tasks_blocked()
        made.cancelled(signal.SIGINT, 15.0)
        group.cancel_scope.cancel()
    assert notebook.notes == [told]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (None, ["nothing had begun"]),
        (closing(), ["it kept no update; what it did is in runs/x/1"]),
        (closing(onward=ONWARD), ["what it did is in runs/x/1", ONWARD]),
        (closing("failed", onward=ONWARD), ["what it did is in runs/x/1"]),
        (closing("done"), ["the run had come to its end; it is in runs/x/1"]),
    ],
    ids=["early", "nothing kept", "kept", "failed", "done"],
)
def test_what_is_left_of_a_run_is_told_with_how_to_go_on(
    how: Closing | None, told: list[str]
) -> None:
    """Ctrl-C said `interrupted` and no more, SIGTERM nothing at all."""
    assert left(how, RunFolder(Path("runs/x/1"))) == told


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (0, "no evaluation came to its end; what it did is in runs/x/1, and it begins anew"),
        (
            1,
            "1 evaluation came to the end and is in runs/x/1/evaluations.jsonl; what is left of "
            "them begins anew",
        ),
    ],
)
def test_an_evaluation_is_not_told_as_a_run_that_trains(ended: int, told: str) -> None:
    """`it kept no update` was said of `loops eval`, which makes none."""
    how = replace(closing(), is_evaluation=True, evaluated=Evaluated(ended, 8 * ended))
    assert left(how, RunFolder(Path("runs/x/1"))) == [told]


def interruption(
    folder: Path, recorder: Notebook, closing: Callable[[], Closing] = closing
) -> Interruption:
    made = Interruption(recorder, RunFolder(folder), closing)
    made.ending = Ending(recorder)
    made.ending.counts = lambda: {"attempts/started": 8}
    return made


def test_a_run_that_is_left_is_recorded_as_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A coroutine that held the event loop at Ctrl-C left `running` in the records."""
    notebook = Notebook()
    interruption(tmp_path, notebook).last_words(signal.SIGINT)
    assert notebook.ended == [("interrupted", {"attempts/started": 8}, "stopped by SIGINT")]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("loops: interrupted: it kept no update; ")


def test_the_first_signal_is_the_reason_that_is_recorded(tmp_path: Path) -> None:
    notebook = Notebook()
    made = interruption(tmp_path, notebook)
    made.cancelled(signal.SIGHUP, 20.0)
    made.last_words(signal.SIGTERM)
    assert notebook.ended == [("interrupted", {"attempts/started": 8}, "stopped by SIGHUP")]


def test_a_run_whose_end_is_told_is_not_told_again(tmp_path: Path) -> None:
    notebook = Notebook()
    made = interruption(tmp_path, notebook)
    assert made.ending is not None
    made.ending.tell("done")
    made.last_words(signal.SIGINT)
    assert [status for status, *_ in notebook.ended] == ["done"]


def test_sandboxes_that_are_left_are_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    with Ledger(folder.sandboxes) as ledger:
        for name in ("a", "b", "c"):
            ledger.opens(Entry(name, "x", "plain", "here", "attempt 0"))
        ledger.released(Entry("b", "x", "plain", "here", "attempt 0"))
    interruption(tmp_path, Notebook()).last_words(signal.SIGTERM)
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("loops: told to end (SIGTERM): ")
    assert last == f"loops: 2 sandboxes may be left: `loops cleanup {tmp_path}` sees to that"


def test_what_sees_to_sandboxes_is_started_as_the_run_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It began with `loops` in a project where only `uv run loops` is found."""
    folder = RunFolder(tmp_path / "a run")
    folder.root.mkdir()
    with Ledger(folder.sandboxes) as ledger:
        ledger.opens(Entry("a", "x", "plain", "here", "attempt 0"))
    made = Interruption(Notebook(), folder, lambda: None, ("uv", "run", "loops"))
    made.last_words(signal.SIGTERM)
    command = f"uv run loops cleanup '{folder.root}'"
    assert f"`{command}` sees to that" in capsys.readouterr().err


def test_an_end_in_order_says_the_same_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = interruption(tmp_path, Notebook())
    error = made.exception(signal.SIGTERM)
    assert isinstance(error, Terminated)
    assert str(error).startswith("it kept no update; ")
    made.tell(signal.SIGTERM, [])  # as at the end of the time for what comes after
    assert capsys.readouterr().err == ""


def test_what_goes_on_is_the_last_line_of_all_and_stands_there_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stood in the middle of a line, and in the lines before it."""
    kept = partial(closing, onward=ONWARD)
    assert ONWARD not in kept().lines(width=80)
    interruption(tmp_path, Notebook(), kept).tell(signal.SIGINT, ["ended without waiting for it"])
    said = capsys.readouterr().err.splitlines()
    assert said[1:] == ["loops: ended without waiting for it", ONWARD]
    error = interruption(tmp_path, Notebook(), kept).exception(signal.SIGINT)
    assert str(error).splitlines()[1:] == [ONWARD]
