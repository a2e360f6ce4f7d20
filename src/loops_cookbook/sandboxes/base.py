"""What a sandbox is: one contract, kept by every backend, held to it by one suite of tests.

`Sandbox` is what an Episode uses, `Backend` what makes sandboxes and finds those that a dead run
left. A failure of the agent's command is a value (`ExecResult`), a failure of a file operation an
`OSError`; only a sandbox that is not there any more raises `SandboxError`, which ends the try.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

OUTPUT_LIMIT = 1 << 20
"""Bytes that are kept of a command's stdout, and as many of its stderr."""
FILE_LIMIT = 64 << 20
"""Bytes of the largest file that `read_file` returns."""
TIMED_OUT = 124
"""Exit status of a command that its timeout cut, as of `timeout(1)`."""
NO_DIRECTORY = 125
"""Exit status of a command whose `cwd` cannot be entered."""

Command: TypeAlias = str | Sequence[str]
"""Text for a shell, or a program and its arguments."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is given; which of these a backend holds to is told in its docstring."""

    memory_mb: int = 1024
    disk_mb: int = 256
    processes: int = 256
    network: bool = False
    timeout_seconds: float = 60.0
    """How long a command or a file operation may take that says nothing else."""
    image: str = ""
    """What it is made from; the backend's own where empty."""
    cpu: float = 0.0
    """Cores; 0: all there are."""
    lifetime_seconds: float = 86_400.0
    """After which a service ends it by itself, whatever became of us."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended, and what it wrote."""

    exit_status: int
    """The command's own; 128 + n where signal n ended it; `TIMED_OUT`; `NO_DIRECTORY`; 126 and
    127 where it cannot be run or found."""
    stdout: str
    """UTF-8; bytes that are none become U+FFFD."""
    stderr: str
    timed_out: bool = False
    """Its timeout cut it; what it wrote until then is here."""
    truncated: bool = False
    """It wrote more than `OUTPUT_LIMIT` to one of the two, and the rest is gone."""


class Sandbox(Protocol):
    """A place where an agent's commands run and its files lie.

    A relative path is under `workdir`, which is writable and empty at first. Calls may overlap.
    Every method but `release` raises `SandboxError` where the sandbox cannot be used any more.
    """

    @property
    def name(self) -> str:
        """Its name in the ledger."""
        ...

    @property
    def workdir(self) -> str:
        """The folder that commands start in."""
        ...

    async def exec(
        self,
        command: Command,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as subprocess and its like call it
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command until it ends.

        stdin is empty. It returns as soon as the command's own process has ended: what that left
        in the background goes on until `stop_processes`, and what it writes later is lost. Past
        `OUTPUT_LIMIT` output is read and dropped; that never stops the command. Cancelling the
        call kills the command as its timeout does.

        Args:
            command: text is run by bash where the sandbox has it, else by sh; a sequence is run as
                it is, without a shell.
            timeout: seconds from when the command begins, `timeout_seconds` of the config by
                default. At their end the command's process group is killed; a process that left the
                group goes on.
            cwd: `workdir` by default.
            env: set beside PATH, HOME and the few that the sandbox sets; nothing else of the
                calling process's environment is there.
            user: who runs it, where the backend has several users.

        Returns:
            The result, whatever the exit status.

        Raises:
            SandboxError: the sandbox is lost, or the command could not be brought into it.
            ValueError: an argument cannot be passed, such as a NUL in the command, or a user that
                the backend does not have.
        """
        ...

    async def read_file(self, path: str) -> bytes:
        """The bytes of a file. Symbolic links are followed as inside the sandbox.

        Raises:
            OSError: as `open` and `read` would raise it inside: `FileNotFoundError`,
                `IsADirectoryError`, `PermissionError`. EINVAL: no regular file. EFBIG: more than
                `FILE_LIMIT`. Never for a fault of the machine or of the sandbox.
            SandboxError: the sandbox is lost, or did not answer in `timeout_seconds`.
        """
        ...

    async def write_file(self, path: str, content: bytes | str) -> None:
        """Make a file, or replace it, whole or not at all; folders above it are made.

        Text is written as UTF-8. What stands at the path, also a link or a pipe, is replaced and
        never written through; links above it are followed as inside the sandbox.

        Raises:
            OSError: as inside the sandbox: `IsADirectoryError`, `NotADirectoryError`,
                `PermissionError`, ENOSPC, EROFS.
            SandboxError: as in `read_file`.
        """
        ...

    async def stop_processes(self) -> None:
        """End every process in the sandbox; when it returns, none runs. Files stay.

        A command that still runs comes back as killed (137). The sandbox can be used on.
        """
        ...

    async def release(self) -> None:
        """Give the sandbox back: processes end, files are gone. Again is no error.

        Cancelling it leaves the rest to another call, or to `Backend.remove`; the sandboxes that an
        Episode has are shielded from that.

        Raises:
            SandboxError: it is not confirmed to be gone.
        """
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """A sandbox as the ledger names it, before it is made."""

    name: str
    """Unique: `loops-<run>-<number>`; lower-case letters, digits and hyphens."""
    run: str
    """The label by which a run's sandboxes are found."""
    backend: str
    place: str = ""
    """Where it will be, where the name does not tell."""
    whose: str = ""
    """The attempt it is for, for people."""


class Backend(Protocol):
    """Makes sandboxes, and finds and removes those of a run that is gone."""

    @property
    def kind(self) -> str:
        """Its name in the ledger."""
        ...

    def place(self, name: str) -> str:
        """Where a sandbox of this name will be, where the name does not tell."""
        ...

    def is_remote(self, entry: Entry) -> bool:
        """Whether any machine can end it, and not only the one that made it."""
        ...

    async def probe(self, spec: SandboxSpec) -> None:
        """Make sure that such sandboxes can be had here.

        Raises:
            SandboxUnavailable: why not, and the ways out.
        """
        ...

    async def create(self, entry: Entry, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox; nothing of it is left where this raises or is cancelled.

        A backend that cannot promise the last part says so; `remove` then finds what is left.

        Raises:
            SandboxError: it could not be made.
        """
        ...

    async def remove(self, entry: Entry) -> bool:
        """End a sandbox by its name, whoever made it; returns once it is gone.

        Returns:
            Whether there was something to end.

        Raises:
            SandboxError: it is not confirmed to be gone.
            SandboxUnavailable: nobody can be asked.
        """
        ...

    async def find(self, run: str) -> Sequence[str]:
        """The names of what is there with a run's label.

        Raises:
            SandboxError, SandboxUnavailable: nobody can be asked.
        """
        ...
