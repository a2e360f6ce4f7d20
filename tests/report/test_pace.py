"""The time left is told from updates that are like those to come."""

import pytest

from loops_cookbook.report.pace import Pace


def paced(*updates: tuple[float, float | None, bool], is_sampled: bool = True) -> Pace:
    """The pace after updates: when each came, what it took, whether an evaluation was before it."""
    pace = Pace()
    for at, seconds, is_evaluated in updates:
        if is_evaluated:
            pace.evaluating()
        pace.updated(at, seconds, is_sampled=is_sampled)
    return pace


def test_it_is_the_mean_of_the_updates_without_an_evaluation() -> None:
    pace = paced((10.0, 1.0, True), (13.0, 3.0, False), (30.0, 2.0, True), (34.0, 5.0, False))
    assert pace.left(3, are_evaluated=False) == "about 12 s left"
    assert pace.left(3, are_evaluated=True) == "about 12 s of training left"


def test_where_every_update_is_evaluated_it_is_the_time_from_row_to_row() -> None:
    """With `evaluation.every = 1` the time left was never told."""
    once = paced((10.0, 1.0, True))
    assert once.left(3, are_evaluated=True) == ""
    pace = paced((10.0, 1.0, True), (20.0, 1.0, True), (32.0, 1.0, True))
    assert pace.left(3, are_evaluated=True) == "about 33 s left"


def test_what_is_not_sampled_takes_no_part_in_an_evaluation() -> None:
    pace = paced((10.0, 1.0, True), (20.0, 3.0, True), is_sampled=False)
    assert pace.left(2, are_evaluated=True) == "about 4.0 s of training left"


@pytest.mark.parametrize("updates", [0, -1])
def test_where_nothing_is_to_come_nothing_is_told(updates: int) -> None:
    assert paced((1.0, 1.0, False)).left(updates, are_evaluated=False) == ""


def test_an_update_whose_time_is_not_known_tells_nothing() -> None:
    assert paced((1.0, None, False)).left(1, are_evaluated=False) == ""
