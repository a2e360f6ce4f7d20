"""The process that a tracker works in, as the run sees it: what is told to it, what it says.

What is told never waits: it goes into a pipe, and what the pipe does not take is kept for the next
time. A process that ended is told nothing more, and one warning says so. At the end it has a
bounded time to send what is left. Its end of the pipe closes with the run's process, however that
ends; then it sends what it has, and ends as well.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self, TypeAlias, cast

from loops_cookbook.records import Level

Note: TypeAlias = Callable[[Level, str], None]
"""Told what a person should read."""

FINISH_SECONDS = 20.0
"""For a tracker to send what is left, once its run is over."""

_CHUNK = 65_536
"""Bytes that are written or read at once."""


class TrackerProcess:
    """Runs `loops_cookbook.report.tracking` for one tracker, for the length of its `with` block.

    Args:
        name: of the tracker.
        note: told what it says.
        finish_seconds: for it to end, at the end of the block.
    """

    def __init__(self, name: str, note: Note, finish_seconds: float = FINISH_SECONDS) -> None:
        self._name = name
        self._note = note
        self._finish_seconds = finish_seconds
        self._unsent = bytearray()
        self._unread = bytearray()
        self._has_warned = False
        self._is_lost = False

    def __enter__(self) -> Self:
        # -P: a file in the working directory must not stand in for the tracker's package.
        module = "loops_cookbook.report.tracking"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, self._name, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the run, which then tells how it ended
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        for pipe in (self._to, self._from):
            os.set_blocking(pipe.fileno(), False)
        return self

    def __exit__(self, *exc: object) -> None:
        """Let it send what is left and end; after `finish_seconds` it is ended."""
        try:
            self._finish(time.monotonic() + self._finish_seconds)
        except subprocess.TimeoutExpired:
            self._warn(
                f"has not sent everything within {self._finish_seconds:g} s after the end of the "
                f"run, and is ended; steps.jsonl has what it lacks{_MENDS.get(self._name, '')}"
            )
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._hear()
            self._to.close()
            self._from.close()

    def send(self, message: Mapping[str, object]) -> None:
        """Tell it something; returns at once, whatever it does."""
        if not self._is_lost:
            self._unsent += json.dumps(message, default=str).encode() + b"\n"
            self.push()

    def push(self) -> None:
        """Pass on what was kept, as far as the pipe takes it, and what the tracker said."""
        self._hear()
        try:
            while self._unsent:
                del self._unsent[: os.write(self._to.fileno(), bytes(self._unsent[:_CHUNK]))]
        except BlockingIOError:
            return
        except OSError:  # it ended
            self._lose()

    def _finish(self, deadline: float) -> None:
        """Wait for its end.

        Raises:
            TimeoutExpired: that did not come in time.
        """
        poll = select.poll()  # and not `select`, which takes no descriptor beyond 1,023
        poll.register(self._to, select.POLLOUT)
        self.push()
        while self._unsent and not self._is_lost and time.monotonic() < deadline:
            poll.poll(1000 * max(deadline - time.monotonic(), 0))
            self.push()
        self._to.close()
        if self._process.wait(max(deadline - time.monotonic(), 0)):
            self._lose()

    def _lose(self) -> None:
        """Tell it nothing more, and say so where it has not said why itself."""
        self._is_lost = True
        self._unsent.clear()
        self._hear()
        if not self._has_warned:
            self._warn("its process ended; steps.jsonl has what it lacks")

    def _hear(self) -> None:
        with suppress(BlockingIOError):
            while said := os.read(self._from.fileno(), _CHUNK):
                self._unread += said
        *lines, rest = bytes(self._unread).split(b"\n")
        self._unread = bytearray(rest)
        for line in lines:
            level, text = cast(tuple[Level, str], json.loads(line))
            if level == "warning":
                self._warn(text)
            else:
                self._note(level, f"{self._name}: {text}")

    def _warn(self, text: str) -> None:
        self._has_warned = True
        self._note("warning", f"{self._name}: {text}")


_MENDS = {"wandb": "; `wandb sync` sends what is in the run's folder"}
"""What can be done afterwards."""
