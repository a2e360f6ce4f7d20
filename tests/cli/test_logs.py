"""What the package logs becomes notes of the run, and a flood of one kind stays short."""

import logging

from loops_cookbook.cli.logs import logs_noted
from loops_cookbook.recorders import Fanout
from loops_cookbook.records import Level

kept: list[tuple[Level, str]] = []
logger = logging.getLogger("loops_cookbook.somewhere")


class Notes(Fanout):
    """Keeps the notes."""

    def note(self, level: Level, text: str) -> None:
        kept.append((level, text))


def test_a_flood_of_one_kind_is_told_three_times_in_one_line_each() -> None:
    """A close() that failed wrote a traceback for every attempt: thousands of lines."""
    kept.clear()
    with logs_noted(Notes()):
        for number in range(50):
            try:
                raise ValueError("no such\nfile")
            except ValueError:
                logger.warning("close %d failed", number, exc_info=True)
        logger.info("another kind")
    assert kept == [
        ("warning", "close 0 failed (ValueError: no such file)"),
        ("warning", "close 1 failed (ValueError: no such file)"),
        ("warning", "close 2 failed (ValueError: no such file); more like this are not told"),
        ("info", "another kind"),
    ]


def test_outside_the_block_nothing_is_noted() -> None:
    kept.clear()
    with logs_noted(Notes()):
        pass
    logger.warning("too late")
    assert kept == []


def test_what_went_wrong_in_a_group_is_told() -> None:
    """A client that died was told as `unhandled errors in a TaskGroup (1 sub-exception)`."""
    kept.clear()
    with logs_noted(Notes()):
        try:
            raise ExceptionGroup("unhandled", [ConnectionError("the server is gone")])
        except ExceptionGroup:
            logger.warning("close failed", exc_info=True)
    told = "ExceptionGroup: unhandled (1 sub-exception): ConnectionError: the server is gone"
    assert kept == [("warning", f"close failed ({told})")]
