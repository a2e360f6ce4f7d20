"""Ctrl-C ends the command in one line, also while it is still being imported."""

import os
import signal
import subprocess
import sys

import pytest

INTERRUPTED_WHILE_IMPORTING = """
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.argv = ["loops", "--version"]
from loops_cookbook.cli.main import main
main()
"""


def test_ctrl_c_during_the_imports_is_one_line_and_status_130() -> None:
    """It showed the traceback of an import."""
    code = INTERRUPTED_WHILE_IMPORTING.format(name="loops_cookbook.cli.app")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "loops: interrupted\n")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_being_told_to_end_during_the_imports_is_one_line(
    number: signal.Signals, status: int
) -> None:
    """It ended the command without a word."""
    code = INTERRUPTED_WHILE_IMPORTING.format(name="loops_cookbook.cli.app")
    code = "import os, signal\n" + code.replace(
        "raise KeyboardInterrupt", f"os.kill(os.getpid(), signal.{number.name})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, f"loops: told to end ({number.name})\n")


def test_a_command_under_nohup_ends_by_no_hangup() -> None:
    """`nohup` starts a program with SIGHUP ignored."""
    code = "import os, signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code += INTERRUPTED_WHILE_IMPORTING.format(name="loops_cookbook.cli.app")
    code = code.replace("raise KeyboardInterrupt", "os.kill(os.getpid(), signal.SIGHUP)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("loops-cookbook ")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "where", ["threading.Thread(target=wait).start()", "atexit.register(wait)"]
)
def test_a_signal_amid_what_the_command_left_ends_it_with_its_status(
    number: signal.Signals, where: str
) -> None:
    """Ctrl-C while a thread was waited for showed a traceback of the interpreter's end."""
    code = (
        "import atexit, os, signal, sys, threading, time\n"
        "from loops_cookbook.cli import app, main\n"
        "def wait():\n"
        "    time.sleep(0.2)\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    time.sleep(600)\n"
        "def work():\n"
        f"    {where}\n"
        "    sys.exit(0)\n"
        "app.main = work\n"
        "main.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_entry_imports_nothing_that_takes_time() -> None:
    code = (
        "import sys; before = set(sys.modules); import loops_cookbook.cli.main;"
        "sys.stdout.write(' '.join(sorted({m.split('.')[0] for m in set(sys.modules) - before})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "loops_cookbook"


def test_the_entry_runs_the_command() -> None:
    code = "import sys; sys.argv = ['loops', '--version']; from loops_cookbook.cli.main import main"
    command = [sys.executable, "-c", f"{code}; main()"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("loops-cookbook ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["--version"], ["--help"], ["run", "--help"]])
def test_a_full_disk_under_the_help_is_one_line(words: list[str]) -> None:
    """It was a traceback: help and version are said before any command begins."""
    code = f"import sys; sys.argv = ['loops', *{words}]\n"
    code += "from loops_cookbook.cli.main import main; main()"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("loops: stdout takes no more (No space left on device): ")
    assert done.stderr.count("\n") == 1
