"""From `[sandbox]` to what makes sandboxes: the one place that chooses the backend."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import anyio

from loops_cookbook.config.rl import RLConfig
from loops_cookbook.config.sandbox import SandboxTable
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.sandboxes import blaxel, blaxel_sdk, bubblewrap, docker, plain
from loops_cookbook.sandboxes.base import Backend
from loops_cookbook.sandboxes.engine import engine_here
from loops_cookbook.sandboxes.ledger import Ledger
from loops_cookbook.sandboxes.source import SandboxSource, spec_of

KINDS: Mapping[str, type[Backend]] = {
    bubblewrap.KIND: bubblewrap.Bubblewrap,
    plain.KIND: plain.Plain,
    docker.KIND: docker.Docker,
    blaxel.KIND: blaxel.Blaxel,
}
"""Every backend by its name in the ledger."""


def backend_of(table: SandboxTable) -> Backend | None:
    """The backend that a config asks for; None for none."""
    if table.backend == "none":
        return None
    if table.backend == "local":
        return KINDS[plain.KIND if table.isolation == "none" else bubblewrap.KIND]()
    return KINDS[table.backend]()


def require_sandboxes(config: RLConfig) -> None:
    """Make one where a config asks for any, before a run begins.

    Raises:
        SandboxUnavailable: why not, and the ways out.
        MissingExtra: the service's SDK is not installed.
    """
    if backend := backend_of(config.sandbox):
        anyio.run(backend.probe, spec_of(config.sandbox))


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


def sandboxes_line(table: SandboxTable) -> str | None:
    """What makes the sandboxes, for the report; None where there are none.

    Raises:
        SandboxUnavailable: no container engine answers.
        MissingExtra: the service's SDK is not installed.
    """
    if table.backend == "none":
        return None
    network = "network" if table.network else "no network"
    if table.backend == "docker":
        engine = engine_here()
        return f"Sandboxes: {engine.program} {engine.version}; image {table.image}; {network}"
    if table.backend == "blaxel":
        blaxel_sdk.require_sdk()
        image = table.image or blaxel_sdk.IMAGE
        return f"Sandboxes: blaxel; image {image}; {network}"
    return f"Sandboxes: local; isolation {table.isolation}; {network}"


def sandbox_warnings(table: SandboxTable, values: Mapping[str, str]) -> list[str]:
    """What a person should know before sandboxes are used."""
    ignored = [f"sandbox.{told}" for told in table.ignored(table.model_fields_set)]
    if table.backend == "blaxel":
        return [*ignored, *blaxel_sdk.missing_credentials(values)]
    if table.backend != "local":
        return ignored
    if table.isolation == "none":
        return [
            *ignored,
            'sandbox.isolation is "none": commands are plain processes, which can reach all '
            'that their user can; use "bubblewrap" for agents that you do not trust with that',
        ]
    why = bubblewrap.cannot_be_had()
    return [*ignored, *([why] if why else [])]
