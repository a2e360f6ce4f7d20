"""Sandboxes of bubblewrap: namespaces of this machine, without privilege.

A sandbox is a *generation* of processes in namespaces of their own: pid 1 does nothing but reap,
and every command enters beside it, with no capability, as a user that is not real root. The files
lie in memory, in the mount namespace. To stop the processes, the next generation enters that mount
namespace with a new pid namespace, and the old pid 1 is killed, which ends all of its namespace;
the kernel tells when it has. Everything dies with the process that made it, and leaves nothing.

Holds: the system is read-only, and of `/etc` only what programs need is there; `disk_mb` for each
of `/work`, `/tmp` and `/dev/shm`; `memory_mb` of private memory for each process; `processes`; no
network but loopback unless asked; no user namespaces within. It does not hold a sum of memory,
time on the CPU, or the number of files. `docs/guide/sandboxes.md` says what follows.
"""

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

import anyio

from loops_cookbook.errors import SandboxError, SandboxUnavailable
from loops_cookbook.problems import one_line
from loops_cookbook.sandboxes.base import Entry, Sandbox, SandboxSpec
from loops_cookbook.sandboxes.local import (
    PATH,
    Whose,
    as_other_user,
    end_processes,
    environment_in,
    every_process,
    host_shell,
    limits,
    raise_file_limit,
)
from loops_cookbook.sandboxes.process import (
    Bounds,
    Ended,
    exited,
    has_ended,
    run_process,
    subprocess_of,
)
from loops_cookbook.sandboxes.shell import ShellSandbox

KIND = "bubblewrap"
WORKDIR = "/work"

