"""The container engine of this machine: Docker, or Podman where there is no Docker that answers.

It is spoken to through its command line, which knows contexts, remote engines and credentials, and
which Podman has too. Every call is a process with a time of its own.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from loops_cookbook.errors import SandboxError, SandboxUnavailable
from loops_cookbook.problems import one_line
from loops_cookbook.sandboxes.process import Bounds, Ended, Messenger, run_process

CALL_SECONDS = 60.0
"""How long an engine may take over a call that is not a command of an agent."""

_ASK_SECONDS = 20.0
_OUTPUT = 1 << 20
_WAYS_OUT = "start it, set DOCKER_HOST to one that runs, or use another sandbox.backend"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that answered."""

    program: str
    """`docker` or `podman`."""
    version: str
    place: str
    """Which of the engines that this machine may reach."""

    async def call(self, *words: str, seconds: float = CALL_SECONDS) -> Ended:
        """Say something to the engine.

        Raises:
            SandboxError: it did not answer in time.
        """
        bounds = Bounds(seconds, _OUTPUT, first_byte_seconds=seconds)
        ended = await self.run(words, bounds)
        if ended.timed_out:
            raise SandboxError(f"{self.program} {words[0]} took more than {seconds:g} s")
        return ended

    async def run(
        self, words: Sequence[str], bounds: Bounds, messenger: Messenger | None = None
    ) -> Ended:
        """Say something that takes input, or as long as it takes."""
        argv = [self.program, *words]
        try:
            return await run_process(argv, bounds, env=dict(os.environ), messenger=messenger)
        except OSError as error:  # of this machine, such as too many open files
            raise SandboxError(f"{self.program} cannot be started: {error}") from error


def engine_here() -> Engine:
    """The first engine that answers; asks it, which takes some milliseconds.

    Raises:
        SandboxUnavailable: there is none, and what to do.
    """
    silent: list[str] = []
    for program in ("docker", "podman"):
        if shutil.which(program):
            version, why = _asked(program, "version", "--format", "{{.Server.Version}}")
            if version:
                return Engine(program, version, _place_of(program))
            silent.append(f"{program}: {why}")
    if silent:
        raise SandboxUnavailable(
            f"sandbox.backend: no container engine answers ({'; '.join(silent)}): {_WAYS_OUT}"
        )
    raise SandboxUnavailable(
        "sandbox.backend: there is no container engine here (no docker and no podman on PATH): "
        "install Docker or Podman, or use another sandbox.backend"
    )


def is_address_of_another_machine(place: str) -> bool:
    """Whether an engine's place means the same engine wherever it is read."""
    scheme, colon, _ = place.rpartition(" ")[2].partition("://")
    return bool(colon) and scheme not in ("unix", "npipe", "fd")


def said(ended: Ended) -> str:
    """What an engine said was wrong, in one line."""
    return one_line(ended.stderr.decode(errors="replace")) or f"status {ended.status}"


def _place_of(program: str) -> str:
    if program == "docker":
        host, _ = _asked(program, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
        return f"docker at {host or os.environ.get('DOCKER_HOST', 'its default address')}"
    if host := os.environ.get("CONTAINER_HOST"):
        return f"podman at {host}"
    return f"podman of user {os.getuid()}"


def _asked(program: str, *words: str) -> tuple[str, str]:
    """What an engine answers, and why not."""
    try:
        done = subprocess.run(
            [program, *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_ASK_SECONDS,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", one_line(str(error))
    if done.returncode != 0:
        return "", one_line(done.stderr) or f"status {done.returncode}"
    return done.stdout.strip(), "it said nothing"
