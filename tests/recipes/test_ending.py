import pytest

from loops_cookbook.errors import EngineDied, NoLearningSignal
from loops_cookbook.recipes.ending import ending


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
