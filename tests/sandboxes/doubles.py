"""A backend in memory, which can be made to be slow, to fail, and to leave things behind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import anyio

from loops_cookbook.errors import SandboxError
from loops_cookbook.sandboxes.base import Command, Entry, ExecResult, Sandbox, SandboxSpec


@dataclass
class MemoryBackend:
    """Sandboxes that are names in a set."""

    kind: str = "memory"
    there: dict[str, Entry] = field(default_factory=dict)
    specs: list[SandboxSpec] = field(default_factory=list)
    create_seconds: float = 0.0
    """After the sandbox is there, and before `create` returns."""
    release_seconds: float = 0.0
    removals_that_fail: int = 0
    lost: bool = False
    """Commands fail, as in a sandbox that is gone."""
    makes_none: bool = False
    stopped: list[str] = field(default_factory=list)

    def place(self, name: str) -> str:
        return f"memory:{name}"

    def is_remote(self, entry: Entry) -> bool:
        return False

    async def probe(self, spec: SandboxSpec) -> None: ...

    async def create(self, entry: Entry, spec: SandboxSpec) -> Sandbox:
        if self.makes_none:
            raise SandboxError(f"sandbox {entry.name} did not start")
        self.there[entry.name] = entry
        self.specs.append(spec)
        await anyio.sleep(self.create_seconds)
        return MemorySandbox(self, entry)

    async def remove(self, entry: Entry) -> bool:
        await anyio.sleep(self.release_seconds)
        if self.removals_that_fail > 0:
            self.removals_that_fail -= 1
            raise SandboxError(f"sandbox {entry.name} would not go")
        return self.there.pop(entry.name, None) is not None

    async def find(self, run: str) -> Sequence[str]:
        return [name for name, entry in self.there.items() if entry.run == run]


class MemorySandbox:
    def __init__(self, backend: MemoryBackend, entry: Entry) -> None:
        self.name = entry.name
        self.workdir = "/work"
        self._backend = backend
        self._entry = entry
        self._files: dict[str, bytes] = {}

    async def exec(
        self,
        command: Command,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> ExecResult:
        if self._backend.lost:
            raise SandboxError(f"sandbox {self.name} is lost")
        return ExecResult(0, f"{command}\n", "")

    async def read_file(self, path: str) -> bytes:
        return self._files[path]

    async def write_file(self, path: str, content: bytes | str) -> None:
        self._files[path] = content.encode() if isinstance(content, str) else content

    async def stop_processes(self) -> None:
        self._backend.stopped.append(self.name)

    async def release(self) -> None:
        await self._backend.remove(self._entry)
