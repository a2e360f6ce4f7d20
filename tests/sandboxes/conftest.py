"""Backends to test: each that can be had on this machine."""

from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count

import pytest

from loops_cookbook.sandboxes.base import Backend, Entry, Sandbox, SandboxSpec
from loops_cookbook.sandboxes.bubblewrap import Bubblewrap, cannot_be_had
from loops_cookbook.sandboxes.plain import Plain

BACKENDS = {"bubblewrap": Bubblewrap, "plain": Plain}
NEEDS_BUBBLEWRAP = pytest.mark.skipif(cannot_be_had() is not None, reason=str(cannot_be_had()))
NUMBERS = count(1)

Open = Callable[..., Awaitable[Sandbox]]
"""Opens a sandbox; keywords are those of its spec."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # and the real clock: processes know no other


@pytest.fixture(params=[pytest.param("bubblewrap", marks=NEEDS_BUBBLEWRAP), pytest.param("plain")])
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]()


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A label that no other test has, in this session or in one beside it."""
    return f"t{abs(hash(tmp_path_factory.getbasetemp())) % 10**8}-{next(NUMBERS)}"


def entry(backend: Backend, run: str, number: int = 1) -> Entry:
    name = f"loops-{run}-{number}"
    return Entry(name, run, backend.kind, backend.place(name))


@pytest.fixture
async def opening(backend: Backend, run: str) -> AsyncIterator[Open]:
    """Opens sandboxes that the test's end releases."""
    opened: list[Sandbox] = []

    async def open_one(**spec: object) -> Sandbox:
        made = await backend.create(
            entry(backend, run, len(opened) + 1),
            SandboxSpec(**spec),  # type: ignore[arg-type]
        )
        opened.append(made)
        return made

    yield open_one
    for each in opened:
        await each.release()


@pytest.fixture
async def sandbox(opening: Open) -> Sandbox:
    return await opening()
