"""stdout carries a command's answer, stderr everything else.

What a stream's encoding lacks is shown by something like it, or as an escape: no message is lost
to a UnicodeEncodeError.
"""

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, redirect_stdout
from typing import TextIO

from rich.console import Console

_LIKE = str.maketrans({"×": "x", "→": "->", "…": "..."})


class _Console(Console):
    """One whose reader may leave; what that comes to is the command's business, not rich's, which
    raises SystemExit amid the work."""

    def on_broken_pipe(self) -> None:
        """Called while the BrokenPipeError is handled."""
        raise


def answer_console() -> Console:
    """stdout, as it is now."""
    return _Console(file=sys.stdout, highlight=False)


def side_console() -> Console:
    """stderr, as it is now."""
    return _Console(stderr=True, highlight=False)


def print_lines(lines: Iterable[str], warnings: Iterable[str] = ()) -> None:
    """Print an answer, then what to know beside it, one line each, just as they are."""
    _write(sys.stdout, lines)
    sys.stdout.flush()  # so that the warnings follow where both go to one place
    _write(sys.stderr, (f"warning: {warning}" for warning in warnings))


def has_unicode(encoding: str) -> bool:
    """Whether a stream can show what is not ASCII."""
    return encoding.lower().startswith("utf")


def printable(text: str, encoding: str) -> str:
    """The text with the like, or an escape, for what the encoding lacks."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_LIKE).encode(encoding, "backslashreplace").decode(encoding)
    return text


@contextmanager
def stdout_kept_for_the_answer() -> Generator[None]:
    """Within the block, what a user's code prints goes to stderr."""
    with redirect_stdout(sys.stderr):
        yield


def _write(stream: TextIO, lines: Iterable[str]) -> None:
    for line in lines:
        stream.write(printable(line, stream.encoding or "utf-8") + "\n")
