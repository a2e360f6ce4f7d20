"""Sandboxes that are containers, of Docker or Podman.

A sandbox is one container whose pid 1 does nothing but reap. It runs as a user of its own, so that
no command of an agent, which has no capability, can end or trace it. What can be written is two
volumes, `/work` and `/tmp`; the image is read-only, so that what a grader runs of it is what it
brought. To stop the processes the engine restarts the container, which ends all that was in it and
keeps the volumes.

A command is a process that the engine starts beside pid 1. The engine does not end it when its
client goes, so it tells its number first, and is ended by that. It closes both outputs with an
ending, since an engine may wait for whoever else has them open.

Holds: `memory_mb`, `processes` and `cpu` for all of the container; `disk_mb` for one file; no
network unless asked; no capabilities, no setuid. It does not hold the sum of what is written.
"""

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import anyio
import anyio.lowlevel

from loops_cookbook.errors import SandboxError, SandboxUnavailable
from loops_cookbook.problems import one_line
from loops_cookbook.sandboxes.base import Entry, Sandbox, SandboxSpec
from loops_cookbook.sandboxes.engine import (
    Engine,
    engine_here,
    is_address_of_another_machine,
    said,
)
from loops_cookbook.sandboxes.local import PATH
from loops_cookbook.sandboxes.process import Bounds, Ended, Messenger
from loops_cookbook.sandboxes.shell import ENTERED, ShellSandbox

logger = logging.getLogger(__name__)

KIND = "docker"
WORKDIR = "/work"
RUN_LABEL, NAME_LABEL = "loops-run", "loops-sandbox"

_PULL_SECONDS = 1800.0
_REMOVE_SECONDS = 30.0
_STEP_SECONDS = 0.1
_KEEPER = "65533:65533"
"""Who pid 1 is; no image has such a user, and no command becomes it."""
_INIT = """
trap '' HUP INT QUIT TERM USR1 USR2 ALRM
chmod 0777 /work /tmp 2>/dev/null
sleep 0 || exit 1
while :; do sleep 2147483647; done
"""
# In one engine a new volume belongs to root, in another to pid 1.
_READY = "chmod 0777 /work /tmp 2>/dev/null; if [ -x /bin/bash ]; then echo bash; else echo sh; fi"
# Its own stderr is shut, or a shell would tell there which signal ended the command. The size of a
# file is a matter of the command's shell, since an engine may not be let to set any such limit.
_RUN = """
echo $$
ulimit -c 0
ulimit -f $1
shift
exec 3>&2 2>/dev/null
"$@" 2>&3 3>&-
end=$0$?.
printf %s "$end"
printf %s "$end" >&3
"""
_BLOCK_BYTES = 512
"""What a shell counts the size of a file in."""
_NUMBER_BYTES = 16
_NO_ROOM = 126
_NO_ROOM_WORDS = ("resource temporarily unavailable", "cannot allocate memory", "read init-p")
"""What engines say of a container that has no room for a process; the last when it dies at once."""
_KILLED = 137


@dataclass(frozen=True, slots=True)
class _Image:
    """What an image says of the commands in it."""

    user: str
    environment: Mapping[str, str]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        variables = (each.partition("=") for each in config.get("Env") or ())
        return cls(config.get("User") or "0", {name: value for name, _, value in variables})


