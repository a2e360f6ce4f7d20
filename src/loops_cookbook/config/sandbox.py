"""The table `[sandbox]`: where an agent's commands run, and what they may take."""

from collections.abc import Iterator
from typing import Literal

from loops_cookbook.config.base import Count, Seconds, StrictModel
from loops_cookbook.problems import Problem

FIXED = frozenset({"backend", "isolation"})
"""Keys that are the same for all sandboxes of a run."""


class SandboxTable(StrictModel):
    """Where an agent's commands run, and what they may take. An Episode opens a sandbox with
    `await setup.sandbox()`, where any key but `backend` and `isolation` can be given anew."""

    backend: Literal["none", "local"] = "none"
    """`none`: there are no sandboxes. `local`: on this machine (Linux)."""

    isolation: Literal["bubblewrap", "none"] = "bubblewrap"
    """Of `local`. `bubblewrap`: namespaces of its own, by the program bwrap. `none`: plain
    processes, for agents that are trusted with all that their user can reach; needs
    `network = true`, since nothing is kept from them."""

    memory_mb: Count = 1024
    """Private memory of one process."""

    disk_mb: Count = 256
    """What each writable folder (`/work`, `/tmp`, `/dev/shm`) holds; it lies in memory. The most of
    one file, too, and with `isolation = "none"` only that."""

    processes: Count = 256
    """Processes and threads at once."""

    network: bool = False
    """Whether this machine's network is there, its loopback included. Without it a sandbox has a
    loopback of its own."""

    timeout_seconds: Seconds = 60
    """For a command that names no timeout, and for reading or writing a file."""

    def broken_rules(self) -> Iterator[Problem]:
        """Nothing is asked of what is not there or cannot give it."""
        if self.backend == "none":
            for key in sorted(self.model_fields_set - {"backend"}):
                yield Problem((key,), 'set, but there are no sandboxes; set backend = "local"')
        elif self.isolation == "none" and not self.network:
            yield Problem(
                ("network",),
                'found false, which isolation = "none" cannot keep; set it to true, or use '
                'isolation = "bubblewrap"',
            )
