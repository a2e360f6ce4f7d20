"""Cleaning up after runs: what they left is released, what lives is left alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from tests.sandboxes.doubles import MemoryBackend

from loops_cookbook.errors import RunFolderError, RunIsAlive, UsageError
from loops_cookbook.recipes import cleanup
from loops_cookbook.recipes.cleanup import clean, clean_up_before, run_folders
from loops_cookbook.records import RunRow
from loops_cookbook.rundir.layout import RunFolder, locked, new_run_folder
from loops_cookbook.rundir.write import RunWriter
from loops_cookbook.sandboxes import blaxel_sdk
from loops_cookbook.sandboxes import ledger as ledgers
from loops_cookbook.sandboxes.base import Entry
from loops_cookbook.sandboxes.ledger import Ledger, open_entries
from loops_cookbook.sandboxes.plain import Plain

SECONDS = f"7{os.getpid()}"
OWNER = """
import sys, anyio
from pathlib import Path
from loops_cookbook.config.sandbox import SandboxTable
from loops_cookbook.recipes.sandboxes import sandboxes_of
from loops_cookbook.rundir.layout import RunFolder, locked
from loops_cookbook.sandboxes.ledger import Ledger

async def main(folder):
    table = SandboxTable(backend="local", isolation="none", network=True)
    with locked(folder, claims=True), Ledger(folder.sandboxes) as ledger:
        async with sandboxes_of(table, folder.root.name, ledger=ledger) as opening:
            for _ in range(2):
                made = await opening.open("task a", {})
                await made.exec(f"touch left; (setsid sleep {sys.argv[2]} >/dev/null 2>&1 &)")
            print("ready", flush=True)
            sys.stdin.read()

anyio.run(main, RunFolder(Path(sys.argv[1])))
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return new_run_folder("runs/x", tmp_path)