class Docker:
    """Makes containers."""

    def __init__(self) -> None:
        self._images: dict[str, _Image] = {}
        self._looking = anyio.Lock()
        self._told: set[str] = set()

    @property
    def kind(self) -> str:
        """Its name in the ledger."""
        return KIND

    @cached_property
    def engine(self) -> Engine:
        """What makes them.

        Raises:
            SandboxUnavailable: no engine answers.
        """
        return engine_here()

    def place(self, name: str) -> str:
        """Which engine."""
        return self.engine.place

    def is_remote(self, entry: Entry) -> bool:
        """Whether its engine is reached by the same address from everywhere."""
        return is_address_of_another_machine(entry.place)

    async def probe(self, spec: SandboxSpec) -> None:
        """Make one sandbox and run a command in it; pulls the image where it is not there.

        Raises:
            SandboxUnavailable: why that cannot be, and the ways out.
        """
        entry = Entry(f"loops-probe-{secrets.token_hex(4)}", "probe", KIND, self.engine.place)
        try:
            sandbox = await self.create(entry, spec)
            try:
                await sandbox.exec("true")
            finally:
                with anyio.CancelScope(shield=True):
                    await sandbox.release()
        except SandboxError as error:
            raise SandboxUnavailable(
                f"sandbox.backend: {self.engine.program} makes no sandbox of the image "
                f"{spec.image!r} here ({error}): mend that, or use another image or backend; an "
                "image needs sh, and the usual programs such as env, cat and mktemp"
            ) from error

    async def create(self, entry: Entry, spec: SandboxSpec) -> Sandbox:
        """Make a sandbox; one whose maker is cancelled is removed.

        Raises:
            SandboxError: it does not come up.
        """
        container = _Container(self, entry, spec, await self._image(spec.image))
        try:
            # Once asked for, it would come to be whoever waits for it.
            with anyio.CancelScope(shield=True):
                await self._start(entry, spec)
            await anyio.lowlevel.checkpoint()
            await container.make_ready()
        except BaseException:
            with anyio.move_on_after(_REMOVE_SECONDS, shield=True), suppress(SandboxError):
                await self.remove(entry)
            raise
        return ShellSandbox(entry.name, spec, container)

    async def remove(self, entry: Entry) -> bool:
        """End a container, its volumes with it."""
        engine = self.engine
        if entry.place not in ("", engine.place):
            raise SandboxError(
                f"sandbox {entry.name} is in {entry.place}, and this command reaches "
                f"{engine.place}: set DOCKER_HOST or DOCKER_CONTEXT as the run had it"
            )
        was_there = await self._is_there(entry.name)
        if was_there:
            gone = await engine.call("rm", "--force", "--volumes", entry.name)
            while await self._is_there(entry.name):  # perhaps by another call's hand
                if gone.status != 0 and "in progress" not in said(gone):
                    raise SandboxError(f"sandbox {entry.name} would not go: {said(gone)}")
                await anyio.sleep(_STEP_SECONDS)
        return was_there

    async def find(self, run: str) -> Sequence[str]:
        """The names of the containers with a run's label, also of those that have ended."""
        return await self._names(f"{RUN_LABEL}={run}")

    async def _is_there(self, name: str) -> bool:
        """Whether there is a container of that name that is a sandbox."""
        return name in await self._names(f"{NAME_LABEL}={name}")

    async def _names(self, label: str) -> list[str]:
        words = ("ps", "--all", "--filter", f"label={label}", "--format", "{{.Names}}")
        listed = await self.engine.call(*words)
        if listed.status != 0:
            raise SandboxError(f"{self.engine.program} does not list containers: {said(listed)}")
        return sorted(listed.stdout.decode().split())

    async def _image(self, name: str) -> "_Image":
        """What an image says of itself; it is pulled where it is not there."""
        async with self._looking:  # of many sandboxes that need an image, one pulls it
            if name not in self._images:
                self._images[name] = await self._looked_up(name)
            return self._images[name]

    async def _looked_up(self, name: str) -> "_Image":
        try:
            engine = self.engine
        except SandboxUnavailable as error:
            raise SandboxError(str(error)) from error
        asking = ("image", "inspect", "--format", "{{json .Config}}", name)
        told = await engine.call(*asking)
        if told.status != 0:
            logger.info("pulling the image %s", name)
            pulled = await engine.call("pull", "--quiet", name, seconds=_PULL_SECONDS)
            if pulled.status != 0:
                raise SandboxError(f"image {name!r} cannot be pulled: {said(pulled)}")
            told = await engine.call(*asking)
        if told.status != 0:
            raise SandboxError(f"image {name!r}: {said(told)}")
        return _Image.of(json.loads(told.stdout) or {})

    async def _start(self, entry: Entry, spec: SandboxSpec) -> None:
        started = await self.engine.call(*_run_words(self.engine, entry, spec))
        if started.status != 0:
            raise SandboxError(f"sandbox {entry.name} did not start: {said(started)}")
        if (warning := one_line(started.stderr.decode(errors="replace"))) not in self._told:
            self._told.add(warning)
            if warning:  # such as a limit that this kernel cannot hold
                logger.warning("%s: %s", self.engine.program, warning)


def _run_words(engine: Engine, entry: Entry, spec: SandboxSpec) -> list[str]:
    memory = f"{spec.memory_mb}m"
    words = ["run", "--detach", "--pull", "never", "--name", entry.name]
    words += ["--label", f"{RUN_LABEL}={entry.run}", "--label", f"{NAME_LABEL}={entry.name}"]
    words += ["--hostname", "sandbox", "--user", _KEEPER, "--workdir", "/", "--stop-signal", "KILL"]
    words += ["--read-only", "--volume", WORKDIR, "--volume", "/tmp", "--no-healthcheck"]
    words += ["--shm-size", f"{spec.disk_mb}m"]
    words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    words += ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(spec.processes)]
    words += ["--cpus", f"{spec.cpu:g}"] if spec.cpu else []
    words += [] if spec.network else ["--network", "none"]
    # It would hand this machine's proxies on, which may have a password.
    words += ["--http-proxy=false"] if engine.program == "podman" else []
    return [*words, "--entrypoint", "/bin/sh", spec.image, "-c", _INIT]


