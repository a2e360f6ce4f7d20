"""A curve drawn with characters: braille dots, or asterisks where there is only ASCII.

The curve is smoothed for the eye alone, and the caption says over how many points; a curve with
more points than the chart has columns shows their means.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Canvas: TypeAlias = npt.NDArray[np.bool_]
"""bool[rows of dots, columns of dots]"""

_POINTS_TO_A_WINDOW = 20
# A braille character has two columns of four dots; each dot is a bit of its number in Unicode.
_ACROSS, _DOWN = 2, 4
_BITS = np.array(((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80)))
_FIRST_BRAILLE = 0x2800


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over updates, smoothed for display."""

    updates: tuple[int, ...]
    values: tuple[float, ...]
    window: int
    """Each value is the mean of up to this many around it."""


def smoothed(points: Sequence[tuple[int, float]]) -> Curve:
    """The finite points, each the mean of those within half a window on either side."""
    finite = [(update, value) for update, value in points if math.isfinite(value)]
    half = len(finite) // _POINTS_TO_A_WINDOW // 2
    raw = [value for _, value in finite]
    values = tuple(fmean(raw[max(0, i - half) : i + half + 1]) for i in range(len(raw)))
    return Curve(tuple(update for update, _ in finite), values, 2 * half + 1)


def chart(curve: Curve, *, width: int, height: int = 7, unicode: bool = True) -> list[str]:
    """The curve as lines of at most `width` characters; none for a curve without points.

    Args:
        curve: what to draw.
        width: in characters, the labels of the axes included.
        height: in lines, without the axis of updates.
        unicode: False draws in ASCII.
    """
    if not curve.values:
        return []
    low, high = _range(curve.values)
    labels = {0: f"{high:.3f}", height - 1: f"{low:.3f}"}
    margin = max(map(len, labels.values()))
    columns = max(width - margin - 2, 1)
    across, down = (_ACROSS, _DOWN) if unicode else (1, 1)
    values = _resampled(curve.values, columns * across)
    rows = np.rint((high - values) / (high - low) * (height * down - 1)).astype(int)
    canvas = _line(rows.tolist(), height * down)
    drawn = _braille(canvas) if unicode else _ascii(canvas)
    tick, wall, corner, floor = "┤│└─" if unicode else "+|+-"
    lines = [
        f"{labels.get(i, ''):>{margin}} {tick if i in labels else wall}{text}".rstrip()
        for i, text in enumerate(drawn)
    ]
    lines.append(f"{'':>{margin}} {corner}{floor * columns}")
    lines.append(f"{'':>{margin}}  {_ends(curve.updates, columns)}")
    return lines


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low < 1e-9:
        around = max(abs(low), 1.0) / 20
        return low - around, high + around
    return low, high


def _resampled(values: Sequence[float], columns: int) -> Floats:
    """float64[columns]: means of several points, or points joined by straight lines."""
    points = np.array(values, np.float64)
    if len(points) == 1:
        return points
    if len(points) > columns:
        return np.array([part.mean() for part in np.array_split(points, columns)])
    return np.interp(np.linspace(0, len(points) - 1, columns), np.arange(len(points)), points)


def _line(rows: Sequence[int], height: int) -> Canvas:
    """A line through one row of each column, without gaps."""
    canvas = np.zeros((height, len(rows)), np.bool_)
    before = rows[0]
    for column, row in enumerate(rows):
        canvas[min(before + 1, row) : max(before - 1, row) + 1, column] = True
        before = row
    return canvas


def _ascii(canvas: Canvas) -> list[str]:
    return ["".join("*" if dot else " " for dot in line) for line in canvas.tolist()]


def _braille(canvas: Canvas) -> list[str]:
    height, width = canvas.shape
    even = np.pad(canvas, ((0, 0), (0, width % _ACROSS)))
    cells = even.reshape(height // _DOWN, _DOWN, -1, _ACROSS)
    numbers = np.einsum("rdca,da->rc", cells, _BITS)
    return ["".join(chr(_FIRST_BRAILLE + n) if n else " " for n in row) for row in numbers.tolist()]


def _ends(updates: Sequence[int], columns: int) -> str:
    """The first update under the first column, the last under the last."""
    first, last = str(updates[0]), str(updates[-1])
    return first if len(updates) == 1 else f"{first} {last.rjust(columns - len(first) - 1)}"
