"""Sandboxes of the service Blaxel: a small machine of its own for each, deleted at its end.

A sandbox has its name and label before it is asked for, and a lifetime after which the service
deletes it, whatever became of us. A command is started without waiting for it, since the service's
edge cuts a request that is silent for a minute, and then asked after; a script around it keeps the
first bytes of its outputs and tells them with its status. To stop the processes, all are killed
that were not there when the sandbox was new.

Holds: `memory_mb`, of the machine; `lifetime_seconds`. No network is asked of the service, as a
proxy that may go nowhere. The agent is root of its machine, and can end it.
"""

import base64
import binascii
import secrets
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import anyio
import anyio.lowlevel

from loops_cookbook.errors import SandboxError
from loops_cookbook.sandboxes import blaxel_sdk as api
from loops_cookbook.sandboxes.base import Entry, Sandbox, SandboxSpec
from loops_cookbook.sandboxes.process import Bounds, Ended
from loops_cookbook.sandboxes.shell import ENTERED, ShellSandbox

KIND = "blaxel"
WORKDIR = "/work"

_KILLED = 137
_CREATE_SECONDS = 120.0
_REMOVE_SECONDS = 60.0
_END_SECONDS = 10.0
_POLL_MILLISECONDS = 200
_BLOCK_BYTES = 512
"""What a shell counts the size of a file in."""
_PAUSES = (0.2, 1.0)
"""Before a command is started again that was perhaps never begun."""
# Each output goes through a pipe, whose reader keeps the first bytes, at once, and drops the
# others: `head` would keep none before it has all. The readers of a command that left something
# behind do not end: then what came to rest is all.
_RUN = """
d=$1 blocks=$2; shift 2
keep() { (ulimit -c 0; ulimit -f "$blocks"; exec cat >"$d/$1"); cat >/dev/null; : >"$d/$1.end"; }
umask 077
mkdir -p "$d" && mkfifo "$d/o" "$d/e" || exit 1
[ -e "$d/in" ] || : >"$d/in"
keep out <"$d/o" 2>/dev/null &
keep err <"$d/e" 2>/dev/null &
umask 022
exec 3>&2 2>/dev/null
"$@" <"$d/in" >"$d/o" 2>"$d/e" 3>&-
status=$?
size() { wc -c <"$d/$1" | tr -d ' '; }
before=
until [ -e "$d/out.end" ] && [ -e "$d/err.end" ]; do
  sleep 0.05
  now=$(size out),$(size err)
  [ "$now" = "$before" ] && break
  before=$now
done
o=$(size out) e=$(size err)
echo "$status $o $e"
if [ $((o + e)) -le 24000 ] && command -v base64 >/dev/null; then
  base64 <"$d/out"; echo .; base64 <"$d/err"; echo .
  rm -rf "$d"
fi
"""
_READY = (
    "mkdir -p /work /tmp && chmod 1777 /tmp; "
    'if [ -x /bin/bash ]; then echo bash; else echo sh; fi; echo "$PATH"; '
    "for p in /proc/[0-9]*; do echo ${p#/proc/}; done"
)
# A thread of the kernel has no program, and one that has ended has none any more: of a process, the
# first may have ended while others go on.
_STOP = """
spared=" $1 $$ $PPID "
tries=0
while [ $tries -lt 100 ]; do
  left=
  for p in /proc/[0-9]*; do
    p=${p#/proc/}
    case $spared in *" $p "*) continue;; esac
    for program in "/proc/$p/task/"*/exe; do
      [ -e "$program" ] || continue
      left=1
      kill -9 "$p" 2>/dev/null
      break
    done
  done
  [ -z "$left" ] && exit 0
  tries=$((tries + 1))
  sleep 0.05
done
exit 1
"""


