"""A chart shows its curve whatever it looks like, within its width."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.report.chart import Curve, chart, smoothed


def rising(n: int) -> Curve:
    return Curve(tuple(range(1, n + 1)), tuple(i / n for i in range(n)), 1)


def test_a_rising_line_goes_from_the_lower_left_to_the_upper_right() -> None:
    lines = chart(rising(9), width=26, height=5, unicode=False)

    assert lines == [
        "0.889 +                ***",
        "      |            ****",
        "      |       *****",
        "      |   ****",
        "0.000 +***",
        "      +-------------------",
        "       1                 9",
    ]


@given(values=st.lists(st.floats(1, 2), min_size=1, max_size=40), columns=st.integers(2, 30))
def test_braille_draws_the_same_curve_twice_as_finely_across_and_four_times_down(
    values: list[float], columns: int
) -> None:
    curve = smoothed(list(enumerate(values)))
    margin = len("0.000 |")

    fine = chart(curve, width=margin + columns, height=3)
    coarse = chart(curve, width=margin + 2 * columns, height=12, unicode=False)

    dots = [line[margin:].ljust(2 * columns) for line in coarse[:12]]
    for row, line in enumerate(fine[:3]):
        for column, cell in enumerate(line[margin:].ljust(columns)):
            shown = ord(cell) - 0x2800 if cell != " " else 0
            # https://www.unicode.org/charts/PDF/U2800.pdf: dots 1 to 8 are bits 0 to 7.
            places = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]
            for bit, (down, across) in enumerate(places):
                is_drawn = dots[4 * row + down][2 * column + across] == "*"
                assert bool(shown >> bit & 1) == is_drawn


def test_one_point_is_a_chart_with_one_mark() -> None:
    lines = chart(Curve((7,), (0.5,), 1), width=20, height=3, unicode=False)

    assert "".join(lines[:3]).count("*") == 1
    assert lines[-1].split() == ["7"]


def test_a_constant_curve_is_a_flat_line_in_the_middle() -> None:
    lines = chart(Curve((1, 2, 3), (0.5,) * 3, 1), width=20, height=3, unicode=False)

    assert [line.count("*") for line in lines[:3]] == [0, 13, 0]


def test_a_steep_step_has_no_gap() -> None:
    lines = chart(Curve((1, 2), (0.0, 1.0), 1), width=9, height=9, unicode=False)

    assert all("*" in line for line in lines[:9])


def test_no_points_make_no_chart() -> None:
    assert chart(smoothed([]), width=40) == []
    assert chart(smoothed([(1, math.nan)]), width=40) == []


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)
    | st.just([i / 7 for i in range(500)]),
    width=st.integers(10, 120),
    height=st.integers(2, 9),
    unicode=st.booleans(),
)
def test_a_chart_has_its_height_and_no_more_than_its_width(
    values: list[float], width: int, height: int, unicode: bool
) -> None:
    curve = smoothed(list(enumerate(values, start=1)))
    lines = chart(curve, width=width, height=height, unicode=unicode)

    assert len(lines) == height + 2
    margin = lines[-2].index("└" if unicode else "+")
    assert max(map(len, lines[:-1])) <= max(width, margin + 2)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=100))
def test_smoothing_keeps_the_number_of_points_and_their_range(values: list[float]) -> None:
    curve = smoothed(list(enumerate(values)))

    assert len(curve.values) == len(values)
    assert min(values) - 1e-9 <= min(curve.values)
    assert max(curve.values) <= max(values) + 1e-9


@pytest.mark.parametrize(("points", "window"), [(1, 1), (39, 1), (40, 3), (400, 21)])
def test_only_a_long_curve_is_smoothed(points: int, window: int) -> None:
    assert smoothed([(i, 0.5) for i in range(points)]).window == window


def test_a_smoothed_value_is_the_mean_of_its_window() -> None:
    curve = smoothed([(i, float(i % 3 == 0)) for i in range(60)])

    assert curve.window == 3
    assert curve.values[1:-1] == pytest.approx([1 / 3] * 58)
