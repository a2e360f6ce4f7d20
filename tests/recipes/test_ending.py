import signal
from asyncio import CancelledError
from collections.abc import Mapping

import pytest
from tests.recipes.notebook import Notebook

from loops_cookbook.errors import EngineDied, NoLearningSignal, RunStopped
from loops_cookbook.recipes.ending import Ending, ending
from loops_cookbook.records import RunStatus


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NoLearningSignal("all alike"), ("stopped", "all alike")),
        (EngineDied("gone"), ("failed", "gone")),
        (KeyError("x"), ("failed", "a bug of loops-cookbook: KeyError: 'x'")),
        (KeyboardInterrupt(), ("interrupted", "stopped by a signal")),
        (CancelledError(), ("interrupted", "its tasks were cancelled, and by no signal")),
    ],
)
def test_a_run_ends_as_the_exception_says(error: BaseException, told: tuple[str, str]) -> None:
    assert ending(error) == told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_signal_that_ended_a_run_is_named(number: signal.Signals) -> None:
    """After a closed terminal, `run.json` said `stopped by a signal`, and not by which."""
    told, cut = Notebook(), Notebook()
    for notebook in (told, cut):
        end = Ending(notebook)
        end.number = number
        end.tell_error(KeyboardInterrupt()) if notebook is told else end.cut_short()
    assert told.ended == cut.ended == [("interrupted", {}, f"stopped by {number.name}")]


class Full(Notebook):
    """A notebook without room."""

    def run_ended(
        self, status: RunStatus, counts: Mapping[str, int], reason: str | None = None
    ) -> None:
        raise RunStopped("run.json cannot be written")


def test_what_ended_a_run_is_told_also_where_its_folder_takes_no_more() -> None:
    """That `run.json` could not be written was told in its place, of a signal too."""
    notebook = Full()
    Ending(notebook).tell_error(EngineDied("gone"))
    assert notebook.notes == ["warning: run.json cannot be written"]
