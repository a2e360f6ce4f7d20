"""Numbers as a person reads them in a line of progress or of a summary."""

import math
from collections.abc import Callable, Sequence


def duration(seconds: float) -> str:
    """`4.2 s`, `45 s`, `3 min 12 s`, `2 h 5 min`."""
    whole = round(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def short(number: float) -> str:
    """A count in at most five characters: `999`, `12.3k`, `4.5M`."""
    for limit, divisor, unit in ((999.5, 1, ""), (999_950, 1e3, "k"), (999_950_000, 1e6, "M")):
        if number < limit:
            return f"{number / divisor:.{1 if unit else 0}f}{unit}"
    return f"{number / 1e9:.1f}G"


def share(fraction: float | None) -> str:
    """`31.2%`; `-` for none."""
    return "-" if fraction is None else f"{fraction:.1%}"


def measure(value: float | None) -> str:
    """Three decimals, or a power of ten where they would not show the number; `-` for none."""
    if value is None or math.isnan(value):
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3f}"
    return f"{value:.1e}"


def between(
    show: Callable[[float | None], str], value: float | None, interval: tuple[float, float] | None
) -> str:
    """A value with its confidence interval, where it has one: `31.2% [24.0%, 39.1%]`."""
    if interval is None:
        return show(value)
    low, high = interval
    return f"{show(value)} [{show(low)}, {show(high)}]"


def aligned(rows: Sequence[Sequence[str]], *, gap: str = "   ") -> list[str]:
    """A table's lines; a row may have fewer cells than the widest of them."""
    columns = max(map(len, rows), default=0)
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(columns)]
    return [
        gap.join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]


def count(number: int, noun: str) -> str:
    """`1 update`, `50 updates`, `6,400 attempts`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
