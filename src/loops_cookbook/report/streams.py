"""The standard streams of the process: each is there, and a lost stderr ends no work.

stderr carries progress and what a user's code prints. Where it takes no more, since its reader has
gone (a dead `tee`, a closed terminal) or its disk is full, what was to be said is dropped: hours of
work must not end by it, nor must a `print` in an Episode fail an attempt; and no code that shares
the process can close it for the others. stdout carries the
answer, and a command whose answer is not taken ends by it, unless it has done more than answer:
that its write failed is an `AnswerLost`, whoever wrote, or a BrokenPipeError.
A descriptor that was closed from the start is opened on nothing: the next file would take its
number, and be written what others print.
"""

import errno
import io
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_GONE = (errno.EPIPE, errno.EIO)
"""Of a pipe and a terminal that nobody reads any more: no later write comes through."""


class AnswerLost(OSError):
    """stdout takes no more, for another reason than that its reader has gone."""


class _Answer(io.FileIO):
    """stdout, whose errors are told from those of files."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def write(self, data: Any, /) -> int | None:
        """Write, or say why that cannot be."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise AnswerLost(error.errno, error.strerror) from error


class _Side(io.FileIO):
    """stderr, which takes everything."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.lost: str | None = None
        """Why nobody reads it any more."""
        self.on_lost: Callable[[str], None] | None = None
        """Told once that it is lost."""

    def write(self, data: Any, /) -> int:
        """Write what can be written."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while left and (written := super().write(left)):
                left = left[written:]
        except OSError as error:
            if error.errno in _GONE:
                self._lose(error)
        return size

    def _lose(self, error: OSError) -> None:
        with suppress(OSError):  # no descriptor is free now; the next write tries again
            forget(self.fileno())  # what processes that are started write there goes on too
        if self.lost is not None:
            return
        self.lost = str(error.strerror)
        if self.on_lost is not None:
            self.on_lost(self.lost)


class _Shared(io.TextIOWrapper):
    """stderr as text; it stays open for whoever else writes there."""

    def close(self) -> None:
        """Write what is buffered."""
        self.flush()


def prepare_streams() -> None:
    """Make the process's streams what this module says; done once, before anything is opened."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # the lowest number that is free, so this one
            os.open(os.devnull, os.O_RDONLY if descriptor == 0 else os.O_WRONLY)
            os.set_inheritable(descriptor, True)  # for processes that are started it is the same
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = _answer(sys.stdout)
    sys.stderr = _side(sys.stderr)


def _answer(stdout: TextIO | None) -> TextIO:
    if stdout is None:
        stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for its encoding
    return io.TextIOWrapper(
        io.BufferedWriter(_Answer(1)),
        encoding=stdout.encoding,
        errors=stdout.errors,
        line_buffering=stdout.isatty(),
    )


def _side(stderr: TextIO | None) -> TextIO:
    encoding = "utf-8" if stderr is None else stderr.encoding
    return _Shared(
        io.BufferedWriter(_Side(2)),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


@contextmanager
def told_if_lost(tell: Callable[[str], None]) -> Generator[None]:
    """Within the block, have it told, once, why nobody reads stderr any more, should it be so."""
    side = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    if not isinstance(side, _Side):  # that of somebody who calls this package
        yield
        return
    if side.lost is not None:
        tell(side.lost)
    side.on_lost = tell
    try:
        yield
    finally:
        side.on_lost = None


def say_on_terminal(line: str) -> None:
    """Say it to the person at the terminal, whatever became of stderr; where there is one that
    waits for this command."""
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            if os.tcgetpgrp(terminal) == os.getpgrp():  # from behind, writing may stop a process
                os.write(terminal, f"loops: {line}\n".encode())
        finally:
            os.close(terminal)


def forget(*descriptors: int) -> None:
    """Let what is written to these go nowhere from here on, also what is still buffered."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
