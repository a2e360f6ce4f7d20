"""Numbers as a person reads them in a line of progress or of a summary."""

import math


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


def count(number: int, noun: str) -> str:
    """`1 update`, `50 updates`, `6,400 attempts`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
