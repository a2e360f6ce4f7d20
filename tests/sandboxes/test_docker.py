"""Containers: what holds an agent in them, against an engine that really runs."""

import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from tests.sandboxes import image
from tests.sandboxes.conftest import Open, entry, spec_for

from loops_cookbook.errors import SandboxError, SandboxUnavailable
from loops_cookbook.recipes.cleanup import clean
from loops_cookbook.rundir.layout import new_run_folder
from loops_cookbook.sandboxes.base import Backend, Entry, Sandbox
from loops_cookbook.sandboxes.docker import Docker
from loops_cookbook.sandboxes.engine import Engine, engine_here

OWNER = """
import sys, anyio
from pathlib import Path
from loops_cookbook.config.sandbox import SandboxTable
from loops_cookbook.recipes.sandboxes import sandboxes_of
from loops_cookbook.rundir.layout import RunFolder, locked
from loops_cookbook.sandboxes.ledger import Ledger

async def main(folder):
    table = SandboxTable(backend="docker", image=sys.argv[2])
    with locked(folder), Ledger(folder.sandboxes) as ledger:
        async with sandboxes_of(table, folder.root.name, ledger=ledger) as opening:
            await opening.open("task a", {})
            print("ready", flush=True)
            sys.stdin.read()

anyio.run(main, RunFolder(Path(sys.argv[1])))
"""

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.slow]


@pytest.fixture
def backend(docker_image: None) -> Backend:
    return Docker()


@pytest.fixture
def engine(docker_image: None) -> Engine:
    return engine_here()


