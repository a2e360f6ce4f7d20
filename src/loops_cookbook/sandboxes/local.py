"""What the two kinds of local sandboxes have in common: users, limits, finding what is left."""

import os
import resource
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path

import anyio

from loops_cookbook.errors import SandboxError
from loops_cookbook.sandboxes.base import SandboxSpec

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_FIRST_USER = 65_000
_USERS = 500
"""Users that distributions leave alone; each sandbox that root makes gets the next of them."""
_FILES = 4096
"""Files that a process may have open."""
_END_SECONDS = 10.0
_STEP_SECONDS = 0.02
_LISTS = 10
"""In one pass, at most: some machine may start processes without end."""


def as_other_user(number: int) -> list[str]:
    """What lets a program run as nobody in particular, where this process is root."""
    if os.geteuid() != 0:
        return []
    user = _FIRST_USER + number % _USERS
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]


def limits(spec: SandboxSpec) -> list[str]:
    """What holds a program, and all that it starts, to a spec."""
    wanted = {
        "data": (resource.RLIMIT_DATA, spec.memory_mb << 20),
        "fsize": (resource.RLIMIT_FSIZE, spec.disk_mb << 20),
        "nproc": (resource.RLIMIT_NPROC, spec.processes),
        "nofile": (resource.RLIMIT_NOFILE, _FILES),
        "core": (resource.RLIMIT_CORE, 0),
    }
    words = [f"--{name}={_allowed(number, most)}" for name, (number, most) in wanted.items()]
    return ["prlimit", *words, "--"]


def raise_file_limit() -> None:
    """Let this process open as many files as it may: each sandbox takes some."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _allowed(number: int, wanted: int) -> int:
    """A limit can be lowered only."""
    _, most = resource.getrlimit(number)
    return wanted if most == resource.RLIM_INFINITY else min(wanted, most)


def environment_in(home: str) -> Mapping[str, str]:
    """What every command finds set."""
    return {
        "PATH": PATH,
        "HOME": home,
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        # As root, tar would try to give files to the users that an archive names.
        "TAR_OPTIONS": "--no-same-owner",
    }


def host_shell() -> str:
    """bash where this machine has it, else sh."""
    return "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"


class Whose(Enum):
    """Whether a process belongs to a sandbox."""

    ITS = "its"
    OTHER = "other"
    UNKNOWN = "unknown"
    """It is amid `execve`, when a process has neither an environment nor arguments to show."""


async def end_processes(whose: Callable[[int], Whose], name: str) -> bool:
    """Kill every process of a sandbox until none is left, nor one that may be.

    Returns:
        Whether there was one.

    Raises:
        SandboxError: some are left.
    """
    killed, unknown = _kill(whose)
    was_there = bool(killed)
    with anyio.move_on_after(_END_SECONDS, shield=True):
        while killed or unknown:  # they are not our children, so there is nothing to wait on
            await anyio.sleep(_STEP_SECONDS)
            killed, unknown = _kill(whose)
            was_there |= bool(killed)
    if killed:
        raise SandboxError(f"sandbox {name} did not end: processes {killed} cannot be killed")
    return was_there


def every_process() -> list[int]:
    """The processes of this machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _kill(whose: Callable[[int], Whose]) -> tuple[list[int], list[int]]:
    """Kill what is the sandbox's; those, and those of which it is not known."""
    found: dict[int, Whose] = {}
    # A process may fork and end between being listed and being asked: its child is in a later list.
    for _ in range(_LISTS):
        if not (new := [pid for pid in every_process() if pid not in found]):
            break
        for pid in new:
            found[pid] = whose(pid)
            if found[pid] is Whose.ITS:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
    killed = [pid for pid, owner in found.items() if owner is Whose.ITS]
    return killed, [pid for pid, owner in found.items() if owner is Whose.UNKNOWN]
