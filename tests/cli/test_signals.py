"""SIGINT, SIGTERM and SIGHUP end a command in order, SIGQUIT never, whatever the program does."""

import os
import signal
import subprocess
import sys
from types import FrameType

import pytest

from loops_cookbook.cli.signals import answering_quit


def quit_now() -> None:
    os.kill(os.getpid(), signal.SIGQUIT)


def test_quit_is_answered_with_the_frame_that_runs_each_time() -> None:
    frames: list[FrameType | None] = []
    with answering_quit(frames.append):
        quit_now()
        quit_now()
    assert [frame.f_code.co_name for frame in frames if frame] == ["quit_now"] * 2


def test_after_the_block_quit_is_what_it_was() -> None:
    before = signal.getsignal(signal.SIGQUIT)
    with answering_quit(lambda frame: None):
        assert signal.getsignal(signal.SIGQUIT) is not before
    assert signal.getsignal(signal.SIGQUIT) is before


def test_an_answer_amid_a_write_to_the_same_stream_is_left_out() -> None:
    def reentrant(frame: FrameType | None) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")

    with answering_quit(reentrant):
        quit_now()


COMMAND = """
import os, signal, anyio
from loops_cookbook.cli.exits import guarded
from loops_cookbook.cli.signals import run_until_signalled

async def work():
    os.kill(os.getpid(), signal.{name})
    try:
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.sleep({seconds})
            print("released")

@guarded
def command():
    run_until_signalled(work, waits="one is released", left="run it again for the rest")

command()
"""


@pytest.mark.parametrize(
    ("name", "status", "told", "said"),
    [
        (
            "SIGINT",
            130,
            ": one is released, at most 20 s; press Ctrl-C again to end now",
            "interrupted",
        ),
        ("SIGTERM", 143, " (SIGTERM): one is released, at most 20 s", "told to end (SIGTERM)"),
        ("SIGHUP", 129, " (SIGHUP): one is released, at most 20 s", "told to end (SIGHUP)"),
    ],
)
def test_a_command_that_is_stopped_releases_and_says_how_to_go_on(
    name: str, status: int, told: str, said: str
) -> None:
    code = COMMAND.format(name=name, seconds=0.01)
    code = code.replace(
        "\ncommand()", "\ntry:\n    command()\nexcept Exception as e: exit(e.exit_code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "released\n")
    assert done.stderr.splitlines() == [
        f"loops: stopping{told}",
        f"loops: {said}: run it again for the rest",
    ]
