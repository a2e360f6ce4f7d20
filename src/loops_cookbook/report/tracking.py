"""`python -m loops_cookbook.report.tracking NAME PARENT`: one tracker at work, in its own process.

It is told what to do on stdin, a JSON object a line: to begin, to describe, to log, to end. When
stdin ends it sends what it has and ends, whether it was told how the run ended or not; it outlives
the process PARENT by a minute at most. On stdout it says what a person should read, `[level, text]`
a line; what the tracker's package prints goes nowhere. A cause of failure is told once, and only a
failure to begin ends it.
"""

import json
import os
import signal
import sys
import warnings
from contextlib import suppress
from typing import Any

from loops_cookbook.report.tracked import Begun, Tell, TrackedRun

LOOK_SECONDS = 10.0
"""Between two looks at whether the run's process is there."""
LAST_SECONDS = 50.0
"""For the tracker to send what is left, once it is not."""


def main(name: str, parent: int) -> int:
    """Do what stdin says until it ends; the exit status."""
    # A whole job may be sent these; its run tells.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    outlive(parent)
    voice = _Voice(_claim_stdout())
    with warnings.catch_warnings():
        warnings.showwarning = voice.warn
        return _carry_out(name, voice)


def outlive(
    parent: int, *, look_seconds: float = LOOK_SECONDS, last_seconds: float = LAST_SECONDS
) -> None:
    """End this process some time after its parent, whatever it is doing then."""

    def look(*_: object) -> None:
        if os.getppid() != parent:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
            signal.setitimer(signal.ITIMER_REAL, last_seconds)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, look_seconds, look_seconds)


def _carry_out(name: str, voice: "_Voice") -> int:
    run: TrackedRun | None = None
    is_over = False
    for line in sys.stdin.buffer:
        message: dict[str, Any] = json.loads(line)
        what = message.pop("do")
        try:
            if run is None:
                run = _begin(name, Begun(**message), voice.tell)
            else:
                is_over = what == "end"
                getattr(run, what)(**message)
        except Exception as error:  # of a package that is not ours, on which no run may depend
            if run is None:
                voice.failed("begin", error, "the run goes on without it")
                return 1
            voice.failed(what, error, "it goes on, and more like this are not told")
    if run is not None and not is_over:
        run.end("killed", "the run's process is gone", {})
    return 0


def _begin(name: str, begun: Begun, tell: Tell) -> TrackedRun:
    if name == "wandb":
        from loops_cookbook.report.wandb_run import begin_wandb

        return begin_wandb(begun, tell)
    from loops_cookbook.report.trackio_run import begin_trackio

    return begin_trackio(begun, tell)


_SHORTEST_KEY = 8
"""Characters; what is shorter is no key, and would be found in any text."""


class _Voice:
    """What is said to the run, each cause once, and no key in it."""

    def __init__(self, to: int) -> None:
        self._to = to
        """A file descriptor."""
        self._causes: set[object] = set()

    def tell(self, level: str, text: str) -> None:
        line = json.dumps([level, " ".join(_without_keys(text).split())])
        with suppress(BrokenPipeError):  # the run is gone; what it was told is sent all the same
            os.write(self._to, f"{line}\n".encode())

    def failed(self, what: str, error: Exception, then: str) -> None:
        if self._is_new((what, type(error))):
            why = f"{type(error).__name__}: {error}"
            self.tell("warning", f"could not {what} ({why}); {then}; steps.jsonl has everything")

    def warn(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *_: object,
    ) -> None:
        """What a package warns its users of, and not its programmers."""
        if category is UserWarning and self._is_new((filename, lineno)):
            self.tell("warning", str(message))

    def _is_new(self, cause: object) -> bool:
        is_new = cause not in self._causes
        self._causes.add(cause)
        return is_new


def _without_keys(text: str) -> str:
    """The text without what the environment holds under the name of a key or a token."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_KEY and name.endswith(("_KEY", "_TOKEN")):
            text = text.replace(value, "[key]")
    return text


def _claim_stdout() -> int:
    """Keep stdout for what is said to the run: what packages print goes nowhere."""
    said = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return said


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