async def output(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(command, timeout=30)
    return f"{result.stdout}{result.stderr}".strip()


async def test_a_command_has_no_power(sandbox: Sandbox) -> None:
    told = await output(
        sandbox, "grep -E '^(Cap(Prm|Eff|Bnd)|NoNewPrivs)' /proc/self/status; id -u"
    )
    zero = "0000000000000000"
    assert re.findall(r"\S+$", told, re.MULTILINE) == [zero, zero, zero, "1", "0"]


async def test_the_first_process_cannot_be_ended_from_inside(sandbox: Sandbox) -> None:
    told = await output(sandbox, "kill -9 1; kill -TERM 1; kill -9 -1; true")
    assert "not permitted" in told.lower()
    assert await output(sandbox, "echo still here") == "still here"


async def test_the_system_is_read_only_and_what_is_written_is_in_two_folders(
    sandbox: Sandbox,
) -> None:
    told = await output(sandbox, "echo '#!/bin/sh' > /bin/ls; rm /bin/cat; touch /tmp/a /work/b")
    assert told.count("Read-only file system") == 2
    assert await output(sandbox, "ls /tmp /work") == "/tmp:\na\n\n/work:\nb"


async def test_there_is_no_network_unless_asked_for(opening: Open) -> None:
    sandbox = await opening()
    assert await output(sandbox, "cat /proc/net/dev | grep -c :") == "1"


async def test_a_hog_is_ended_and_its_sandbox_is_not(opening: Open) -> None:
    sandbox = await opening(memory_mb=32, disk_mb=256)
    hog = await sandbox.exec("head -c 100000000 /dev/zero | sort | wc -c", timeout=60)
    assert hog.stdout.strip() != "100000000"
    assert await output(sandbox, "echo still here") == "still here"


async def test_an_agent_without_room_for_a_command_has_no_lost_sandbox(opening: Open) -> None:
    """As a lost one, the attempt would be tried again: a way out of a bad one.

    The room may end with the command (126) or with what it starts, which its shell tells (2).
    """
    sandbox = await opening(processes=24)
    one_more = ["/bin/sh", "-c", "sleep 4441 >/dev/null 2>&1 & exit 7"]
    statuses = [(await sandbox.exec(one_more, timeout=10)).exit_status for _ in range(30)]
    assert statuses[0] == 7
    assert statuses[-1] in (2, 126)
    assert set(statuses) <= {2, 7, 126}
    await sandbox.stop_processes()
    assert await output(sandbox, "ps axo args | grep -c '[ ]4441$'") == "0"


async def test_a_command_may_run_as_another_user_of_the_image(sandbox: Sandbox) -> None:
    made = await sandbox.exec("id -u; touch mine", user="app")
    assert made.stdout == "1000\n"
    assert (await sandbox.exec("sleep 60", user="app", timeout=0.5)).timed_out
    assert await output(sandbox, "ps axo args | grep -c '[ ]60$'") == "0"


async def test_what_the_image_sets_is_set(sandbox: Sandbox) -> None:
    assert await output(sandbox, "echo $FROM_IMAGE $HOME") == "yes /work"


async def test_a_link_leads_to_what_is_inside(sandbox: Sandbox) -> None:
    await sandbox.exec("ln -s /etc/passwd link; ln -s /etc above")
    assert b"app:x:1000" in await sandbox.read_file("link")
    with pytest.raises(OSError, match=r"Read-only|denied"):
        await sandbox.write_file("above/passwd", "")
    await sandbox.write_file("link", "mine")
    assert "app" in await output(sandbox, "cat /etc/passwd")


async def test_a_container_that_was_ended_from_outside_is_lost(
    sandbox: Sandbox, engine: Engine
) -> None:
    async def end() -> None:
        await anyio.sleep(0.5)
        await engine.call("kill", sandbox.name)

    async with anyio.create_task_group() as group:
        group.start_soon(end)
        with pytest.raises(SandboxError, match="is lost"):
            await sandbox.exec("sleep 60")
    with pytest.raises(SandboxError, match="cannot be entered"):
        await sandbox.exec("true")


async def test_a_container_is_labelled_and_its_volumes_go_with_it(
    sandbox: Sandbox, run: str, engine: Engine
) -> None:
    labels = '{{index .Config.Labels "loops-run"}} {{index .Config.Labels "loops-sandbox"}}'
    told = await engine.call("container", "inspect", "--format", labels, sandbox.name)
    assert told.stdout.decode().split() == [run, sandbox.name]
    mounts = "{{range .Mounts}}{{.Name}} {{end}}"
    told = await engine.call("container", "inspect", "--format", mounts, sandbox.name)
    volumes = told.stdout.decode().split()
    assert len(volumes) == 2
    await sandbox.release()
    for volume in volumes:
        assert (await engine.call("volume", "inspect", volume)).status != 0


async def test_a_container_of_the_same_name_that_is_none_of_ours_stays(
    backend: Backend, run: str, engine: Engine
) -> None:
    theirs = entry(backend, run)
    made = await engine.call("create", "--name", theirs.name, spec_for(backend).image, "true")
    assert made.status == 0
    try:
        assert not await backend.remove(theirs)
        with pytest.raises(SandboxError, match="did not start"):
            await backend.create(theirs, spec_for(backend))
        assert (await engine.call("container", "inspect", theirs.name)).status == 0
    finally:
        await engine.call("rm", "--force", theirs.name)


async def test_a_sandbox_of_another_engine_is_not_called_gone(backend: Backend) -> None:
    elsewhere = Entry("loops-x-1", "x", "docker", "docker at tcp://elsewhere:2376")
    with pytest.raises(SandboxError, match=r"is in docker at tcp://elsewhere.*set DOCKER_HOST"):
        await backend.remove(elsewhere)
    assert backend.is_remote(elsewhere)


async def test_an_image_that_is_nowhere_is_refused_before_a_run(backend: Backend) -> None:
    with pytest.raises(SandboxUnavailable, match="'localhost/no-such-image' cannot be pulled"):
        await backend.probe(spec_for(backend, image="localhost/no-such-image"))


async def test_what_a_killed_run_left_is_released_and_a_living_one_is_left_alone(
    backend: Backend, tmp_path: Path
) -> None:
    folder = new_run_folder("runs", tmp_path)
    argv = [sys.executable, "-c", OWNER, str(folder.root), image.NAME]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:  # noqa: ASYNC220
        assert owner.stdout
        assert owner.stdout.readline() == b"ready\n"
        assert (await clean(folder.root)).alive
        owner.kill()
    (name,) = await backend.find(folder.root.name)
    stray = entry(backend, folder.root.name, 7)  # of a row that was lost
    await backend.create(stray, spec_for(backend))
    other = await backend.create(entry(backend, f"{folder.root.name}0"), spec_for(backend))
    try:
        assert (await clean(folder.root, dry_run=True)).held == [name, stray.name]
        assert (await clean(folder.root)).released == [name, stray.name]
        assert (await clean(folder.root)).lines == []
        assert (await other.exec("true")).exit_status == 0
    finally:
        await other.release()
