"""Processes of a sandbox are found and ended, whatever they are doing when they are looked for."""

import signal
import subprocess
from collections.abc import Iterator

import pytest

from loops_cookbook.sandboxes.local import Whose, end_processes
from loops_cookbook.sandboxes.process import exited, subprocess_of

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that a test starts; ended with it."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def sleeper(started: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    started.append(subprocess_of(["sleep", "60"]))
    return started[-1]


async def test_a_process_of_which_it_is_not_known_is_asked_again(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    """A process amid `execve` shows no environment, was taken for another's, and lived on."""
    process = sleeper(sleepers)
    answers = iter([Whose.UNKNOWN, Whose.UNKNOWN, Whose.ITS])

    def whose(pid: int) -> Whose:
        return next(answers, Whose.OTHER) if pid == process.pid else Whose.OTHER

    assert await end_processes(whose, "box")
    await exited(process)
    assert process.returncode == -signal.SIGKILL


async def test_a_process_that_came_while_the_others_were_looked_at_is_found(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    """A process that forked and ended before it was looked at left a child that nobody saw."""
    parent = sleeper(sleepers)

    def whose(pid: int) -> Whose:
        if pid == parent.pid and len(sleepers) == 1:
            parent.kill()
            sleeper(sleepers)
        is_its = len(sleepers) == 2 and pid == sleepers[1].pid
        return Whose.ITS if is_its and sleepers[1].poll() is None else Whose.OTHER

    assert await end_processes(whose, "box")
    await exited(sleepers[1])
    assert sleepers[1].returncode == -signal.SIGKILL


async def test_where_none_is_there_none_was() -> None:
    assert not await end_processes(lambda pid: Whose.OTHER, "box")