_START_SECONDS = 30.0
_END_SECONDS = 10.0
_KILLED = 128 + signal.SIGKILL
_WAYS_OUT = (
    'use sandbox.isolation = "none" for agents that you trust with this machine\'s files, or '
    "another sandbox.backend"
)
_INIT = (
    # No namespaces within: with the capabilities that they give, much more of the kernel is in
    # reach. Where the kernel does not let it be set, that stays so.
    "echo 0 2>/dev/null >/proc/sys/user/max_user_namespaces; "
    "printf .; exec >/dev/null 2>&1; while :; do sleep 2147483647; done"
)
_LABEL = "loops-sandbox="
# Of no use outside the namespace. pid 1 has it and commands have not: so they may not trace it.
_KEPT = "sys_resource"
_FILES = {
    "/etc/passwd": f"root:x:0:0:root:{WORKDIR}:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
}
_SHOWN_OF_ETC = (
    *("alternatives", "ca-certificates", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime"),
    *("mime.types", "nsswitch.conf", "pki", "protocols", "python3", "services", "ssl"),
)


class Bubblewrap:
    """Makes sandboxes of bubblewrap on this machine."""

    def __init__(self) -> None:
        self._numbers = count()

    @property
    def kind(self) -> str:
        """Its name in the ledger."""
        return KIND

    def place(self, name: str) -> str:
        """Nowhere but in memory."""
        return ""

    def is_remote(self, entry: Entry) -> bool:
        """Never."""
        return False

    async def probe(self, spec: SandboxSpec) -> None:
        """Make one sandbox and run a command in it.

        Raises:
            SandboxUnavailable: why that cannot be, and the ways out.
        """
        if why := cannot_be_had():
            raise SandboxUnavailable(why)
        raise_file_limit()
        try:
            sandbox = await self.create(Entry("loops-probe", "probe", KIND), spec)
            try:
                await sandbox.exec("true")
            finally:
                with anyio.CancelScope(shield=True):
                    await sandbox.release()
        except SandboxError as error:
            raise SandboxUnavailable(
                f"sandbox.backend: bubblewrap makes no sandbox here ({error}): the system may "
                "forbid user namespaces (see sysctl user.max_user_namespaces, "
                "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns); "
                f"allow them, or {_WAYS_OUT}"
            ) from error

    async def create(self, entry: Entry, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox; one whose maker is cancelled is ended.

        Raises:
            SandboxError: it does not come up.
        """
        enclosure = _Namespaces(entry.name, spec, as_other_user(next(self._numbers)))
        await enclosure.start()
        return ShellSandbox(entry.name, spec, enclosure)

    async def remove(self, entry: Entry) -> bool:
        """End what is left of a sandbox; its files go with its processes."""

        def whose(pid: int) -> Whose:
            return Whose.ITS if _label_of(pid) == entry.name else Whose.OTHER

        return await end_processes(whose, entry.name)

    async def find(self, run: str) -> Sequence[str]:
        """The names of the sandboxes that a run's processes say they are."""
        names = {_label_of(pid) for pid in every_process()}
        return sorted(name for name in names if name and name.startswith(f"loops-{run}-"))


def cannot_be_had() -> str | None:
    """Why bubblewrap cannot be had here, as far as that is known without trying."""
    if sys.platform != "linux":
        return (
            f"sandbox.backend: local sandboxes need Linux, and this is {sys.platform}; {_WAYS_OUT}"
        )
    if shutil.which("bwrap") is None:
        return (
            "sandbox.backend: bubblewrap is not installed (no bwrap on PATH): install the package "
            f"bubblewrap with your system's package manager, or {_WAYS_OUT}"
        )
    return None


class _Namespaces:
    """The enclosure: a generation of processes, and those that follow it."""

    def __init__(self, name: str, spec: SandboxSpec, as_user: Sequence[str]) -> None:
        self.workdir = WORKDIR
        self.shell = host_shell()
        self.environment: Mapping[str, str] = environment_in(WORKDIR)
        self._name = name
        self._spec = spec
        self._as_user = as_user
        self._generation: _Generation | None = None
        self._changing = anyio.Lock()

    async def start(self) -> None:
        with ExitStack() as opened:
            fds = {path: opened.enter_context(_content(text)) for path, text in _FILES.items()}
            argv = [*self._as_user, *_bwrap(self._spec, fds)]
            self._generation = await _Generation.start(argv, self._name, pass_fds=[*fds.values()])

    async def run(self, argv: Sequence[str], bounds: Bounds, *, user: str | None) -> Ended:
        if user not in (None, "root", "0"):
            raise ValueError(f"user {user!r}: a local sandbox has one user, called root there")
        generation = self._alive()
        ended = await self._entered(generation, argv, bounds)
        if ended.status == _KILLED and generation is self._generation:
            # By the agent, or by the end of pid 1, which the kernel makes known only later, but
            # before which it lets nobody in any more.
            again = await self._entered(generation, ["true"], Bounds(_START_SECONDS, 0))
            if again.status != 0 and generation is self._generation:
                raise self._lost()
        return ended

    async def _entered(
        self, generation: "_Generation", argv: Sequence[str], bounds: Bounds
    ) -> Ended:
        entering = [*self._as_user, *generation.entering(), *_POWERLESS, *limits(self._spec)]
        return await run_process([*entering, *argv], bounds, env={"PATH": PATH})

    async def stop(self) -> None:
        async with self._changing:
            before = self._alive()
            argv = [*self._as_user, *before.joining(), *_NEW_PROCESSES]
            self._generation = await _Generation.start(argv, self._name)
            await before.end()

    async def remove(self) -> None:
        async with self._changing:
            if self._generation is not None:
                await self._generation.end()

    def _alive(self) -> "_Generation":
        if self._generation is None or self._generation.has_ended:
            raise self._lost()
        return self._generation

    def _lost(self) -> SandboxError:
        return SandboxError(
            f"sandbox {self._name} is lost: its first process was ended from outside, perhaps for "
            "want of memory"
        )


class _Generation:
    """A pid namespace: what started it, and its pid 1."""

    def __init__(self, name: str, starter: subprocess.Popen[bytes], pid: int) -> None:
        self._name = name
        self._starter = starter
        self._pid = pid
        # A program is in this machine's network already where the sandbox is, and may not enter it.
        is_shared = os.path.samefile(f"/proc/{pid}/ns/net", "/proc/self/ns/net")
        self._network = [] if is_shared else ["-n"]
        self._pidfd: int | None = os.pidfd_open(pid)

    @classmethod
    async def start(
        cls, argv: Sequence[str], name: str, *, pass_fds: Sequence[int] = ()
    ) -> "_Generation":
        """Start pid 1 by `argv` and wait until it says that all is ready."""
        try:
            return await cls._started(argv, name, pass_fds)
        except TimeoutError as error:
            raise SandboxError(
                f"sandbox {name} was not ready within {_START_SECONDS:g} s: this machine is "
                "overloaded; lower concurrency.sampling"
            ) from error
        except OSError as error:
            raise SandboxError(f"sandbox {name} did not start: {error}") from error

    @classmethod
    async def _started(
        cls, argv: Sequence[str], name: str, pass_fds: Sequence[int]
    ) -> "_Generation":
        ours, theirs = socket.socketpair()
        with ours, tempfile.TemporaryFile() as said:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            with theirs:
                starter = subprocess_of(
                    [*argv, "/bin/sh", "-c", _INIT, f"{_LABEL}{name}"],
                    stdout=theirs.fileno(),
                    stderr=said.fileno(),
                    env={"PATH": PATH},
                    pass_fds=pass_fds,
                )
            try:
                with anyio.fail_after(_START_SECONDS):
                    await anyio.wait_readable(ours)
                pid = _sender(ours)
                if pid is not None:
                    return cls(name, starter, pid)
            except BaseException:
                await _abandon(starter)
                raise
            await _abandon(starter)
            said.seek(0)
            why = one_line(said.read(10_000).decode(errors="replace"))
        raise SandboxError(f"sandbox {name} did not start: {why or 'it said nothing'}")

    @property
    def has_ended(self) -> bool:
        return self._pidfd is None or has_ended(self._pidfd)

    def joining(self) -> list[str]:
        """What puts a program into the namespaces, but for that of processes."""
        kinds = ["-U", "-m", "-i", "-u", *self._network]
        return ["nsenter", f"--target={self._pid}", *kinds, "--preserve-credentials"]

    def entering(self) -> list[str]:
        """What puts a program beside pid 1."""
        return [*self.joining(), "--pid"]

    async def end(self) -> None:
        """Kill pid 1; when this returns, nothing runs in its namespace."""
        if self._pidfd is None:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with anyio.move_on_after(_END_SECONDS, shield=True) as clock:
            await anyio.wait_readable(self._pidfd)
            await exited(self._starter)
        if clock.cancelled_caught:
            raise SandboxError(f"sandbox {self._name} did not end within {_END_SECONDS:g} s")
        os.close(self._pidfd)
        self._pidfd = None


def _bwrap(spec: SandboxSpec, fds: Mapping[str, int]) -> list[str]:
    size = ["--size", str(spec.disk_mb << 20), "--tmpfs"]
    # Its session is new already. In one more, pid 1 would not be killed with its starter's group.
    argv = ["bwrap", "--unshare-all", "--die-with-parent", "--as-pid-1"]
    argv += ["--share-net"] if spec.network else []
    # Another uid would take a second user namespace, which nothing could enter any more.
    argv += ["--uid", "0", "--gid", "0", "--hostname", "sandbox"]
    argv += ["--cap-drop", "ALL", "--cap-add", f"CAP_{_KEPT.upper()}"]
    argv += _system()
    argv += ["--proc", "/proc", "--dev", "/dev", *size, "/dev/shm", "--remount-ro", "/dev"]
    argv += [*size, WORKDIR, *size, "/tmp", "--dir", "/run", "--symlink", "../tmp", "/var/tmp"]
    for path, fd in fds.items():
        argv += ["--perms", "0644", "--file", str(fd), path]
    for name in (*_SHOWN_OF_ETC, *(["resolv.conf"] if spec.network else [])):
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return [*argv, "--remount-ro", "/", "--chdir", WORKDIR]


def _system() -> Iterator[str]:
    """The programs and libraries of this machine, read-only."""
    yield from ("--ro-bind", "/usr", "/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))


_POWERLESS = (
    *("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"),
    *("--no-new-privs", "--"),
)
_NEW_PROCESSES = (
    # Told to die with its parent only here: entering a user namespace would make it forget.
    *("setpriv", "--pdeathsig=KILL", "--"),
    *("unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"),
    *("setpriv", f"--bounding-set=-all,+{_KEPT}", "--inh-caps=-all", "--no-new-privs", "--"),
)


class _content:
    """A pipe that holds a text, for a program to read; its number."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> int:
        self._reader, writer = os.pipe()
        os.write(writer, self._text.encode())
        os.close(writer)
        return self._reader

    def __exit__(self, *exc: object) -> None:
        os.close(self._reader)


def _sender(receiver: socket.socket) -> int | None:
    """The process that said it is ready, under its number out here; None where it ended."""
    said, told, _, _ = receiver.recvmsg(1, socket.CMSG_SPACE(struct.calcsize("iii")))
    for level, kind, data in told:
        if said and (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid, _, _ = struct.unpack("iii", data)
            return pid
    return None


async def _abandon(starter: subprocess.Popen[bytes]) -> None:
    """End what did not come up; pid 1, where there is one already, dies with it."""
    if starter.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(starter.pid, signal.SIGKILL)
    with anyio.move_on_after(_END_SECONDS, shield=True):
        await exited(starter)


def _label_of(pid: int) -> str | None:
    """The name of the sandbox that a process is pid 1 of, or the starter of."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return None
    last = words[-1].decode(errors="replace")
    is_ours = len(words) > 2 and words[-2] == _INIT.encode() and last.startswith(_LABEL)
    return last.removeprefix(_LABEL) if is_ours else None
