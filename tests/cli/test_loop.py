"""User code cannot end the event loop of a command."""

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable

import anyio
import pytest

from loops_cookbook.cli.loop import WorkLoop
from loops_cookbook.errors import EpisodeError


def run(work: Callable[[], Awaitable[object]]) -> object:
    return anyio.run(work, backend_options={"loop_factory": WorkLoop})


async def leave() -> None:
    sys.exit(3)


def test_a_task_that_exits_ends_alone_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> str:
        tasks = [asyncio.create_task(leave()) for _ in range(2)]
        await asyncio.wait(tasks)
        with pytest.raises(SystemExit):
            await tasks[0]
        return "done"

    assert run(work) == "done"
    [told] = caplog.messages  # of two tasks that ended at one line
    assert re.match(r"SystemExit\(3\) was raised at .*test_loop.py:\d+ in leave, .* alone$", told)


def test_what_runs_in_the_same_turn_as_an_exit_runs_all_the_same() -> None:
    async def work() -> list[int]:
        seen: list[int] = []
        asyncio.create_task(leave())  # noqa: RUF006
        asyncio.get_running_loop().call_soon(seen.append, 1)
        await anyio.sleep(0.001)
        return seen

    assert run(work) == [1]


def test_the_exit_of_the_work_itself_ends_the_loop() -> None:
    with pytest.raises(SystemExit):
        run(leave)


def test_a_person_who_interrupts_ends_the_loop() -> None:
    async def interrupt() -> None:
        raise KeyboardInterrupt

    async def work() -> None:
        task = asyncio.create_task(interrupt())
        try:
            await anyio.sleep_forever()
        finally:
            assert isinstance(task.exception(), KeyboardInterrupt)

    with pytest.raises(KeyboardInterrupt):
        run(work)


def test_the_loop_is_not_stopped_by_what_it_runs() -> None:
    """`stop()` ended the run as a bug of this package, with its traceback and exit status 70."""

    async def work() -> str:
        with pytest.raises(EpisodeError, match=r"^stop\(\) of the event loop was called"):
            asyncio.get_running_loop().stop()
        return "done"

    assert run(work) == "done"


def test_what_ended_a_task_that_nobody_awaits_is_told_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise ValueError("no such\nplace")

    async def work() -> None:
        task = asyncio.create_task(fail())
        await anyio.sleep(0.001)
        del task
        gc.collect()

    run(work)
    told = [text for text in caplog.messages if "ValueError" in text]
    assert len(told) == 1
    assert re.match(
        r"ValueError\(no such place\) was raised at .*test_loop.py:\d+ in fail", told[0]
    )


def test_what_ended_a_thread_is_told_in_one_line(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread of an Episode's printed a traceback for each attempt, and the log had none of it."""

    def fail() -> None:
        raise ValueError("no such\nplace")

    async def work() -> None:
        for _ in range(2):
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()

    before = threading.excepthook
    run(work)
    [told] = [text for text in caplog.messages if "ValueError" in text]
    assert re.match(r"ValueError\(no such place\) was raised at .*test_loop.py:\d+ in fail", told)
    assert told.endswith("in a thread that user code started: it ended that thread alone")
    assert capsys.readouterr().err == ""
    assert threading.excepthook is before


def test_what_is_nobodys_is_told_as_asyncio_tells_it(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        asyncio.get_running_loop().call_exception_handler({"message": "a lost transport"})

    run(work)
    assert caplog.messages == ["a lost transport"]


FORKS = """
import asyncio
import os

import anyio

from loops_cookbook.cli.loop import WorkLoop


async def work():
    asyncio.get_running_loop().call_soon(os.write, 1, b"once ")
    pid = os.fork()
    await anyio.sleep(0.001)
    if pid == 0:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


anyio.run(work, backend_options={"loop_factory": WorkLoop})
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_ends_when_it_comes_back_to_the_loop() -> None:
    """It ran all attempts a second time, on the same connections, and never ended. Later it
    still ran what was ready, with tracebacks, and took readers from the loop of the run."""
    ended = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "once 1\n"
    assert ended.stderr.startswith("loops: a process that os.fork() made came back")
