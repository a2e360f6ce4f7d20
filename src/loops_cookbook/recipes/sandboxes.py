"""From `[sandbox]` to what makes sandboxes: the one place that chooses the backend."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import anyio

from loops_cookbook.config.rl import RLConfig
from loops_cookbook.config.sandbox import SandboxTable
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.sandboxes import bubblewrap, plain
from loops_cookbook.sandboxes.base import Backend
from loops_cookbook.sandboxes.ledger import Ledger
from loops_cookbook.sandboxes.source import SandboxSource

KINDS: Mapping[str, type[Backend]] = {
    bubblewrap.KIND: bubblewrap.Bubblewrap,
    plain.KIND: plain.Plain,
}
"""Every backend by its name in the ledger."""


def backend_of(table: SandboxTable) -> Backend | None:
    """The backend that a config asks for; None for none."""
    if table.backend == "none":
        return None
    return KINDS[plain.KIND if table.isolation == "none" else bubblewrap.KIND]()


def require_sandboxes(config: RLConfig) -> None:
    """Make one where a config asks for any, before a run begins.

    Raises:
        SandboxUnavailable: why not, and the ways out.
    """
    if backend := backend_of(config.sandbox):
        anyio.run(backend.probe)


@asynccontextmanager
async def open_sandboxes(
    config: RLConfig, folder: RunFolder
) -> AsyncGenerator[SandboxSource | None]:
    """What opens a run's sandboxes, recorded in its folder; None where it has none."""
    if config.sandbox.backend == "none":
        yield None
        return
    with Ledger(folder.sandboxes) as ledger:
        async with sandboxes_of(
            config.sandbox,
            folder.root.name,
            ledger=ledger,
            release_seconds=config.clocks.release_seconds,
        ) as source:
            yield source


@asynccontextmanager
async def sandboxes_of(
    table: SandboxTable, run: str, *, ledger: Ledger | None = None, release_seconds: float = 30.0
) -> AsyncGenerator[SandboxSource | None]:
    """What opens the sandboxes of a table, in a ledger or in none; None where it has none."""
    backend = backend_of(table)
    if backend is None:
        yield None
        return
    async with SandboxSource(
        backend, table, run, ledger=ledger, release_seconds=release_seconds
    ) as source:
        yield source


def sandbox_warnings(table: SandboxTable) -> list[str]:
    """What a person should know before sandboxes are used."""
    if table.backend == "none":
        return []
    if table.isolation == "none":
        return [
            'sandbox.isolation is "none": commands are plain processes, which can reach all '
            'that their user can; use "bubblewrap" for agents that you do not trust with that'
        ]
    why = bubblewrap.cannot_be_had()
    return [why] if why else []