class Blaxel:
    """Makes sandboxes of the service."""

    @property
    def kind(self) -> str:
        """Its name in the ledger."""
        return KIND

    def place(self, name: str) -> str:
        """The workspace."""
        return api.workspace()

    def is_remote(self, entry: Entry) -> bool:
        """Always."""
        return True

    async def probe(self, spec: SandboxSpec) -> None:
        """Ask the service something that costs nothing.

        Raises:
            MissingExtra: its SDK is not installed.
            SandboxUnavailable: it does not answer, or not with this key.
        """
        api.require_sdk()
        await api.ask_for_nothing()

    async def create(self, entry: Entry, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox; one whose maker is cancelled is deleted.

        Raises:
            SandboxError: it does not come up.
        """
        if len(entry.name) > api.NAME_LIMIT:
            raise SandboxError(
                f"sandbox {entry.name}: its name has {len(entry.name)} characters, and blaxel "
                f"takes {api.NAME_LIMIT}; shorten the name of the run's folder"
            )
        # Whether it was made is known only when the service has answered.
        with (
            api.answered(f"sandbox {entry.name}"),
            anyio.fail_after(_CREATE_SECONDS, shield=True),
        ):
            instance = await api.made(entry, spec)
        machine = _Machine(self, entry, instance)
        try:
            await anyio.lowlevel.checkpoint()
            await machine.make_ready()
        except BaseException:
            with anyio.move_on_after(_REMOVE_SECONDS, shield=True), suppress(SandboxError):
                await machine.remove()
            raise
        return ShellSandbox(entry.name, spec, machine)

    async def remove(self, entry: Entry) -> bool:
        """Delete a sandbox by its name, if it is the run's."""
        here = api.workspace()
        if entry.place not in ("", here):
            raise SandboxError(
                f"sandbox {entry.name} is in workspace {entry.place!r}, and this command reaches "
                f"{here!r}: set {api.WORKSPACE} as the run had it"
            )
        instance = await api.found(entry.name)
        if instance is None:
            return False
        if api.labels_of(instance).get(api.RUN_LABEL) != entry.run:
            raise SandboxError(f"sandbox {entry.name} is not of run {entry.run}: it stays")
        await api.delete(entry.name)
        return True

    async def find(self, run: str) -> Sequence[str]:
        """The names of the sandboxes with a run's label."""
        return await api.named(run)


class _Machine:
    """The enclosure."""

    def __init__(self, backend: Blaxel, entry: Entry, instance: Any) -> None:
        self.workdir = WORKDIR
        self.shell = "/bin/sh"
        self.environment: Mapping[str, str] = {
            "HOME": WORKDIR,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
        }
        self._backend = backend
        self._entry = entry
        self._instance = instance
        self._numbers = count()
        self._first_processes = ""

    async def make_ready(self) -> None:
        """Make the folder of the agent, and see what there is before it."""
        process = await self._carried_out(_READY)
        shell, path, *numbers = str(process.stdout or "").splitlines() or [""]
        if process.exit_code != 0 or not numbers:
            raise self._fault(f"it did not start: {process.stderr or process.status}")
        self.shell = f"/bin/{shell}"
        self.environment = {**self.environment, "PATH": path}
        self._first_processes = " ".join(numbers)

    async def run(self, argv: Sequence[str], bounds: Bounds, *, user: str | None) -> Ended:
        if user not in (None, "root", "0"):
            raise ValueError(f"user {user!r}: a sandbox of blaxel has one user, root")
        command = _Command(self._instance, self._name_of_next(), bounds)
        with self._answered():
            return await command.carry_out(argv)

    async def stop(self) -> None:
        stopping = shlex.join(["/bin/sh", "-c", _STOP, "sh", self._first_processes])
        process = await self._carried_out(stopping)
        if process.exit_code != 0:
            raise self._fault("its processes cannot be killed")

    async def remove(self) -> None:
        try:
            await self._backend.remove(self._entry)
        finally:
            await api.close(self._instance)

    async def _carried_out(self, command: str) -> Any:
        """Run a short command of ours."""
        name = self._name_of_next()
        with self._answered(), anyio.fail_after(api.CALL_SECONDS):
            await begin(self._instance, name, command)
            return await self._instance.process.wait(
                name, max_wait=int(api.CALL_SECONDS * 1000), interval=_POLL_MILLISECONDS
            )

    def _name_of_next(self) -> str:
        return f"loops-{next(self._numbers)}-{secrets.token_hex(4)}"

    def _answered(self) -> api.answered:
        return api.answered(f"sandbox {self._entry.name} is lost")

    def _fault(self, what: str) -> SandboxError:
        return SandboxError(f"sandbox {self._entry.name}: {what}")


async def begin(instance: Any, name: str, command: str) -> None:
    """Start a command and do not wait for it; once, also where the answer is lost."""
    wanted = {"name": name, "command": command, "working_dir": "/", "wait_for_completion": False}
    for pause in (*_PAUSES, None):
        try:
            await instance.process.exec(wanted)
            return
        except Exception as error:
            if pause is None or not api.is_passing(error):
                raise
            with suppress(Exception):
                # `get` of the SDK would leave a connection open each time.
                await instance.process.logs(name)
                return  # it was begun
        await anyio.sleep(pause)


class _Command:
    """One command, from its first byte until it has ended."""

    def __init__(self, instance: Any, name: str, bounds: Bounds) -> None:
        self._process = instance.process
        self._files = instance.fs
        self._instance = instance
        self._name = name
        self._bounds = bounds
        self._folder = f"/tmp/.{name}"

    async def carry_out(self, argv: Sequence[str]) -> Ended:
        blocks = str(self._bounds.output // _BLOCK_BYTES + 1)
        command = shlex.join(["/bin/sh", "-c", _RUN, "sh", self._folder, blocks, *argv])
        seconds = self._bounds.first_byte_seconds
        if self._bounds.stdin:
            with anyio.fail_after(seconds):
                await self._files.write_binary(f"{self._folder}/in", self._bounds.stdin)
        # Whether it was begun is known only when there is an answer.
        with anyio.fail_after(seconds, shield=True):
            await begin(self._instance, self._name, command)
        is_over = False
        try:
            process = await self._ended()
            is_over = process is not None
        finally:
            if not is_over:
                await self._kill()
        return await self._told(process)

    async def _ended(self) -> Any | None:
        """The process when it has ended, or None when its time is up."""
        milliseconds = max(1, int(self._bounds.seconds * 1000))
        try:
            return await self._process.wait(
                self._name, max_wait=milliseconds, interval=_POLL_MILLISECONDS
            )
        except TimeoutError:
            return None

    async def _kill(self) -> None:
        """Kill it with its process group; what is killed already is no fault."""
        with anyio.move_on_after(_END_SECONDS, shield=True), suppress(Exception):
            await self._process.kill(self._name)
            await self._process.wait(self._name, max_wait=5000, interval=50)

    async def _told(self, process: Any | None) -> Ended:
        """The outputs, from the script's word or else from the files that it keeps."""
        said = str((process and process.stdout) or "")
        first, _, rest = said.partition("\n")
        numbers = first.split()
        if process is None or len(numbers) != 3:
            outputs = [await self._file(name) for name in ("out", "err")]
            # It was begun, if only just: it is the time that is up, and not the way in.
            outputs[0] = outputs[0] or (ENTERED if process is None else b"")
            status = 124 if process is None else _KILLED
        else:
            status = int(numbers[0])
            outputs = _decoded(rest) or [await self._file(name) for name in ("out", "err")]
        limit = self._bounds.output
        return Ended(
            status=status,
            stdout=outputs[0][:limit],
            stderr=outputs[1][:limit],
            timed_out=process is None,
            truncated=any(len(output) > limit for output in outputs),
        )

    async def _file(self, name: str) -> bytes:
        """A file of the script; the second is the last, and all are removed with it."""
        try:
            content = bytes(await self._files.read_binary(f"{self._folder}/{name}"))
        except Exception as error:
            if api.status_of(error) not in (404, 422):
                raise
            content = b""
        if name == "err":
            with suppress(Exception):  # they are of no use, and in nobody's way
                await self._files.rm(self._folder, recursive=True)
        return content


def _decoded(told: str) -> list[bytes] | None:
    """Both outputs, where the script told them."""
    parts = told.split(".\n")
    if len(parts) != 3:
        return None
    try:
        return [base64.b64decode(part) for part in parts[:2]]
    except binascii.Error:
        return None