@pytest.fixture
def owner(folder: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds two sandboxes of a run."""
    command = [sys.executable, "-c", OWNER, str(folder.root), SECONDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 20
        while sleepers() < 2 and time.monotonic() < deadline:
            time.sleep(0.01)  # a shell goes on before its child is what it will be
        yield process
        process.kill()
    anyio.run(clean, folder.root)


def places(folder: RunFolder) -> list[Path]:
    return [Path(Plain().place(f"loops-{folder.root.name}-{number}")) for number in (1, 2)]


def sleepers() -> int:
    """How many processes of this machine sleep for the seconds of this test session."""
    found = 0
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            found += Path(f"/proc/{pid}/cmdline").read_bytes() == f"sleep\0{SECONDS}\0".encode()
    return found


def test_what_a_killed_run_left_is_released_and_again_there_is_nothing_to_do(
    folder: RunFolder, owner: subprocess.Popen[bytes]
) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    names = [place.name for place in places(folder)]
    assert all((place / "left").exists() for place in places(folder))
    assert sleepers() == 2

    told = anyio.run(lambda: clean(folder.root, dry_run=True))
    assert told.held == names
    assert sleepers() == 2

    assert anyio.run(clean, folder.root).released == names
    assert not any(place.exists() for place in places(folder))
    assert sleepers() == 0
    assert open_entries(folder.sandboxes) == ()
    assert anyio.run(clean, folder.root).lines == []


def test_a_run_that_goes_on_releases_what_it_left_itself(
    folder: RunFolder, owner: subprocess.Popen[bytes]
) -> None:
    """It stayed as long as the run went on, for `loops cleanup` leaves a living run alone."""
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    with locked(folder):
        cleaned = anyio.run(clean_up_before, folder)
    assert cleaned.released == [place.name for place in places(folder)]
    assert sleepers() == 0


def test_a_run_that_lives_is_left_alone(folder: RunFolder, owner: subprocess.Popen[bytes]) -> None:
    cleaned = anyio.run(clean, folder.root)
    assert f"being written by process {owner.pid}" in cleaned.alive
    assert cleaned.released == []
    assert sleepers() == 2
    owner.communicate(b"")
    assert owner.returncode == 0
    assert sleepers() == 0
    assert anyio.run(clean, folder.root).lines == []


@pytest.mark.parametrize("name", ["a copy", None])
def test_a_copy_of_a_run_that_lives_is_left_alone_until_that_run_is_over(
    folder: RunFolder, owner: subprocess.Popen[bytes], tmp_path: Path, name: str | None
) -> None:
    """The copy's lock was free, so cleaning it, or going on with it, ended what the run was using:
    by the rows of its ledger, and of a copy of the same name by the label too."""
    copy = tmp_path / "copies" / (name or folder.root.name)
    shutil.copytree(folder.root, copy)
    for _ in range(2):  # the first look must not make the copy a run of its own
        cleaned = anyio.run(clean, copy)
        assert cleaned.released == []
        assert f"is a copy of {folder.root}, which is being written by process {owner.pid}" in (
            cleaned.alive
        )
    with pytest.raises(RunIsAlive), RunWriter(RunFolder(copy)):
        pass
    assert sleepers() == 2

    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert anyio.run(clean, copy).released == [place.name for place in places(folder)]


def test_at_a_service_a_copy_from_another_machine_ends_nothing_unless_it_is_named(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that are brought from a GPU machine to be read took its sandboxes along."""
    service = Remote("far")
    monkeypatch.setattr(cleanup, "KINDS", {"far": lambda: service})
    entry = Entry("loops-x-1", folder.root.name, "far")
    unrecorded = Entry("loops-x-2", folder.root.name, "far")
    service.there |= {entry.name: entry, unrecorded.name: unrecorded}
    with monkeypatch.context() as there:
        there.setattr("socket.gethostname", lambda: "gpu")
        with locked(folder, claims=True), Ledger(folder.sandboxes) as ledger:
            ledger.opens(entry)
    copy = tmp_path / "copy" / folder.root.name
    shutil.copytree(folder.root, copy)
    # What bears the label here may be the run's own, on a machine whose name has changed.
    stray = Path(Plain().place(f"loops-{folder.root.name}-9"))
    monkeypatch.setitem(cleanup.KINDS, "plain", Plain)
    stray.mkdir()
    for dry_run in (True, False):
        cleaned = anyio.run(lambda dry_run=dry_run: clean(copy, dry_run=dry_run))
        assert "copied from gpu, and may go on there" in cleaned.left[0]
        assert cleaned.released == cleaned.held == []
    assert stray.exists()
    cleaned = anyio.run(lambda: clean(copy, is_named=True))
    assert cleaned.released == ["loops-x-1", "loops-x-2", stray.name]
    # The folder itself, as on a disk that both machines see, has the lock that they share.
    assert anyio.run(clean, folder.root).gone == ["loops-x-1"]


def test_a_copy_that_is_gone_on_with_ends_nothing_of_the_run_on_the_other_machine(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--resume` of a copy ended the sandboxes that the run was using where it had been copied."""
    service = Remote("far")
    monkeypatch.setattr(cleanup, "KINDS", {"far": lambda: service})
    theirs, later, own = (Entry(f"loops-x-{n}", folder.root.name, "far") for n in (1, 2, 3))
    service.there |= {entry.name: entry for entry in (theirs, later, own)}
    with monkeypatch.context() as there:
        there.setattr("socket.gethostname", lambda: "gpu")
        with locked(folder, claims=True), Ledger(folder.sandboxes) as ledger:
            ledger.opens(theirs)
    copy = RunFolder(tmp_path / "copy" / folder.root.name)
    shutil.copytree(folder.root, copy.root)

    with locked(copy, claims=True):
        cleaned = anyio.run(clean_up_before, copy)
        assert "loops-x-1: its run was copied from gpu, and may go on there" in cleaned.left[0]
        with Ledger(copy.sandboxes) as ledger:
            ledger.opens(own)  # and then this machine is switched off
    with locked(copy, claims=True):
        cleaned = anyio.run(clean_up_before, copy)
    assert (cleaned.released, len(cleaned.left)) == (["loops-x-3"], 1)
    assert anyio.run(clean, copy.root).released == []
    assert set(service.there) == {"loops-x-1", "loops-x-2"}
    assert anyio.run(lambda: clean(copy.root, is_named=True)).released == ["loops-x-1", "loops-x-2"]


class Remote(MemoryBackend):
    """A backend that is reached from anywhere."""

    def is_remote(self, entry: Entry) -> bool:
        return True


def test_what_bears_the_label_and_is_in_no_row_is_released(folder: RunFolder) -> None:
    """A ledger on a disk that was lost says nothing of it."""
    folder.sandboxes.touch()
    stray = Path(Plain().place(f"loops-{folder.root.name}-9"))
    others = Path(Plain().place("loops-another-run-9"))
    stray.mkdir()
    others.mkdir()
    try:
        assert anyio.run(clean, folder.root).released == [stray.name]
        assert not stray.exists()
        assert others.exists()
    finally:
        others.rmdir()


def test_what_is_gone_already_is_closed(folder: RunFolder) -> None:
    with Ledger(folder.sandboxes) as ledger:
        ledger.opens(Entry("loops-x-1", folder.root.name, "bubblewrap"))
    assert anyio.run(clean, folder.root).gone == ["loops-x-1"]
    assert open_entries(folder.sandboxes) == ()


def test_what_is_on_another_machine_or_of_an_unknown_kind_is_told_and_kept(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(folder.sandboxes) as ledger:
        ledger.opens(Entry("loops-x-1", folder.root.name, "zeppelin"))
    here = ledgers.Owner.this_process()
    there = replace(here, host="elsewhere")
    monkeypatch.setattr(ledgers.Owner, "this_process", classmethod(lambda cls: there))
    with Ledger(folder.sandboxes) as ledger:
        ledger.opens(Entry("loops-x-2", folder.root.name, "plain", "/tmp/loops-x-2"))
    monkeypatch.undo()
    unknown, elsewhere = anyio.run(clean, folder.root).left
    assert "knows no backend 'zeppelin'" in unknown
    assert f"it is on elsewhere, and this is {here.host}" in elsewhere
    assert len(open_entries(folder.sandboxes)) == 2


def test_a_folder_that_a_ledger_should_not_name_is_not_removed(
    folder: RunFolder, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    with Ledger(folder.sandboxes) as ledger:
        ledger.opens(Entry("loops-x-1", folder.root.name, "plain", str(precious)))
    assert anyio.run(clean, folder.root).gone == ["loops-x-1"]
    assert precious.exists()


def test_a_damaged_ledger_is_told(folder: RunFolder) -> None:
    folder.sandboxes.write_text('{"event": "?"}\n')
    with pytest.raises(RunFolderError, match=r"sandboxes\.jsonl:1"):
        anyio.run(clean, folder.root)


def with_ledger(tmp_path: Path, output_dir: str) -> Path:
    folder = new_run_folder(output_dir, tmp_path)
    folder.sandboxes.touch()
    return folder.root


def test_without_a_target_every_run_is_meant(tmp_path: Path) -> None:
    first, second = with_ledger(tmp_path, "runs/a"), with_ledger(tmp_path, "runs/b/c")
    with_ledger(tmp_path, "elsewhere")
    new_run_folder("runs/a", tmp_path)
    assert set(run_folders([], tmp_path)) == {first, second}


def test_a_target_is_a_run_or_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = with_ledger(tmp_path, "runs/a"), with_ledger(tmp_path, "runs/b")
    config = '[model]\nname = "m"\n[episode]\nclass = "e:E"\ntasks = "t"\n'
    Path("train.toml").write_text(f'recipe = "rl"\n{config}[output]\noutput_dir = "runs/b"\n')
    assert run_folders(["train.toml"], tmp_path) == [second]
    assert run_folders([str(first), str(first)], tmp_path) == [first]
    with pytest.raises(UsageError, match="holds runs and is none"):
        run_folders(["runs"], tmp_path)


def test_a_run_without_sandboxes_has_nothing_to_release(tmp_path: Path) -> None:
    folder = new_run_folder("runs", tmp_path)
    folder.run.touch()
    assert run_folders([str(folder.root)], tmp_path) == [folder.root]
    assert anyio.run(clean, folder.root).lines == []
    assert not folder.sandboxes.exists()


def test_an_engine_that_cannot_be_asked_leaves_what_the_ledger_holds(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with Ledger(folder.sandboxes) as ledger:
        ledger.opens(Entry("loops-x-1", folder.root.name, "docker", "docker at unix:///x.sock"))
    cleaned = anyio.run(clean, folder.root)
    (left,) = cleaned.left
    assert left.startswith("loops-x-1: sandbox.backend: there is no container engine here")
    with Ledger(folder.sandboxes) as ledger:
        ledger.released(open_entries(folder.sandboxes)[0].entry)
    cleaned = anyio.run(clean, folder.root)
    assert cleaned.left == []
    assert "no container engine here" in cleaned.unasked[0]


def test_a_hosted_run_is_named_with_how_it_ends(folder: RunFolder) -> None:
    service = {"run_id": "run_7", "mode": "dedicated", "deployment_id": "dep_9"}
    row = RunRow(
        run=folder.root.name,
        started_at=0.0,
        recipe="rl",
        scope="dedicated",
        model="m",
        updates=1,
        attempts_per_update=2,
        tasks={},
        service=service,
        versions={},
        config_path="train.toml",
        config={},
    )
    folder.run.write_text(json.dumps(row.to_json()))
    (line,) = anyio.run(clean, folder.root).lines
    assert "hosted run run_7 (dedicated, deployment dep_9): nothing to release" in line
    assert "when they have been idle" in line
    folder.run.write_text(json.dumps(replace(row, service={"device": "cpu"}).to_json()))
    assert anyio.run(clean, folder.root).lines == []


def test_a_service_that_cannot_be_asked_leaves_what_the_ledger_holds(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a workspace the SDK once ended the command with a traceback."""
    monkeypatch.delenv("BL_WORKSPACE", raising=False)
    monkeypatch.setattr(blaxel_sdk, "find_spec", lambda name: None)
    with Ledger(folder.sandboxes) as ledger:
        ledger.opens(Entry("loops-x-1", folder.root.name, "blaxel", "mine"))
    cleaned = anyio.run(clean, folder.root)
    (left,) = cleaned.left
    assert 'uv add "loops-cookbook[blaxel]"' in left
    assert len(open_entries(folder.sandboxes)) == 1
