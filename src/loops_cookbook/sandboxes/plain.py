"""No isolation: a sandbox is a folder and what runs in it, as plain processes of this machine.

For agents that are trusted with all that their user may read and reach. Each process is held to the
limits of the spec; nothing else is kept from it. Where the command is root, agents run as a user
without rights. Processes are found by a variable in their environment: one that drops it is not
stopped.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import anyio.to_thread

from loops_cookbook.errors import SandboxError, SandboxUnavailable
from loops_cookbook.sandboxes.base import Entry, Sandbox, SandboxSpec
from loops_cookbook.sandboxes.local import (
    PATH,
    Whose,
    as_other_user,
    end_processes,
    environment_in,
    host_shell,
    limits,
    raise_file_limit,
)
from loops_cookbook.sandboxes.process import Bounds, Ended, run_process
from loops_cookbook.sandboxes.shell import ShellSandbox

KIND = "plain"

_MARK = "LOOPS_SANDBOX"
_KERNEL_THREAD = 0x0020_0000
"""In the flags of a process: `PF_KTHREAD` of Linux."""


class Plain:
    """Makes folders, and runs commands in them, without isolation."""

    def __init__(self) -> None:
        self._numbers = count()

    @property
    def kind(self) -> str:
        """Its name in the ledger."""
        return KIND

    def place(self, name: str) -> str:
        """The folder."""
        return str(Path(tempfile.gettempdir(), name))

    def is_remote(self, entry: Entry) -> bool:
        """Never."""
        return False

    async def probe(self, spec: SandboxSpec) -> None:
        """It needs nothing but Linux.

        Raises:
            SandboxUnavailable: this is another system.
        """
        if sys.platform != "linux":
            raise SandboxUnavailable(
                f"sandbox.backend: local sandboxes need Linux, and this is {sys.platform}; use "
                "another sandbox.backend"
            )
        raise_file_limit()

    async def create(self, entry: Entry, spec: SandboxSpec) -> Sandbox:
        """Make the folder.

        Raises:
            SandboxError: it is there already, or cannot be made.
        """
        as_user = as_other_user(next(self._numbers))
        try:
            os.mkdir(entry.place, 0o700)
            if as_user:
                user = int(as_user[1].partition("=")[2])
                os.chown(entry.place, user, user)
        except OSError as error:
            raise SandboxError(
                f"sandbox {entry.name} did not start: {entry.place}: {error.strerror}"
            ) from error
        return ShellSandbox(entry.name, spec, _Folder(self, entry, spec, as_user))

    async def remove(self, entry: Entry) -> bool:
        """End the processes that are marked as the sandbox's, and remove its folder."""
        ran = await stop(entry.name)
        return await anyio.to_thread.run_sync(_remove_folder, entry) or ran

    async def find(self, run: str) -> Sequence[str]:
        """The names of the folders in the usual place that are a run's."""
        return _folders(f"loops-{run}-*")


async def stop(name: str) -> bool:
    """End the processes that are marked as a sandbox's; whether there were some."""
    mark = f"{_MARK}={name}".encode()
    return await end_processes(lambda pid: _whose(pid, mark), name)


class _Folder:
    """The enclosure, which encloses nothing."""

    def __init__(
        self, backend: Plain, entry: Entry, spec: SandboxSpec, as_user: Sequence[str]
    ) -> None:
        self.workdir = entry.place
        self.shell = host_shell()
        self.environment: Mapping[str, str] = {
            **environment_in(entry.place),
            _MARK: entry.name,
        }
        self._backend = backend
        self._entry = entry
        self._spec = spec
        self._as_user = as_user

    async def run(self, argv: Sequence[str], bounds: Bounds, *, user: str | None) -> Ended:
        if user is not None:
            raise ValueError(f"user {user!r}: a sandbox without isolation has one user")
        program = [*self._as_user, *limits(self._spec), *argv]
        return await run_process(program, bounds, env={"PATH": PATH})

    async def stop(self) -> None:
        await stop(self._entry.name)

    async def remove(self) -> None:
        await self._backend.remove(self._entry)


def _folders(pattern: str) -> list[str]:
    return sorted(each.name for each in Path(tempfile.gettempdir()).glob(pattern) if each.is_dir())


def _remove_folder(entry: Entry) -> bool:
    """Remove the folder of a sandbox; whether there was one."""
    folder = Path(entry.place)
    # What a damaged ledger names, or somebody put there, is not ours to remove.
    if folder.name != entry.name or folder.is_symlink() or not folder.is_dir():
        return False
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        raise SandboxError(f"sandbox {entry.name}: {folder} cannot be removed; remove it")
    return True


def _whose(pid: int, mark: bytes) -> Whose:
    """Whose a process is by its environment, which is empty while it executes another program.

    Its threads share it, and each shows it until it has ended, as the first may have before others.
    """
    is_unknown = False
    for thread in _threads(pid):
        try:
            if environment := (thread / "environ").read_bytes():
                return Whose.ITS if mark in environment.split(b"\0") else Whose.OTHER
            is_unknown |= not _has_no_environment(thread)
        except PermissionError:  # another user's, as all its threads are
            break
        except OSError:  # it has ended
            continue
    return Whose.UNKNOWN if is_unknown else Whose.OTHER


def _threads(pid: int) -> Iterator[Path]:
    """Where the threads of a process are told of: that of the whole process, then each."""
    process = Path(f"/proc/{pid}")
    yield process
    with suppress(OSError):  # it has ended
        yield from (process / "task").iterdir()


def _has_no_environment(thread: Path) -> bool:
    """Whether a thread that shows none has none: it has ended, is the kernel's, or was given none.

    Source: proc_pid_stat(5); fields are counted from the state, the third.
    """
    fields = (thread / "stat").read_bytes().rpartition(b")")[2].split()
    state, flags, start, end = fields[0], int(fields[6]), int(fields[47]), int(fields[48])
    return state in b"ZX" or bool(flags & _KERNEL_THREAD) or start == end != 0
