"""Numbers read well at every size."""

import math

import pytest

from loops_cookbook.report.words import count, duration, measure, share, short


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (192, "3 min 12 s"),
        (3599.7, "1 h 0 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.6, "1.0k"),
        (12_345, "12.3k"),
        (999_949, "999.9k"),
        (999_950, "1.0M"),
        (4.5e6, "4.5M"),
        (2e9, "2.0G"),
    ],
)
def test_a_count_is_short(number: float, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (0.0, "0.000"),
        (0.4375, "0.438"),
        (-12.3, "-12.300"),
        (4.1e-5, "4.1e-05"),
        (123_456.0, "1.2e+05"),
        (math.inf, "inf"),
    ],
)
def test_a_measure_is_never_rounded_to_nothing(value: float | None, text: str) -> None:
    assert measure(value) == text


def test_a_share_is_a_percentage() -> None:
    assert (share(0.3125), share(1.0), share(None)) == ("31.2%", "100.0%", "-")


def test_a_count_of_one_has_no_plural() -> None:
    assert (count(1, "update"), count(6400, "attempt")) == ("1 update", "6,400 attempts")
