"""Opens the sandboxes of a run: each is in the ledger before it is asked for, until it is gone.

Release is shielded from cancellation and bounded. What is not confirmed to be gone stays in the
ledger, is tried once more when the run ends, and is then left to `loops cleanup`.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Self, TypeVar

import anyio
from pydantic import ValidationError

from loops_cookbook.config.sandbox import FIXED, SandboxTable
from loops_cookbook.errors import EpisodeError, SandboxError
from loops_cookbook.problems import one_line, problems_in
from loops_cookbook.sandboxes.base import (
    Backend,
    Command,
    Entry,
    ExecResult,
    Sandbox,
    SandboxSpec,
)
from loops_cookbook.sandboxes.ledger import Ledger

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SandboxSource:
    """Opens sandboxes of one backend for one run; an async context manager.

    Args:
        backend: makes them.
        table: what each has, unless it is opened with something else.
        run: the label by which they are found.
        ledger: where they are recorded; None in a test of one attempt.
        release_seconds: how long the release of one may take.
    """

    def __init__(
        self,
        backend: Backend,
        table: SandboxTable,
        run: str,
        *,
        ledger: Ledger | None = None,
        release_seconds: float = 30.0,
    ) -> None:
        self._backend = backend
        self._table = table
        self._run = run
        self._ledger = ledger
        self._release_seconds = release_seconds
        self._number = ledger.written if ledger is not None else 0
        self._open: dict[str, HeldSandbox] = {}
        self._told: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for sandbox in [*self._open.values()]:
                    group.start_soon(released_or_told, sandbox)

    async def open(self, whose: str, overrides: Mapping[str, object]) -> "HeldSandbox":
        """Make a sandbox.

        Args:
            whose: the attempt it is for, for people who read the ledger.
            overrides: keys of `[sandbox]` that are different for this one.

        Raises:
            EpisodeError: there is no such key, or it cannot have that value.
            SandboxError: it could not be made.
            RunStopped: the ledger cannot be written.
        """
        spec = self._spec(overrides)
        self._number += 1
        name = f"loops-{self._run}-{self._number}"
        entry = Entry(name, self._run, self._backend.kind, self._backend.place(name), whose)
        if self._ledger is not None:
            self._ledger.opens(entry)
        try:
            sandbox = await self._backend.create(entry, spec)
        except BaseException:
            await self._forget(entry)
            raise
        held = self._open[name] = HeldSandbox(sandbox, lambda: self._release(entry, sandbox))
        return held

    def _spec(self, overrides: Mapping[str, object]) -> SandboxSpec:
        if fixed := sorted(FIXED & overrides.keys()):
            raise EpisodeError(
                f"sandbox(): {fixed[0]} is the same for all sandboxes of a run: set it in [sandbox]"
            )
        given = {key: getattr(self._table, key) for key in self._table.model_fields_set}
        try:
            table = SandboxTable.model_validate({**given, **overrides})
        except ValidationError as error:
            told = "; ".join(map(str, problems_in(error, SandboxTable)))
            raise EpisodeError(f"sandbox(): {told}") from error
        for told in table.ignored(overrides.keys()):
            if told not in self._told:  # of a thousand attempts, the first one tells
                self._told.add(told)
                logger.warning("sandbox(): %s", told)
        return spec_of(table)

    async def _release(self, entry: Entry, sandbox: Sandbox) -> None:
        with anyio.move_on_after(self._release_seconds, shield=True) as clock:
            await sandbox.release()
        if clock.cancelled_caught:
            late = f"not confirmed to be gone after {self._release_seconds:g} s"
            raise SandboxError(f"sandbox {entry.name} is {late}")
        if self._open.pop(entry.name, None) is not None:
            self._note_gone(entry)

    async def _forget(self, entry: Entry) -> None:
        """Make sure that nothing is left of a sandbox that did not come to be."""
        with anyio.move_on_after(self._release_seconds, shield=True) as clock:
            try:
                await self._backend.remove(entry)
                self._note_gone(entry)
            except SandboxError as error:
                logger.warning("%s; `loops cleanup` tries again", error)
        if clock.cancelled_caught:
            logger.warning("%s may be left over; `loops cleanup` tries again", entry.name)

    def _note_gone(self, entry: Entry) -> None:
        if self._ledger is not None:
            self._ledger.released(entry)


def spec_of(table: SandboxTable) -> SandboxSpec:
    """What a sandbox of a table is given."""
    return SandboxSpec(
        memory_mb=table.memory_mb,
        disk_mb=table.disk_mb,
        processes=table.processes,
        network=table.network,
        timeout_seconds=table.timeout_seconds,
        image=table.image or "",
        cpu=table.cpu or 0.0,
        lifetime_seconds=table.lifetime_seconds,
    )


class HeldSandbox:
    """A sandbox as an Episode has it: what failed for good is remembered, release is recorded."""

    def __init__(self, sandbox: Sandbox, release: Callable[[], Awaitable[None]]) -> None:
        self.failure: SandboxError | None = None
        """Why it cannot be used any more, also where the agent swallowed that."""
        self._sandbox = sandbox
        self._release = release
        self._is_released = False

    @property
    def name(self) -> str:
        """Its name in the ledger."""
        return self._sandbox.name

    @property
    def workdir(self) -> str:
        """The folder that commands start in."""
        return self._sandbox.workdir

    async def exec(
        self,
        command: Command,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the contract
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> ExecResult:
        """Run a command until it ends; see `Sandbox.exec`."""
        return await self._noting(
            self._sandbox.exec(command, timeout=timeout, cwd=cwd, env=env, user=user)
        )

    async def read_file(self, path: str) -> bytes:
        """The bytes of a file; see `Sandbox.read_file`."""
        return await self._noting(self._sandbox.read_file(path))

    async def write_file(self, path: str, content: bytes | str) -> None:
        """Make a file, or replace it; see `Sandbox.write_file`."""
        await self._noting(self._sandbox.write_file(path, content))

    async def stop_processes(self) -> None:
        """End every process inside; files stay."""
        await self._noting(self._sandbox.stop_processes())

    async def release(self) -> None:
        """Give it back, and record that."""
        self._is_released = True
        await self._release()

    async def _noting(self, operation: Awaitable[T]) -> T:
        try:
            return await operation
        except SandboxError as error:
            if not self._is_released:  # what an Episode gave back by itself did not fail
                self.failure = error
            raise


async def released_or_told(sandbox: HeldSandbox) -> None:
    """Release a sandbox; that it failed is said in the log, and the ledger keeps it."""
    try:
        await sandbox.release()
    except SandboxError as error:
        logger.warning("%s; `loops cleanup` tries again", one_line(str(error)))
