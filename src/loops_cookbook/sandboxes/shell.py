"""The contract of a sandbox over anything that can run a program inside.

Files are read and written by programs that run inside too, so that links, owners and limits mean
there what they mean to the agent, and no link leads out. Each program begins by writing one byte
to stdout: without it the program was never in the sandbox, and what went wrong is not the agent's
doing but the sandbox's.
"""

import errno
import os
import posixpath
import signal
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol

from loops_cookbook.errors import SandboxError
from loops_cookbook.problems import one_line
from loops_cookbook.sandboxes.base import (
    FILE_LIMIT,
    OUTPUT_LIMIT,
    TIMED_OUT,
    Command,
    ExecResult,
    SandboxSpec,
)
from loops_cookbook.sandboxes.process import Bounds, Ended

ENTERED = b"."
"""What a program writes first, once it is inside."""

_ENTER = 'printf .; cd -- "$1" || exit 125; shift; exec env -i -- "$@"'
_NOT_REGULAR = 64
_READ = (
    'if [ -e "$1" ] && ! [ -f "$1" ] && ! [ -d "$1" ]; then exit 64; fi; '
    f'exec head -c {FILE_LIMIT + 1} -- "$1"'
)
_WRITE = """
if [ -d "$1" ]; then echo "$1: Is a directory" >&2; exit 1; fi
above=${1%/*}
mkdir -p -- "${above:-/}" || exit 1
new=$(mktemp -- "$1.XXXXXX") || exit 1
cat >"$new" && chmod 644 -- "$new" && mv -f -- "$new" "$1" && exit 0
rm -f -- "$new"
exit 1
"""
_TOLD_BY_TEXT = (
    *(errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOSPC),
    *(errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG, errno.ELOOP, errno.EDQUOT, errno.EPERM),
)


