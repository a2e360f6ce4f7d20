"""Backends to test: each that can be had on this machine."""

import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from itertools import count
from typing import Any

import pytest
from tests.sandboxes import image
from tests.sandboxes.blaxel_service import KEY, WORKSPACE, Service, serving

from loops_cookbook.sandboxes.base import Backend, Entry, Sandbox, SandboxSpec
from loops_cookbook.sandboxes.blaxel import Blaxel
from loops_cookbook.sandboxes.bubblewrap import Bubblewrap, cannot_be_had
from loops_cookbook.sandboxes.docker import Docker
from loops_cookbook.sandboxes.plain import Plain

BACKENDS = {"bubblewrap": Bubblewrap, "plain": Plain, "docker": Docker, "blaxel": Blaxel}
NEEDS_BUBBLEWRAP = pytest.mark.skipif(cannot_be_had() is not None, reason=str(cannot_be_had()))
EACH = [
    pytest.param("bubblewrap", marks=NEEDS_BUBBLEWRAP),
    pytest.param("plain"),
    pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow]),
    pytest.param("blaxel", marks=[pytest.mark.blaxel, pytest.mark.slow, NEEDS_BUBBLEWRAP]),
]
GIVEN = {"docker": {"image": image.NAME}, "blaxel": {"network": True}}
"""What a sandbox of a backend needs, or is given so that its double can."""
NUMBERS = count(1)

Open = Callable[..., Awaitable[Sandbox]]
"""Opens a sandbox; keywords are those of its spec."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # and the real clock: processes know no other


@pytest.fixture(scope="session")
def docker_image() -> None:
    """The image is with the engine that answers, or the test is skipped."""
    image.made_or_skip()


@pytest.fixture
async def blaxel_service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    """The double, with the real SDK pointed at it."""
    monkeypatch.setenv("BL_API_KEY", KEY)
    monkeypatch.setenv("BL_WORKSPACE", WORKSPACE)
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    if find_spec("blaxel") is None:
        pytest.skip("the extra blaxel is not installed")
    with serving() as service:
        client = sdk_client()
        client.with_base_url(f"{service.url}/v0")
        yield service
        await client.get_async_httpx_client().aclose()


@pytest.fixture(params=EACH)
def backend(request: pytest.FixtureRequest) -> Backend:
    needed = {"docker": "docker_image", "blaxel": "blaxel_service"}.get(request.param)
    if needed:
        request.getfixturevalue(needed)
    return BACKENDS[request.param]()


def sdk_client() -> Any:
    """The SDK's own client of the service, for whose address it has no variable."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from blaxel.core.client.client import client

        return client


def spec_for(backend: Backend, **spec: object) -> SandboxSpec:
    return SandboxSpec(**{**GIVEN.get(backend.kind, {}), **spec})  # type: ignore[arg-type]


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
            spec_for(backend, **spec),
        )
        opened.append(made)
        return made

    yield open_one
    for each in opened:
        await each.release()


@pytest.fixture
async def sandbox(opening: Open) -> Sandbox:
    return await opening()
