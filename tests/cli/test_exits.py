"""How a command ends: one line on stderr, and a status."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import typer

from loops_cookbook.cli.exits import HungUp, Terminated, guarded, leaving
from loops_cookbook.errors import ConfigError, EngineDied, LoopsError, RunStopped, UsageError


def ended(error: BaseException, *, debug: bool = False) -> int:
    """The exit status of a command that raises `error`."""

    @guarded
    def command(debug: bool = False) -> None:
        failed = Future[None]()
        failed.set_exception(error)
        failed.result()  # raised by no line of a user

    with pytest.raises(typer.Exit) as caught:
        command(debug=debug)
    return caught.value.exit_code


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("x"), 2),
        (EngineDied("x"), 1),
        (KeyboardInterrupt(), 130),
        (Terminated(), 143),
        (HungUp(), 129),
        (PermissionError(errno.EACCES, "Permission denied", "runs/a"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "runs/a"), 70),
        (RuntimeError("x"), 70),
        (ExceptionGroup("of tasks", [ExceptionGroup("inner", [ConfigError("x")])]), 2),
        (ExceptionGroup("of tasks", [ConfigError("x"), RuntimeError("x")]), 70),
        (BaseExceptionGroup("of tasks", [KeyboardInterrupt(), ConfigError("x")]), 130),
        (BaseExceptionGroup("of tasks", [Terminated()]), 143),
    ],
    ids=repr,
)
def test_each_end_has_its_status(error: BaseException, status: int) -> None:
    assert ended(error) == status


def test_an_error_of_ours_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    ended(ConfigError("train.toml: recipe: missing; add it"))
    assert capsys.readouterr() == ("", "loops: train.toml: recipe: missing; add it\n")


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG, errno.EIO])
def test_a_path_that_cannot_be_opened_is_no_bug_of_ours(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of another user, beside the config or named, was shown with a traceback."""
    ended(OSError(number, os.strerror(number), "runs/a"))
    told = f"loops: runs/a: {os.strerror(number)}; see to it, or name another\n"
    assert capsys.readouterr().err == told


def test_a_working_directory_that_is_gone_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command but `--version` was a bug there."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert ended(FileNotFoundError(errno.ENOENT, "No such file or directory")) == 2
    told = "loops: the working directory is not there any more: go to one that is\n"
    assert capsys.readouterr().err == told


def test_every_line_of_a_list_of_faults_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    ended(ConfigError("a: wrong\nb: wrong"))
    assert capsys.readouterr().err == "loops: a: wrong\nloops: b: wrong\n"


def test_errors_of_several_tasks_are_all_said(capsys: pytest.CaptureFixture[str]) -> None:
    ended(ExceptionGroup("of tasks", [LoopsError("one"), LoopsError("two")]))
    assert capsys.readouterr().err == "loops: one\nloops: two\n"


def test_an_error_of_a_command_that_answers_in_json_is_json_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A script that read `check --json` found nothing on stdout when the config was wrong."""

    @guarded
    def command(as_json: bool = False) -> None:
        raise ConfigError("a: wrong\nb: wrong")

    with pytest.raises(typer.Exit):
        command(as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out) == {"errors": ["a: wrong", "b: wrong"], "exit_status": 2}
    assert err == "loops: a: wrong\nloops: b: wrong\n"


def test_ctrl_c_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(KeyboardInterrupt()) == 130
    assert capsys.readouterr() == ("", "loops: interrupted\n")


def test_sigterm_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """It ended a command without a word."""
    assert ended(Terminated()) == 143
    assert capsys.readouterr() == ("", "loops: told to end (SIGTERM)\n")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Terminated, HungUp])
def test_what_was_kept_is_said_with_the_interruption(
    kind: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    @guarded
    def command(as_json: bool = False) -> None:
        raise kind("it is in runs/x\ngo on with: loops run t.toml --resume")

    with pytest.raises(typer.Exit) as caught:
        command(as_json=True)
    out, err = capsys.readouterr()
    said, onward = err.splitlines()
    assert said.endswith(": it is in runs/x")
    assert onward == "go on with: loops run t.toml --resume"
    assert json.loads(out) == {
        "errors": [said.removeprefix("loops: "), onward],
        "exit_status": caught.value.exit_code,
    }


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Terminated, HungUp])
def test_what_is_left_of_work_is_said_with_the_interruption(
    kind: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    @guarded
    def command() -> None:
        with leaving("nothing was written; run it again"):
            raise kind

    with pytest.raises(typer.Exit):
        command()
    assert capsys.readouterr().err.endswith(": nothing was written; run it again\n")


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    ended(ConfigError("a: wrong"), debug=True)
    said = capsys.readouterr().err
    assert said.startswith("loops: a: wrong\nTraceback")
    assert "test_exits.py" in said


def test_a_bug_of_ours_is_shown_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    ended(RuntimeError("unforeseen"))
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "RuntimeError: unforeseen" in said
    assert "this is a bug of loops-cookbook" in said.splitlines()[-1]


def test_what_a_users_own_line_raised_is_no_bug_of_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where a run came to code of a user's that it did not know of, that was told as our bug."""

    @guarded
    def command() -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("loops: ZeroDivisionError(mine) was raised at tests/cli/test_exits.py:")
    assert "in command, in code of yours that loops-cookbook came to: mend it" in line


