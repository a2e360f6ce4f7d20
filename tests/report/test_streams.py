"""Each standard stream is there, and a lost stderr ends no work."""

import fcntl
import os
import subprocess
import sys
import termios
from collections.abc import Iterable
from pathlib import Path

import pytest

READ_ONE_LINE = """
import sys
import termios
from loops_cookbook.report.streams import prepare_streams, told_if_lost
prepare_streams()
told = []
with told_if_lost(told.append):
    sys.stderr.write("read\\n")
    sys.stdin.read()
    for number in range(3):
        print("unread", file=sys.stderr)
sys.stdout.write(f"went on {told}")
"""


@pytest.mark.parametrize("closes_first", [False, True])
def test_a_reader_of_stderr_that_leaves_ends_nothing_and_is_told_once(closes_first: bool) -> None:
    """A dead `tee` ended a run of hours, and made `print` in an Episode fail its attempts."""
    with subprocess.Popen(
        [sys.executable, "-c", READ_ONE_LINE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if not closes_first:
            assert process.stderr.readline() == "read\n"
        process.stderr.close()
        process.stdin.close()
        assert process.stdout.read() == "went on ['Broken pipe']"
    assert process.returncode == 0


def test_a_reader_that_leaves_while_no_descriptor_is_free_ends_nothing() -> None:
    """The error of that came out of a `print` in an Episode."""
    code = (
        "import os, resource, sys\n"
        "from loops_cookbook.report.streams import prepare_streams, told_if_lost\n"
        "prepare_streams()\n"
        "reader, writer = os.pipe(); os.dup2(writer, 2); os.close(reader); os.close(writer)\n"
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "with told_if_lost(sys.stdout.write):\n"
        "    for soft in (3, most):\n"
        "        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))\n"
        "        sys.stderr.write('unread\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Broken pipe", "")


def test_a_loss_before_the_block_is_told_within_it() -> None:
    code = (
        "import os, sys\n"
        "from loops_cookbook.report.streams import prepare_streams, told_if_lost\n"
        "prepare_streams()\n"
        "reader, writer = os.pipe(); os.dup2(writer, 2); os.close(reader)\n"
        "sys.stderr.write('unread\\n')\n"
        "with told_if_lost(sys.stdout.write): pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Broken pipe", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_stderr_ends_nothing() -> None:
    code = READ_ONE_LINE.replace("sys.stdin.read()", "pass")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full)
    assert (done.returncode, done.stdout) == (0, b"went on []")  # there may be room again


def run_with_closed(descriptors: Iterable[int], code: str) -> list[str]:
    """The command that runs Python code without these descriptors."""
    redirections = " ".join(f"{number}>&-" for number in descriptors)
    return ["sh", "-c", f'exec "$0" -c "$1" {redirections}', sys.executable, code]


@pytest.mark.parametrize("closed", [(2,), (1, 2), (0, 1, 2)])
def test_streams_that_were_closed_are_opened_on_nothing(closed: tuple[int, ...]) -> None:
    """A command without stdout or stderr came out as a bug; files took their numbers."""
    code = (
        "import os, sys\n"
        "from loops_cookbook.report.streams import prepare_streams\n"
        "prepare_streams()\n"
        "first = os.open(os.devnull, os.O_RDONLY)\n"
        "sys.stdin.read(); sys.stdout.write('x'); sys.stdout.flush(); sys.stderr.write('x')\n"
        "os._exit(first)\n"
    )
    command = run_with_closed(closed, code)
    assert subprocess.run(command, stdin=subprocess.DEVNULL, env=os.environ).returncode == 3


@pytest.mark.parametrize("closed", [(2,), (0, 2)])
def test_what_is_started_has_the_streams_too_that_were_closed(closed: tuple[int, ...]) -> None:
    """Its first file took the number of its stderr, and what it printed was written into that."""
    code = (
        "import os, subprocess, sys\n"
        "from loops_cookbook.report.streams import prepare_streams\n"
        "prepare_streams()\n"
        "first = 'import os; print(os.open(os.devnull, os.O_RDONLY))'\n"
        "subprocess.run([sys.executable, '-c', first])\n"
    )
    command = run_with_closed(closed, code)
    assert subprocess.run(command, stdout=subprocess.PIPE).stdout == b"3\n"


def test_stderr_is_a_stream_like_any_other() -> None:
    code = (
        "import sys\n"
        "from loops_cookbook.report.streams import prepare_streams\n"
        "prepare_streams()\n"
        "sys.stderr.write('ü\\n')\n"
        "sys.stdout.write(f'{sys.stderr.fileno()} {sys.stderr.isatty()} {sys.stderr.encoding}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.stderr == b"\\xfc\n"
    assert done.stdout == b"2 False ascii"


def test_stderr_stays_open_for_those_who_did_not_close_it() -> None:
    """An Episode that closed `sys.stdout`, which is stderr in a run, ended the run as a bug."""
    code = (
        "import sys\n"
        "from loops_cookbook.report.streams import prepare_streams\n"
        "prepare_streams()\n"
        "sys.stderr.write('before, ')\n"
        "sys.stderr.close()\n"
        "sys.stderr.write('after\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "before, after\n"


@pytest.mark.parametrize("waits", [True, False])
def test_a_terminal_that_waits_for_the_command_is_told_past_stderr(waits: bool) -> None:
    """After `2>&1 | head` a run would go on for hours without a sign of it."""
    code = (
        "import os\n"
        "from loops_cookbook.report.streams import say_on_terminal\n"
        f"{'' if waits else 'os.fork() and os._exit(0 * os.wait()[0]); os.setpgid(0, 0)'}\n"
        "say_on_terminal('it goes on')\n"
        "os.write(1, b'end')\n"
    )
    master, terminal = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=terminal,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"end"
    os.set_blocking(master, False)
    try:
        told = os.read(master, 1000)
    except BlockingIOError:
        told = b""
    os.close(terminal)
    os.close(master)
    assert told == (b"loops: it goes on\r\n" if waits else b"")


@pytest.mark.parametrize("flags", [[], ["-u"]])
def test_that_stdout_takes_no_more_is_told_from_what_files_raise(flags: list[str]) -> None:
    """`[Errno 28] No space left on device` was all, of a command that also wrote a folder."""
    code = (
        "import sys\n"
        "from loops_cookbook.report.streams import AnswerLost, prepare_streams\n"
        "prepare_streams()\n"
        "try: print('answer', flush=True)\n"
        "except AnswerLost as error: print(error.strerror, file=sys.stderr)\n"
        "import os; os._exit(0)\n"
    )
    with Path(os.devnull).open() as unwritable:
        command = [sys.executable, *flags, "-c", code]
        done = subprocess.run(command, stdout=unwritable, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "Bad file descriptor\n"
