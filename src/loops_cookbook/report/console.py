"""stdout carries a command's answer, stderr everything else.

What a stream's encoding lacks is shown as an escape: no message is lost to a UnicodeEncodeError.
"""

import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console


def answer_console() -> Console:
    """stdout, as it is now."""
    return Console(file=sys.stdout, highlight=False)


def side_console() -> Console:
    """stderr, as it is now."""
    return Console(stderr=True, highlight=False)


def print_lines(lines: Iterable[str], warnings: Iterable[str] = ()) -> None:
    """Print an answer, then what to know beside it, one line each, just as they are."""
    _write(sys.stdout, lines)
    sys.stdout.flush()  # so that the warnings follow where both go to one place
    _write(sys.stderr, (f"warning: {warning}" for warning in warnings))


def has_unicode(encoding: str) -> bool:
    """Whether a stream can show what is not ASCII."""
    return encoding.lower().startswith("utf")


def printable(text: str, encoding: str) -> str:
    """The text with escapes for what the encoding lacks."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _write(stream: TextIO, lines: Iterable[str]) -> None:
    for line in lines:
        stream.write(printable(line, stream.encoding or "utf-8") + "\n")
