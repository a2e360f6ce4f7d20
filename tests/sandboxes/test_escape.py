"""What bubblewrap holds against an agent that wants out, tried one way after the other."""

import os
import signal
import socket
import sys
from pathlib import Path

import anyio
import pytest
from tests.sandboxes.conftest import NEEDS_BUBBLEWRAP, Open

from loops_cookbook.sandboxes.base import Backend, Sandbox
from loops_cookbook.sandboxes.bubblewrap import Bubblewrap

pytestmark = [pytest.mark.anyio, NEEDS_BUBBLEWRAP]

PTRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(16, 1, 0, 0), os.strerror(ctypes.get_errno()))  # PTRACE_ATTACH
try:
    open("/proc/1/mem", "r+b")
except OSError as error:
    print(error.strerror)
"""


@pytest.fixture
def backend() -> Backend:
    return Bubblewrap()


async def output(sandbox: Sandbox, command: str) -> str:
    """What a command says, on either way, whatever its status."""
    result = await sandbox.exec(command)
    return (result.stdout + result.stderr).strip()


async def host_pid(word: str) -> int:
    """The process of this machine whose last argument is a word, once it is there."""
    with anyio.fail_after(10):
        while (pid := sleeper(word)) is None:  # noqa: ASYNC110 - no event tells
            await anyio.sleep(0.01)
    return pid


def sleeper(word: str) -> int | None:
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            continue
        if words[-1] == word.encode() and words[0] == b"sleep":
            return int(pid)
    return None


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


async def test_no_password_file_of_this_machine_is_there(sandbox: Sandbox) -> None:
    assert "No such file" in await output(sandbox, "cat /etc/shadow")
    assert (await output(sandbox, "cut -d: -f1 /etc/passwd")).split() == ["root", "nobody"]


async def test_nobodys_files_are_there(sandbox: Sandbox) -> None:
    here = Path(__file__)
    for path in (here, here.parents[2], Path.home(), "/root", "/home", "/var/log", "/run/user"):
        assert "No such file" in await output(sandbox, f"ls -d {path}")


async def test_links_lead_to_what_is_inside_and_nowhere_else(sandbox: Sandbox) -> None:
    """A host that opened the agent's links itself would read, and write, its own files."""
    await sandbox.exec(
        "ln -s /etc/shadow shadow; ln -s ../../../../../../etc/hostname name; "
        "ln -s /proc/1/root/etc/shadow through-proc; ln -s / top"
    )
    for link in ("shadow", "name", "top/etc/shadow", "../../../etc/shadow"):
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file(link)
    with pytest.raises((FileNotFoundError, PermissionError)):
        await sandbox.read_file("through-proc")
    with pytest.raises(OSError, match="Read-only file system"):
        await sandbox.write_file("top/etc/profile", "x")


async def test_commands_run_as_nobody_who_is_real_root_and_have_no_capability(
    sandbox: Sandbox,
) -> None:
    await sandbox.exec("sleep 5551 &")
    told = status(await host_pid("5551"))
    assert "0" not in told["Uid"].split()
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(told[name], 16) == 0
    assert told["NoNewPrivs"] == "1"
    await sandbox.stop_processes()
    await sandbox.exec("sleep 5552 &")
    again = status(await host_pid("5552"))
    assert {name: again[name] for name in ("Uid", "CapEff", "CapBnd", "NoNewPrivs")} == {
        name: told[name] for name in ("Uid", "CapEff", "CapBnd", "NoNewPrivs")
    }


async def test_the_system_cannot_be_written(sandbox: Sandbox) -> None:
    for path in ("/usr/bin/x", "/bin/sh", "/etc/passwd", "/x", "/lib64/x", "/dev/x"):
        assert "Read-only file system" in await output(sandbox, f"echo x > {path}")
    assert "x" not in await output(sandbox, "rm -rf /usr/bin/env /bin 2>/dev/null; ls /")
    assert (await sandbox.exec("python3 -c 'print(1)'")).stdout == "1\n"


async def test_the_first_process_cannot_be_traced_or_written(sandbox: Sandbox) -> None:
    """Else an agent could end its sandbox, and have the attempt discarded instead of graded."""
    await sandbox.write_file("trace.py", PTRACE)
    said = "-1 Operation not permitted\nPermission denied"
    assert await output(sandbox, "python3 trace.py") == said
    await sandbox.stop_processes()
    assert await output(sandbox, "python3 trace.py") == said


async def test_an_agent_that_kills_all_it_can_leaves_its_sandbox_usable(sandbox: Sandbox) -> None:
    for _ in range(2):
        result = await sandbox.exec("kill -9 1; kill -TERM 1; kill -9 -1; kill -9 $$")
        assert result.exit_status == 137
        assert (await sandbox.exec("echo still here")).stdout == "still here\n"
        await sandbox.stop_processes()


async def test_other_sandboxes_and_this_machines_processes_are_out_of_sight(opening: Open) -> None:
    first, second = await opening(), await opening()
    await first.exec("sleep 5553 &")
    assert "sleep 5553" not in await output(second, "ps axww -o args")
    assert await output(second, f"kill -9 {os.getpid()} || echo no") != ""
    assert "No such process" in await output(second, f"kill -0 {await host_pid('5553')}")
    assert (await output(second, "ps ax -o pid=")).split()[0] == "1"