def test_what_a_users_line_raised_beside_an_error_of_ours_is_no_bug_either(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each alone was told in a line, and both together with a traceback, as our bug."""
    try:
        raise ZeroDivisionError("mine")
    except ZeroDivisionError as error:
        mine = error
    assert ended(ExceptionGroup("of tasks", [ConfigError("one"), mine])) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "loops: one"
    assert second.startswith("loops: ZeroDivisionError(mine) was raised at tests/cli/test_exits.py")


def test_an_error_of_an_open_file_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """Its `filename` is the descriptor's number, and what told of the error raised another."""
    assert ended(OSError(errno.EIO, os.strerror(errno.EIO), 5)) == 70
    assert "OSError: [Errno 5] Input/output error: 5" in capsys.readouterr().err


def test_tasks_that_nobody_of_ours_cancelled_are_no_bug_of_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An Episode that cancelled `asyncio.all_tasks()` was told as a bug, with 70."""
    group = BaseExceptionGroup("tasks", [asyncio.CancelledError(), asyncio.CancelledError()])
    assert ended(group) == RunStopped.exit_status
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("loops: the command's own tasks were cancelled")


def test_a_command_that_returns_ends_as_done() -> None:
    @guarded
    def command() -> None:
        pass

    command()


def test_a_status_that_a_command_chose_is_kept() -> None:
    assert ended(typer.Exit(1)) == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_command_after_what_it_holds_was_released(
    number: signal.Signals, status: int
) -> None:
    """A terminal that was closed ended a command with nothing released."""
    released: list[bool] = []

    @guarded
    def command() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            released.append(True)

    before = signal.getsignal(number)
    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == status
    assert released == [True]
    assert signal.getsignal(number) is before


def test_a_command_works_in_another_thread() -> None:
    done: list[bool] = []
    thread = threading.Thread(target=guarded(lambda: done.append(True)))
    thread.start()
    thread.join()
    assert done == [True]


PRINTS = "print('x' * 99)"
SHOWS_AMID_TASKS = "amid_tasks(lambda: answer_console().print('x' * 99))"


@pytest.mark.parametrize("says", [PRINTS, SHOWS_AMID_TASKS])
def test_a_reader_that_goes_away_ends_a_command_quietly(says: str) -> None:
    """Progress raised SystemExit in a task group, which came out as a bug, with status 70."""
    code = (
        "import anyio, sys, typer\n"
        "from loops_cookbook.cli.exits import guarded\n"
        "from loops_cookbook.report.console import answer_console\n"
        "async def in_group(say):\n"
        "    async with anyio.create_task_group():\n"
        "        say()\n"
        "def amid_tasks(say):\n"
        "    anyio.run(in_group, say)\n"
        "app = typer.Typer()\n"
        f"app.command()(guarded(lambda: [{says} for _ in range(2000)] and None))\n"
        "app()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_an_error_keeps_its_status_where_nobody_reads_the_answer() -> None:
    """With `--json` it came out as a traceback, and as status 120 of the interpreter's end."""
    code = (
        "import sys, typer\n"
        "from loops_cookbook.cli.exits import guarded\n"
        "from loops_cookbook.errors import ConfigError\n"
        "from loops_cookbook.report.streams import prepare_streams\n"
        "def command(as_json: bool = True):\n"
        "    sys.stdin.read()\n"
        "    raise ConfigError('a: wrong')\n"
        "app = typer.Typer()\n"
        "app.command()(guarded(command))\n"
        "app()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, err = process.communicate()
    assert (process.returncode, err) == (2, "loops: a: wrong\n")


RAISES = "raise ConfigError('a: wrong')"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("does", "status", "said"),
    [
        (
            "print('answer')",
            1,
            "No space left on device: make room, then start the command again",
        ),
        (
            "prepare_streams(); print('answer')",
            1,
            "stdout takes no more (No space left on device): what was done stays done; make room, "
            "or send the answer elsewhere",
        ),
        (RAISES, 2, "a: wrong"),
    ],
)
def test_a_full_disk_under_the_answer_is_no_bug_of_ours(does: str, status: int, said: str) -> None:
    """An answer was told as a bug, with 70, and an error by a traceback that was another's."""
    code = (
        "import typer\n"
        "from loops_cookbook.cli.exits import guarded\n"
        "from loops_cookbook.errors import ConfigError\n"
        "from loops_cookbook.report.streams import prepare_streams\n"
        "def command(as_json: bool = True):\n"
        f"    {does}\n"
        "app = typer.Typer()\n"
        "app.command()(guarded(command))\n"
        "app()"
    )
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (status, f"loops: {said}\n")
