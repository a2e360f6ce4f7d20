"""Log records of this package become notes of the run."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

from loops_cookbook.records import Level, Recorder

_PACKAGE = "loops_cookbook"


class _Notes(logging.Handler):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._recorder.note(_level(record.levelno), self.format(record))


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
