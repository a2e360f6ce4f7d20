"""The engine's command line: what it refuses, and in which words."""

import socket
import subprocess
import sys

import pytest

ARGUMENTS = ["--model-dir=none", "--model-name=m", "--max-seq-len=32", "--lora-rank=0"]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run it where torch cannot be imported."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from loops_cookbook.local.__main__ import main\n"
        "main(sys.argv[1:])"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    "arguments",
    [["serve"], ["serve", *ARGUMENTS, "--nothing"], ["serve", *ARGUMENTS, "--port=x"], ["nothing"]],
)
def test_a_mistyped_argument_is_refused_before_torch_is_imported(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_port_that_is_taken_is_refused_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", *ARGUMENTS, f"--port={port}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}" in done.stderr


def test_a_fault_of_our_own_keeps_its_traceback() -> None:
    done = run("serve", *ARGUMENTS)
    assert done.returncode == 70
    assert "Traceback" in done.stderr
    assert done.stdout == ""