async def test_no_capabilities_are_to_be_had_in_a_namespace_within(sandbox: Sandbox) -> None:
    for _ in range(2):
        assert (await sandbox.exec("unshare --user --map-root-user true")).exit_status != 0
        assert (await sandbox.exec("unshare --mount true")).exit_status != 0
        await sandbox.stop_processes()


async def test_a_fork_bomb_is_held_and_ended(opening: Open) -> None:
    sandbox = await opening(processes=40)
    result = await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 60", timeout=0.5)
    assert result.timed_out
    await sandbox.stop_processes()
    left = (await output(sandbox, "ps ax -o args=")).splitlines()
    assert [line for line in left if "bomb" in line and "ps ax" not in line] == []
    assert len(left) <= 4


async def test_processes_are_counted_for_each_sandbox(opening: Open) -> None:
    first, second = await opening(processes=10), await opening(processes=10)
    # dash says so at once, where bash tries again for half a minute.
    many = ["dash", "-c", "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 60 & done"]
    assert "Cannot fork" in (await first.exec(many)).stderr
    assert await output(second, "echo well | cat") == "well"


@pytest.mark.parametrize("folder", ["/work", "/tmp", "/dev/shm"])
async def test_a_folder_takes_no_more_than_its_share(opening: Open, folder: str) -> None:
    sandbox = await opening(disk_mb=2)
    filling = f"for i in 1 2 3; do head -c 1000000 /dev/zero > {folder}/$i || exit; done"
    assert "No space left on device" in await output(sandbox, filling)
    too_large = 128 + signal.SIGXFSZ
    assert (await sandbox.exec(["truncate", "-s", "3M", f"{folder}/x"])).exit_status == too_large


async def test_a_process_takes_no_more_than_its_memory(opening: Open) -> None:
    sandbox = await opening(memory_mb=100)
    hog = "python3 -c 'bytearray(200 << 20)'"
    assert "MemoryError" in await output(sandbox, hog)
    assert (await sandbox.exec("python3 -c 'bytearray(10 << 20)'")).exit_status == 0


async def test_limits_cannot_be_raised(opening: Open) -> None:
    sandbox = await opening(memory_mb=100)
    assert "not permitted" in await output(sandbox, "ulimit -d unlimited; ulimit -u 100000")


async def test_there_is_no_network_but_a_loopback_of_its_own(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "refused" in await output(sandbox, f"exec 3<>/dev/tcp/127.0.0.1/{port}")
    assert (await output(sandbox, "cat /proc/net/dev")).count(":") == 1


async def test_a_loopback_of_its_own_serves_what_the_agent_starts(sandbox: Sandbox) -> None:
    await sandbox.exec("python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &")
    fetch = "for i in $(seq 200); do exec 3<>/dev/tcp/127.0.0.1/8000 && exit 0; sleep 0.02; done"
    assert (await sandbox.exec(f"({fetch}) 2>/dev/null")).exit_status == 0


async def test_the_network_is_there_when_it_was_asked_for(opening: Open) -> None:
    sandbox = await opening(network=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (await sandbox.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port}")).exit_status == 0


async def test_a_daemon_ends_with_the_processes(sandbox: Sandbox) -> None:
    """It has left its session and its parent, and has no output that could give it away."""
    daemon = "import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
    daemon += "os.execvp('sleep', ['sleep', '5554'])"
    await sandbox.write_file("daemon.py", daemon)
    await sandbox.exec("python3 daemon.py >/dev/null 2>&1 </dev/null")
    pid = await host_pid("5554")
    await sandbox.stop_processes()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_variables_of_this_process_are_nowhere_to_be_found(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BASETEN_API_KEY", "very-secret")
    assert "very-secret" not in await output(sandbox, "cat /proc/*/environ /proc/*/cmdline; env")


OWNER = r"""
import anyio, os
from loops_cookbook.sandboxes.base import Entry, SandboxSpec
from loops_cookbook.sandboxes.bubblewrap import Bubblewrap

async def main():
    made = await Bubblewrap().create(Entry("loops-owner-1", "owner", "bubblewrap"), SandboxSpec())
    await made.exec("(setsid sleep 5555 &)")
    await made.stop_processes()
    await made.exec("(setsid sleep 5556 &)")
    os.write(1, b"ready\n")
    await anyio.sleep_forever()

anyio.run(main)
"""


async def test_everything_dies_with_the_process_that_made_it() -> None:
    async with await anyio.open_process([sys.executable, "-c", OWNER], stderr=None) as owner:
        assert owner.stdout is not None
        assert await owner.stdout.receive() == b"ready\n"
        await host_pid("5556")
        owner.send_signal(signal.SIGKILL)
    with anyio.fail_after(10):
        while sleeper("5555") or sleeper("5556"):  # noqa: ASYNC110 - no event tells
            await anyio.sleep(0.01)
