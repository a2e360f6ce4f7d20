"""One data row as `loops check` shows it: its text, with the trained tokens between marks."""

from itertools import groupby

from loops_cookbook.recipes.demonstrations import Demonstration
from loops_cookbook.renderers.base import Renderer

BEGIN, END = "«", "»"
MOST_SHOWN = 600
"""Characters of a stretch of trained or of read text; the middle of a longer one is left out."""


def excerpt(row: Demonstration, renderer: Renderer) -> list[str]:
    """The lines that show a row, its first sequence if there are several."""
    sequence = row.sequences[0]
    several = f", the first of its {len(row.sequences)} sequences" if row.sequences[1:] else ""
    shown = ""
    stretches = groupby(range(len(sequence.ids)), key=lambda i: bool(sequence.is_sampled[i]))
    for is_trained, places in stretches:
        stretch = list(places)
        text = _shortened(renderer.decode(sequence.ids[stretch[0] : stretch[-1] + 1]))
        shown += f"{BEGIN}{text}{END}" if is_trained else text
    head = f"Row {row.source}{several}, what is trained between {BEGIN} and {END}:"
    return [head, *(f"  | {line}".rstrip() for line in shown.split("\n"))]


def _shortened(text: str) -> str:
    if len(text) <= MOST_SHOWN:
        return text
    half = MOST_SHOWN // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