class _Container:
    """The enclosure."""

    def __init__(self, backend: Docker, entry: Entry, spec: SandboxSpec, image: _Image) -> None:
        self.workdir = WORKDIR
        self.shell = "/bin/sh"
        self.environment: Mapping[str, str] = {
            **{"PATH": PATH, "LANG": "C.UTF-8", "TERM": "dumb"},
            **image.environment,
            "HOME": WORKDIR,
        }
        self._backend = backend
        self._engine = backend.engine
        self._entry = entry
        self._file_blocks = (spec.disk_mb << 20) // _BLOCK_BYTES
        self._user = image.user
        self._restarts = 0
        self._changing = anyio.Lock()

    async def make_ready(self) -> None:
        """Let every user write where an agent may, and see what the image has."""
        ended = await self._engine.call(*self._within("0"), "/bin/sh", "-c", _READY)
        if ended.status != 0:
            raise SandboxError(f"sandbox {self._entry.name} did not start: {said(ended)}")
        self.shell = f"/bin/{ended.stdout.decode().strip()}"

    async def run(self, argv: Sequence[str], bounds: Bounds, *, user: str | None) -> Ended:
        restarts = self._restarts
        ended = await _Command(self, user or self._user, bounds).carry_out(argv)
        if ended.told_its_end or ended.timed_out or restarts != self._restarts:
            return ended
        if ended.status == _KILLED and not await self._is_running():
            raise self._lost()
        return ended if ended.stdout else _judged(ended, user)

    async def stop(self) -> None:
        async with self._changing:
            self._restarts += 1
            restarted = await self._engine.call("restart", "--time", "0", self._entry.name)
            if restarted.status != 0:
                why = f"its processes were not stopped: {said(restarted)}"
                raise SandboxError(f"sandbox {self._entry.name}: {why}")

    async def remove(self) -> None:
        await self._backend.remove(self._entry)

    async def begin(
        self, user: str, argv: Sequence[str], bounds: Bounds, messenger: Messenger
    ) -> Ended:
        """Start a command as a user, and stay until it ends."""
        words = [*self._within(user, takes_input=bool(bounds.stdin)), "/bin/sh", "-c", _RUN]
        words += [messenger.ending.decode(), str(self._file_blocks)]
        return await self._engine.run([*words, *argv], bounds, messenger)

    async def end(self, user: str, number: int) -> None:
        """Kill a command with its process group."""
        kill = ("/bin/sh", "-c", 'kill -9 "-$0"', str(number))
        ended = await self._engine.call(*self._within(user), *kill)
        # Where it cannot even be brought in, the agent's processes have taken all the room.
        if ended.status in (_NO_ROOM, _NO_ROOM + 1, 255) and await self._is_running():
            await self.stop()

    def _within(self, user: str, *, takes_input: bool = False) -> list[str]:
        taking = ["--interactive"] if takes_input else []
        return ["exec", *taking, "--workdir", "/", "--user", user, self._entry.name]

    async def _is_running(self) -> bool:
        words = ("container", "inspect", "--format", "{{.State.Running}}", self._entry.name)
        return (await self._engine.call(*words)).stdout.strip() == b"true"

    def _lost(self) -> SandboxError:
        return SandboxError(
            f"sandbox {self._entry.name} is lost: its container was ended from outside, perhaps "
            "for want of memory"
        )


class _Command:
    """One command, from when its number is known until it has ended."""

    def __init__(self, container: _Container, user: str, bounds: Bounds) -> None:
        self._container = container
        self._user = user
        self._bounds = bounds
        self._number: int | None = None

    async def carry_out(self, argv: Sequence[str]) -> Ended:
        bounds = self._bounds
        roomy = replace(bounds, output=bounds.output + _NUMBER_BYTES)
        messenger = Messenger(f"loops-{secrets.token_hex(8)}:".encode(), self._begins)
        is_over = False
        try:
            ended = await self._container.begin(self._user, argv, roomy, messenger)
            is_over = ended.told_its_end
        finally:
            if not is_over and self._number is not None:
                with anyio.CancelScope(shield=True):
                    await self._container.end(self._user, self._number)
        return self._of_the_command(ended)

    def _begins(self, first: bytes) -> None:
        line = first.partition(b"\n")[0]
        self._number = int(line) if line.isdigit() else None

    def _of_the_command(self, ended: Ended) -> Ended:
        """What the command said and how it ended, without what went around it."""
        if self._number is None:  # what is there is an engine's complaint, on either output
            return replace(ended, stdout=b"", stderr=ended.stdout + ended.stderr)
        stdout, limit = ended.stdout.partition(b"\n")[2], self._bounds.output
        is_long = len(stdout) > limit or len(ended.stderr) > limit
        cut = replace(
            ended,
            stdout=stdout[:limit],
            stderr=ended.stderr[:limit],
            truncated=ended.truncated or is_long,
        )
        if stdout:
            return cut
        # It came inside, and then its time was up, it was killed, or nothing more could be started.
        if ended.timed_out or ended.status == _KILLED:
            return replace(cut, stdout=ENTERED)
        return _no_room(b"there is no room for one more process")


def _no_room(said: bytes) -> Ended:
    """The agent's processes have taken all that they may have.

    That is its doing, and no fault of the sandbox, for which the attempt would be tried again.
    """
    return Ended(_NO_ROOM, ENTERED, said)


def _judged(ended: Ended, user: str | None) -> Ended:
    """What became of a command that the engine did not bring inside."""
    why = one_line(ended.stderr.decode(errors="replace"))
    if user is not None and "unable to find user" in why:
        raise ValueError(f"user {user!r}: the image has no such user")
    if any(words in why.lower() for words in _NO_ROOM_WORDS):
        return _no_room(ended.stderr)
    return ended