class Enclosure(Protocol):
    """What a program can be run in."""

    @property
    def workdir(self) -> str:
        """The folder that commands start in."""
        ...

    @property
    def shell(self) -> str:
        """The shell that runs a command's text."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """What every command finds set."""
        ...

    async def run(self, argv: Sequence[str], bounds: Bounds, *, user: str | None) -> Ended:
        """Run a program inside until it ends.

        Raises:
            SandboxError: the sandbox is lost.
            ValueError: there is no such user.
        """
        ...

    async def stop(self) -> None:
        """End every process inside; files stay."""
        ...

    async def remove(self) -> None:
        """End it, files and all."""
        ...


class ShellSandbox:
    """A sandbox whose every operation is a program that runs inside."""

    def __init__(self, name: str, spec: SandboxSpec, enclosure: Enclosure) -> None:
        self._name = name
        self._spec = spec
        self._enclosure = enclosure
        self._is_released = False

    @property
    def name(self) -> str:
        """Its name in the ledger."""
        return self._name

    @property
    def workdir(self) -> str:
        """The folder that commands start in."""
        return self._enclosure.workdir

    async def exec(
        self,
        command: Command,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the contract
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command until it ends."""
        program = [self._enclosure.shell, "-c", command] if isinstance(command, str) else command
        if not program:
            raise ValueError("command is empty; name a program")
        seconds = self._spec.timeout_seconds if timeout is None else timeout
        bounds = Bounds(seconds, OUTPUT_LIMIT + len(ENTERED))
        argv = _entering(
            program, self._path(cwd or "."), {**self._enclosure.environment, **(env or {})}
        )
        ended = await self._run(argv, bounds, user=user)
        return ExecResult(
            exit_status=TIMED_OUT if ended.timed_out else ended.status,
            stdout=ended.stdout.decode(errors="replace"),
            stderr=ended.stderr[:OUTPUT_LIMIT].decode(errors="replace"),
            timed_out=ended.timed_out,
            truncated=ended.truncated,
        )

    async def read_file(self, path: str) -> bytes:
        """The bytes of a file."""
        ended = await self._script(_READ, path, Bounds(self._spec.timeout_seconds, FILE_LIMIT + 2))
        if len(ended.stdout) > FILE_LIMIT:
            raise OSError(errno.EFBIG, f"more than {FILE_LIMIT} bytes", path)
        return ended.stdout

    async def write_file(self, path: str, content: bytes | str) -> None:
        """Make a file, or replace it, whole or not at all."""
        given = content.encode() if isinstance(content, str) else content
        bounds = Bounds(self._spec.timeout_seconds, OUTPUT_LIMIT, given)
        await self._script(_WRITE, path, bounds)

    async def stop_processes(self) -> None:
        """End every process inside; files stay."""
        self._check_open()
        await self._enclosure.stop()

    async def release(self) -> None:
        """Give it back: processes end, files are gone."""
        self._is_released = True
        await self._enclosure.remove()

    def _path(self, path: str) -> str:
        """The absolute path; what is in it, links and `..` included, is for the inside to say."""
        return posixpath.join(self.workdir, path)

    def _check_open(self) -> None:
        if self._is_released:
            raise SandboxError(f"sandbox {self._name} was released: open another one")

    async def _script(self, script: str, path: str, bounds: Bounds) -> Ended:
        environment = {**self._enclosure.environment, "LC_ALL": "C"}
        program = ["/bin/sh", "-c", script, "sh", self._path(path)]
        ended = await self._run(_entering(program, "/", environment), bounds)
        if ended.timed_out:
            # No process of an agent's can hold it up for so long.
            late = f"{path!r} took more than {bounds.seconds:g} s"
            raise SandboxError(f"sandbox {self._name} does not answer: {late}")
        if ended.status == _NOT_REGULAR:
            raise OSError(errno.EINVAL, "Not a regular file", path)
        if ended.status != 0:
            _raise_os_error(ended, path)
        return ended

    async def _run(self, argv: Sequence[str], bounds: Bounds, *, user: str | None = None) -> Ended:
        self._check_open()
        if any("\0" in word for word in argv):
            raise ValueError("a command, path or variable has a NUL byte, which none can have")
        try:
            ended = await self._enclosure.run(argv, bounds, user=user)
        except OSError as error:  # of this machine, such as too many open files: not of a file
            raise SandboxError(f"sandbox {self._name} cannot be entered: {error}") from error
        if not ended.stdout.startswith(ENTERED):
            why = one_line(ended.stderr.decode(errors="replace")) or f"status {ended.status}"
            if ended.timed_out:
                why = f"not within {bounds.first_byte_seconds:g} s; this machine is overloaded"
            raise SandboxError(f"sandbox {self._name} cannot be entered: {why}")
        return Ended(
            status=ended.status,
            stdout=ended.stdout[len(ENTERED) :],
            stderr=ended.stderr,
            timed_out=ended.timed_out,
            truncated=ended.truncated,
        )


def _entering(program: Sequence[str], cwd: str, env: Mapping[str, str]) -> list[str]:
    wrong = [name for name in env if not name or "=" in name]
    if wrong:
        raise ValueError(f"{wrong[0]!r} cannot be the name of an environment variable")
    variables = [f"{name}={value}" for name, value in env.items()]
    return ["/bin/sh", "-c", _ENTER, "sh", cwd, *variables, *program]


def _raise_os_error(ended: Ended, path: str) -> NoReturn:
    """What a program said of a file, as the error that Python has for it."""
    said = one_line(ended.stderr.decode(errors="replace"))
    if said.endswith(signal.strsignal(signal.SIGXFSZ) or ""):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    for number in _TOLD_BY_TEXT:
        if said.endswith(os.strerror(number)):
            # A file stands where mkdir would make a folder.
            number = errno.ENOTDIR if number == errno.EEXIST else number
            raise OSError(number, os.strerror(number), path)
    raise OSError(errno.EIO, said or f"failed with status {ended.status}", path)
