"""The table `[sandbox]`: where an agent's commands run, and what they may take."""

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from loops_cookbook.config.base import Count, Seconds, StrictModel, Text
from loops_cookbook.problems import Problem

FIXED = frozenset({"backend", "isolation"})
"""Keys that are the same for all sandboxes of a run."""

_IGNORED: Mapping[str, Mapping[str, str]] = {
    "local": {
        "cpu": "nothing here holds a sandbox to some cores",
        "lifetime_seconds": "local sandboxes end with the run",
    },
    "docker": {
        "isolation": "a container is what it is",
        "lifetime_seconds": "a container ends with its try, or by `loops cleanup`",
    },
    "blaxel": {
        "isolation": "each sandbox is a machine of its own",
        "cpu": "the service gives cores by memory_mb",
        "disk_mb": "the service does not limit files",
        "processes": "the service does not limit processes",
    },
}
"""What a backend does not do, and why."""


class SandboxTable(StrictModel):
    """Where an agent's commands run, and what they may take. An Episode opens a sandbox with
    `await setup.sandbox()`, where any key but `backend` and `isolation` can be given anew. Of a key
    that the backend ignores a warning tells, so that one key is enough to go to another backend."""

    backend: Literal["none", "local", "docker", "blaxel"] = "none"
    """`none`: there are no sandboxes. `local`: on this machine (Linux). `docker`: containers of
    Docker or Podman. `blaxel`: machines of the service Blaxel (extra `blaxel`)."""

    isolation: Literal["bubblewrap", "none"] = "bubblewrap"
    """Of `local`. `bubblewrap`: namespaces of its own, by the program bwrap. `none`: plain
    processes, for agents that are trusted with all that their user can reach; needs
    `network = true`, since nothing is kept from them."""

    image: Text | None = None
    """What it is made from: of `docker`, which needs one, and of `blaxel`, where it is
    `blaxel/base-image:latest` unless set."""

    memory_mb: Count = 1024
    """Memory: with `local`, private memory of one process; else of the whole sandbox."""

    cpu: Annotated[float, Field(gt=0)] | None = None
    """Cores, such as 0.5. Of `docker`; all there are unless set."""

    disk_mb: Count = 256
    """With `local`, what each writable folder (`/work`, `/tmp`, `/dev/shm`) holds; it lies in
    memory. With `docker`, and with `isolation = "none"`, the most of one file, and only that."""

    processes: Count = 256
    """Processes and threads at once."""

    network: bool = False
    """Whether there is a network beyond a loopback of its own. With `local` it is this machine's,
    loopback included; with `docker` the engine's usual one."""

    timeout_seconds: Seconds = 60
    """For a command that names no timeout, and for reading or writing a file."""

    lifetime_seconds: Annotated[float, Field(ge=300)] = 86_400
    """Of `blaxel`: how old a sandbox may get before the service deletes it by itself, so that none
    is paid for after a crash that nobody cleaned up. Longer than the longest attempt, and at least
    300."""

    def broken_rules(self) -> Iterator[Problem]:
        """Nothing is asked of what is not there or cannot give what matters."""
        if self.backend == "none":
            for key in sorted(self.model_fields_set - {"backend"}):
                yield Problem((key,), 'set, but there are no sandboxes; set backend = "local"')
            return
        if self.backend == "local" and self.image is not None:
            yield Problem(
                ("image",),
                'set, but backend = "local" shows this machine\'s own system; remove it, or set '
                'backend = "docker"',
            )
        if self.backend == "docker" and self.image is None:
            yield Problem(("image",), 'not set; name an image, such as "debian:12-slim"')
        if self.backend == "local" and self.isolation == "none" and not self.network:
            yield Problem(
                ("network",),
                'found false, which isolation = "none" cannot keep; set it to true, or use '
                'isolation = "bubblewrap"',
            )

    def ignored(self, keys: Collection[str]) -> Iterator[str]:
        """What the backend does not do of some keys, one sentence each."""
        for key, why in _IGNORED.get(self.backend, {}).items():
            if key in keys:
                yield f'{key}: backend = "{self.backend}" ignores it: {why}'
