"""Where a run goes on is told in one line, with counts that read as English."""

import pytest

from loops_cookbook.cli.resuming import told
from loops_cookbook.rundir.past import Past, SFTPast


@pytest.mark.parametrize(
    ("past", "sentence"),
    [
        (SFTPast(recorded=1), "goes on after 1 update, from the first weights, 1 update"),
        (Past(kept=(1,), again=(4,)), "1 update applied again, 1 cut group started again"),
        (Past(kept=(1, 2), again=(4, 6)), "2 updates applied again, 2 cut groups started again"),
    ],
)
def test_one_is_told_as_one(past: Past | SFTPast, sentence: str) -> None:
    """`1 kept batches are applied again` was told, and of an SFT run not from where."""
    assert sentence in told(past)


def test_nothing_is_counted_that_is_not_there() -> None:
    """`0 updates are applied again` was told."""
    assert told(SFTPast()) == told(Past()) == "goes on after 0 updates, from the first weights"
