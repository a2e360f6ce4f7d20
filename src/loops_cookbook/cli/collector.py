"""The garbage collector during a run: it looks seldom, and never at the program itself.

Each attempt makes some thousand small objects, and counting references frees almost all of them.
At Python's own threshold of 700 new objects the collector goes through the living ones so often
that it takes a third of what an attempt costs.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

NEW_OBJECTS = 200_000
"""Between two looks at them, some twenty milliseconds of work. An attempt leaves nothing to find;
while it lasts it has some hundred and thirty, and a thousand may last at once."""


@contextmanager
def collecting_seldom() -> Generator[None]:
    """Collect cycles at `NEW_OBJECTS` within the block, and leave out what was there before it."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
