"""Log records of this package become notes of the run."""

import logging
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from loops_cookbook.problems import said
from loops_cookbook.records import Level, Recorder
from loops_cookbook.rollouts.faults import inside

_PACKAGE = "loops_cookbook"


_MOST_ALIKE = 3
"""Notes that come from one line of code; what it says further is left out, and that is said."""


class _Notes(logging.Handler):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._alike: Counter[tuple[str, int]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        where = (record.pathname, record.lineno)
        self._alike[where] += 1
        if self._alike[where] > _MOST_ALIKE:
            return
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text += f" ({type(error).__name__}: {said(error)}{inside(error)})"
        if self._alike[where] == _MOST_ALIKE:
            text += "; more like this are not told"
        self._recorder.note(_level(record.levelno), text)


@contextmanager
def logs_noted(recorder: Recorder) -> Generator[None]:
    """Within the block, hand everything from INFO up to a recorder, and to nobody else."""
    logger = logging.getLogger(_PACKAGE)
    handler, level, propagates = _Notes(recorder), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def _level(number: int) -> Level:
    if number >= logging.ERROR:
        return "error"
    if number >= logging.WARNING:
        return "warning"
    return "info" if number >= logging.INFO else "debug"
