import gc

import pytest

from loops_cookbook.cli.collector import NEW_OBJECTS, collecting_seldom


def test_within_the_block_the_collector_looks_seldom_and_not_at_what_was_there() -> None:
    before = gc.get_threshold()
    with collecting_seldom():
        assert gc.get_threshold() == (NEW_OBJECTS, *before[1:])
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_after_an_error_the_collector_is_as_it_was() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="x"), collecting_seldom():
        raise ValueError("x")
    assert gc.get_threshold() == before
