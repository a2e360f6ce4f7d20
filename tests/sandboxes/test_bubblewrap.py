"""Sandboxes of bubblewrap in bad times: lost, cut off while they change, made by somebody else."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from tests.sandboxes.conftest import NEEDS_BUBBLEWRAP, Open, entry

from loops_cookbook.errors import SandboxError, SandboxUnavailable
from loops_cookbook.sandboxes import bubblewrap
from loops_cookbook.sandboxes.base import Backend, Entry, Sandbox, SandboxSpec
from loops_cookbook.sandboxes.bubblewrap import KIND, Bubblewrap

pytestmark = [pytest.mark.anyio, NEEDS_BUBBLEWRAP]


@pytest.fixture
def backend() -> Backend:
    return Bubblewrap()


def first_processes(name: str) -> list[int]:
    """What starts a sandbox, and its pid 1."""
    ending = f"loops-sandbox={name}\0".encode()
    found: list[int] = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(ending):
                found.append(int(pid))
        except OSError:
            continue
    return found


def pid_1(name: str) -> int:
    """The first process within, by its number out here.

    Its own child looks like it until it has become `sleep`, and was taken for it by its number.
    """
    (pid,) = (
        pid
        for pid in first_processes(name)
        if Path(f"/proc/{pid}/status").read_text().split("NSpid:")[1].split("\n")[0].split()[1:]
        == ["1"]
    )
    return pid


async def test_a_sandbox_that_was_ended_from_outside_is_lost(sandbox: Sandbox) -> None:
    os.kill(pid_1(sandbox.name), signal.SIGKILL)
    while first_processes(sandbox.name):  # noqa: ASYNC110 - no event tells
        await anyio.sleep(0.01)
    for use in (sandbox.exec("true"), sandbox.read_file("x"), sandbox.stop_processes()):
        with pytest.raises(SandboxError, match="is lost"):
            await use
    await sandbox.release()


async def test_a_command_in_a_sandbox_that_is_lost_meanwhile_is_no_result(sandbox: Sandbox) -> None:
    """Its status 137 would look like the agent's doing."""

    async def end() -> None:
        while not (await sandbox.exec("ls")).stdout:  # noqa: ASYNC110 - no event tells
            await anyio.sleep(0.01)
        os.kill(pid_1(sandbox.name), signal.SIGKILL)

    async with anyio.create_task_group() as group:
        group.start_soon(end)
        with pytest.raises(SandboxError, match=r"is lost|cannot be entered"):
            await sandbox.exec("touch begun; exec sleep 60")


async def test_a_stop_that_is_cancelled_leaves_a_sandbox_that_can_be_used(sandbox: Sandbox) -> None:
    for delay in (0.0, 0.01, 0.03):
        with anyio.move_on_after(delay):
            await sandbox.stop_processes()
        assert (await sandbox.exec("echo well")).stdout == "well\n"
        await sandbox.stop_processes()


async def test_a_release_during_a_stop_leaves_nothing(
    backend: Backend, run: str, sandbox: Sandbox
) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(sandbox.stop_processes)
        await anyio.sleep(0.005)
        await sandbox.release()
    assert await backend.find(run) == []


async def test_a_start_that_is_cancelled_halfway_leaves_nothing(backend: Backend, run: str) -> None:
    """In a session of its own, pid 1 outlived a starter that was killed at the wrong moment."""
    for number, delay in enumerate((0.001, 0.004, 0.006, 0.008, 0.01, 0.02, 0.03)):
        with anyio.move_on_after(delay):
            made = await backend.create(entry(backend, run, number), SandboxSpec())
            with anyio.CancelScope(shield=True):
                await made.release()
    with anyio.fail_after(10):
        while await backend.find(run):  # noqa: ASYNC110 - the kernel ends them after their starter
            await anyio.sleep(0.01)


async def test_a_start_that_takes_too_long_is_ended_and_told(
    opening: Open, backend: Backend, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bubblewrap, "_START_SECONDS", 0.0)
    with pytest.raises(SandboxError, match=r"not ready within 0 s.*lower concurrency\.sampling"):
        await opening()
    with anyio.fail_after(10):
        while await backend.find(run):  # noqa: ASYNC110 - the kernel ends them after their starter
            await anyio.sleep(0.01)


async def test_what_bubblewrap_says_is_told(opening: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "WORKDIR", "/usr/is/read-only")
    with pytest.raises(SandboxError, match=r"did not start: bwrap: "):
        await opening()


async def test_another_system_is_told(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="need Linux, and this is darwin"):
        await backend.probe(SandboxSpec())


BY_ANOTHER_USER = """
import os, sys
sys.path[:0] = sys.argv[1:]
import anyio
from loops_cookbook.sandboxes.base import Entry, SandboxSpec
from loops_cookbook.sandboxes.bubblewrap import Bubblewrap

async def main():
    backend = Bubblewrap()
    await backend.probe(SandboxSpec())
    made = await backend.create(Entry("loops-user-1", "user", backend.kind), SandboxSpec())
    await made.write_file("a", "1")
    await made.exec("sleep 6662 &")
    await made.stop_processes()
    looking = "cat a; ps ax -o args= | grep -c '[6]662'; grep CapEff /proc/self/status"
    left = await made.exec(looking)
    await made.release()
    print(os.getuid(), left.stdout.split(), await backend.find("user"))

anyio.run(main)
"""
ANOTHER_USER = ["setpriv", "--reuid=64001", "--regid=64001", "--clear-groups", "--"]
SYSTEM_PYTHON = "/usr/bin/python3"


def test_a_user_without_any_rights_can_have_them() -> None:
    """As root this suite tests root; most people are not."""
    paths = [
        str(Path(each.__file__ or "").parents[1]) for each in (anyio, sys.modules["loops_cookbook"])
    ]
    command = [*ANOTHER_USER, SYSTEM_PYTHON, "-B", "-c", BY_ANOTHER_USER, *paths]
    can = [*ANOTHER_USER, SYSTEM_PYTHON, "-B", "-c", "import sys; sys.path[:0] = sys.argv[1:]\n"]
    can[-1] += "import anyio, pydantic, loops_cookbook"
    if os.geteuid() != 0 or not shutil.which(SYSTEM_PYTHON):
        pytest.skip("needs root, to become another user")
    if subprocess.run([*can, *paths], capture_output=True, cwd="/", check=False).returncode:
        pytest.skip("another user cannot import this package")
    said = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert said.stdout == "64001 ['10', 'CapEff:', '0000000000000000'] []\n", said.stderr


def test_its_name_in_the_ledger_is_its_own() -> None:
    backend = Bubblewrap()
    assert (backend.kind, backend.place("loops-x-1")) == (KIND, "")
    assert Entry("a", "b", KIND).place == ""
