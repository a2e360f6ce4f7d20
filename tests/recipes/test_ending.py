import signal

import pytest
from tests.recipes.notebook import Notebook

from loops_cookbook.errors import EngineDied, NoLearningSignal
from loops_cookbook.recipes.ending import Ending, ending


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (NoLearningSignal("all alike"), ("stopped", "all alike")),
        (EngineDied("gone"), ("failed", "gone")),
        (KeyError("x"), ("failed", "a bug of loops-cookbook: KeyError: 'x'")),
        (KeyboardInterrupt(), ("interrupted", "stopped by a signal")),
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
