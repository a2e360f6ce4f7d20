"""What user code left running holds no command whose work is done."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import anyio
import pytest

from loops_cookbook.cli.departure import run_to_its_end
from loops_cookbook.errors import ServiceUnavailable
from loops_cookbook.records import RunStatus


class Ended:
    """In the place of the end of the process, it lets what is left end."""

    def __init__(self) -> None:
        self.told: list[tuple[RunStatus, list[str]]] = []
        self.is_over = threading.Event()

    def __call__(self, status: RunStatus, why: Sequence[str]) -> None:
        self.told.append((status, list(why)))
        self.is_over.set()

    async def stay(self) -> None:
        while not self.is_over.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("error", [None, ServiceUnavailable("away"), KeyboardInterrupt()], ids=repr)
def test_a_task_that_ignores_cancellation_does_not_hold_the_end(
    error: BaseException | None,
) -> None:
    """A run was done, its table was printed, and the command never ended."""
    end, tasks = Ended(), list[asyncio.Task[None]]()

    async def work() -> None:
        tasks.extend(asyncio.create_task(end.stay()) for _ in range(2))
        await anyio.sleep(0.01)
        if error is not None:
            raise error

    with suppress(ServiceUnavailable, KeyboardInterrupt):
        run_to_its_end(work, end, seconds=0.05)
    ((status, why),) = end.told
    assert status == {None: "done", "away": "failed"}.get(error and str(error), "interrupted")
    assert why[:-1] == (["away"] if status == "failed" else [])
    assert why[-1].startswith("ended without waiting for what user code left: a task at ")
    assert why[-1].endswith("in stay (2 times)")


def test_a_loop_that_ends_by_itself_ends_no_process() -> None:
    end = Ended()
    run_to_its_end(anyio.lowlevel.checkpoint, end, seconds=60)
    assert end.told == []
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


@pytest.mark.parametrize("is_daemon", [False, True])
def test_a_thread_does_not_hold_the_interpreter(is_daemon: bool) -> None:
    code = (
        "import threading, time\n"
        "from loops_cookbook.cli.departure import leave_threads\n"
        f"threading.Thread(target=time.sleep, args=(60,), daemon={is_daemon}).start()\n"
        "leave_threads(3, seconds=0.01)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == (0 if is_daemon else 3)
    assert ("left: a thread at " in done.stderr) is not is_daemon
