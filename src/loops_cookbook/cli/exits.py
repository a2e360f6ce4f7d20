"""How a command ends: a `LoopsError` as one line on stderr, everything with its exit status.

0 done; 1 and 2 as the error says, and 1 for what a line of the user's own raised; 130 interrupted;
143 and 129 told to end, all three after everything that was open has been released; 70 our bug,
with its traceback. A reader that closes the pipe of the answer ends a command quietly, and a full
disk with a word; so does a path that cannot be opened, which is 2. With `--json` an error stands on
stdout too, as JSON. This is the one place that turns exceptions into words and numbers.
"""

import asyncio
import errno
import functools
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, ParamSpec, cast

import typer

from loops_cookbook.errors import OUR_BUG, LoopsError, RunStopped, UsageError
from loops_cookbook.problems import one_line, said, shown
from loops_cookbook.report.streams import AnswerLost, forget
from loops_cookbook.rollouts.frames import raised_by_a_user

P = ParamSpec("P")

PIPE_CLOSED = 1
ANSWER_LOST = 1
DISK_FULL = 1

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ESTALE),
)
"""What a path or its disk is at fault for, whoever opens it."""


class Terminated(BaseException):
    """SIGTERM arrived; passes through everything, so that everything is released.

    As with KeyboardInterrupt, its text is what was kept, and in a second line how to go on.
    """


class HungUp(Terminated):
    """SIGHUP arrived: the terminal was closed, or the connection to it."""


SIGNALLED: Mapping[signal.Signals, type[BaseException]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGHUP: HungUp,
    signal.SIGTERM: Terminated,
}
"""What the signals that end a command are raised as; the narrower first."""


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """A command that ends as this module says; its `debug` parameter adds tracebacks."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _termination_raises():
                command(*args, **kwargs)
                sys.stdout.flush()
        except (typer.Exit, typer.Abort, SystemExit):
            raise
        except BaseException as error:  # every way to end passes here, to get its status
            _end(error, debug=bool(kwargs.get("debug")), as_json=bool(kwargs.get("as_json")))

    return run


def say(lines: Iterable[str], onward: Iterable[str] = ()) -> None:
    """Print what ends a command, on stderr; what goes on from there as it stands, to be copied."""
    for line in (*(f"loops: {line}" for line in lines), *onward):
        typer.echo(line, err=True)


@contextmanager
def _termination_raises() -> Generator[None]:
    """Let SIGTERM and SIGHUP raise inside the block, where the block may handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_it(number: int, _: object) -> NoReturn:
        raise SIGNALLED[signal.Signals(number)]

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if not is_left(number)]
    before = {number: signal.signal(number, raise_it) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_left(number: signal.Signals) -> bool:
    """Whether a signal is none of ours: SIGHUP of a command that `nohup` started."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def leaving(left: str) -> Generator[None]:
    """Within the block, a signal ends the command with these words on what is left of its work."""
    try:
        yield
    except (KeyboardInterrupt, Terminated) as signalled:
        raise type(signalled)(left) from signalled


def interruption(number: signal.Signals, left: str = "") -> str:
    """That a signal ended the command, and what of it is left."""
    what = "interrupted" if number == signal.SIGINT else f"told to end ({number.name})"
    return f"{what}: {left}" if left else what


def _end(error: BaseException, *, debug: bool, as_json: bool) -> NoReturn:
    causes = [_retold(cause) for cause in _leaves(error)]
    ours = [cause for cause in causes if isinstance(cause, LoopsError)]
    if (signalled := _signalled(causes)) is not None:
        number, left = signalled
        what, *onward = left.splitlines() or [""]
        status = 128 + number
        _say_both([interruption(number, what)], status, onward, as_json=as_json)
    elif all(isinstance(cause, BrokenPipeError) for cause in causes):
        forget(sys.stdout.fileno(), sys.stderr.fileno())
        status = PIPE_CLOSED
    elif all(isinstance(cause, AnswerLost) for cause in causes):
        forget(sys.stdout.fileno())
        status = ANSWER_LOST
        say([_without_answer(cause) for cause in causes if isinstance(cause, AnswerLost)])
    elif all(isinstance(cause, OSError) and cause.errno in _FULL for cause in causes):
        forget(sys.stdout.fileno())  # it may be stdout that takes no more
        status = DISK_FULL
        say([_without_room(cause) for cause in causes if isinstance(cause, OSError)])
    elif all(isinstance(cause, asyncio.CancelledError) for cause in causes):
        status = RunStopped.exit_status
        what = "the command's own tasks were cancelled, which no part of loops-cookbook does"
        do = "cancel the tasks that your code started, and never all of asyncio.all_tasks()"
        _say_both([f"{what}: {do}"], status, as_json=as_json)
    elif all(isinstance(cause, LoopsError) or raised_by_a_user(cause) for cause in causes):
        status = max([RunStopped.exit_status, *(cause.exit_status for cause in ours)])
        lines = [line for cause in causes for line in _line_of(cause).splitlines()]
        _say_both(lines, status, as_json=as_json)
    else:
        status = OUR_BUG
        _say_traceback(error)
        say(["this is a bug of loops-cookbook, not of your project: please report the lines above"])
    if debug and status != OUR_BUG:
        _say_traceback(error)
    raise typer.Exit(status)


def _line_of(error: BaseException) -> str:
    """What a user is to mend: an error of ours, or what a line of their own raised."""
    if isinstance(error, LoopsError):
        return str(error)
    return (
        f"{type(error).__name__}({said(error)}) was raised at {raised_by_a_user(error)}, in code "
        "of yours that loops-cookbook came to: mend it; --debug shows the way there"
    )


def _retold(error: BaseException) -> BaseException:
    """What a path or its disk is at fault for, as an error that is a user's to mend."""
    if isinstance(error, FileNotFoundError) and not _is_anywhere():
        return UsageError("the working directory is not there any more: go to one that is")
    if (
        isinstance(error, OSError)
        and error.errno in _NO_ACCESS
        and isinstance(error.filename, str | bytes | os.PathLike)  # it may be a descriptor's number
    ):
        path = one_line(shown(Path(os.fsdecode(cast(str, error.filename)))))
        return UsageError(f"{path}: {error.strerror}; see to it, or name another")
    return error


def _is_anywhere() -> bool:
    """Whether the working directory is there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _without_answer(error: AnswerLost) -> str:
    return (
        f"stdout takes no more ({error.strerror}): what was done stays done; make room, or send "
        "the answer elsewhere"
    )


def _without_room(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}: make room, then start the command again"


def _signalled(causes: Iterable[BaseException]) -> tuple[signal.Signals, str] | None:
    """The signal that ended a command, and what it was told of what is left."""
    for number, kind in SIGNALLED.items():
        for cause in causes:
            if isinstance(cause, kind):
                return number, str(cause)
    return None


def _say_both(
    lines: Sequence[str], status: int, onward: Sequence[str] = (), *, as_json: bool
) -> None:
    if as_json:
        told = {"errors": [*lines, *onward], "exit_status": status}
        try:
            typer.echo(json.dumps(told, ensure_ascii=False))
        except OSError:  # its reader has gone, or its disk is full
            forget(sys.stdout.fileno())
    say(lines, onward)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group of task groups, or the one that there is."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast(BaseExceptionGroup[BaseException], error).exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _say_traceback(error: BaseException) -> None:
    typer.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
