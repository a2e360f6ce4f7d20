"""A run over the Tinker API, by its SDK (extra `tinker`): Thinking Machines, or SkyRL on Ray.

The SDK is imported here and nowhere else. It works on a thread and an event loop of its own and is
only awaited here; whoever leaves gives up what it waited for. A run has an adapter of its own, and
the service lets go of it when the run ends.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import anyio
import anyio.to_thread
import httpx
from pydantic_core import to_json

from loops_cookbook.errors import MissingExtra, ModelError, ServiceError
from loops_cookbook.services.answers import object_of
from loops_cookbook.services.base import Sampler, Trainer
from loops_cookbook.services.extras import namesake
from loops_cookbook.services.gather import GatheringSampler, loop_settled
from loops_cookbook.services.network import sockets
from loops_cookbook.services.remote import answering
from loops_cookbook.services.tinker_policy import TinkerSampler, TinkerTrainer
from loops_cookbook.services.tinker_sdk import Sdk, ServiceClient, TrainingClient
from loops_cookbook.services.tinker_server import HEALTH, TinkerServer
from loops_cookbook.services.transport import Transport

logger = logging.getLogger(__name__)

UNLOAD_SECONDS = 10.0
"""For the service to let go of the adapter at the end."""


@dataclass(frozen=True, slots=True)
class TinkerOptions:
    """What a run over the Tinker API is asked for."""

    base_url: str
    api_key: str = field(repr=False)
    model: str
    """As the service calls it."""
    lora_rank: int
    seed: int
    """Of the adapter's first weights."""
    run_id: str
    """For people, in the service's own lists."""
    first_version: int | None = None
    """Of what is published first, by whoever loads something before; None: the fresh weights are,
    at once and as version 0."""


@dataclass(frozen=True, slots=True)
class TinkerService:
    """A run over the Tinker API as a `Service`."""

    trainer: Trainer
    sampler: Sampler
    description: Mapping[str, str | int]
    temperature_in_loss: bool = False


@asynccontextmanager
async def tinker_service(
    options: TinkerOptions,
    *,
    sdk: Sdk | None = None,
    settle: Callable[[], Awaitable[None]] = loop_settled,
    network: httpx.AsyncBaseTransport | None = None,
) -> AsyncGenerator[TinkerService]:
    """Begin a run with fresh weights to train, for the length of the block.

    Args:
        options: the service, and what of it.
        sdk: the module `tinker`, or a double of it; None: the one that is installed.
        settle: when equal samples leave as one request; see `GatheringSampler`.
        network: what carries the requests that are not the SDK's; None for sockets.

    Raises:
        MissingExtra: the SDK is not installed.
        ModelError: the service has another model.
        ServiceError: the service refused, or was not there.
    """
    sdk = sdk or _installed_sdk()
    headers = {"X-API-Key": options.api_key}
    async with _sdk_logs(), network or sockets(options.base_url) as carrier:
        server = TinkerServer(sdk, Transport(carrier, options.base_url, headers))
        await answering(server.transport, HEALTH, mend="TINKER_BASE_URL and TINKER_API_KEY")
        await _require_model(server.transport, options.model)
        async with (
            _session(server, options) as client,
            server.watched(),
            _adapter(server, client, options) as training,
        ):
            trainer = TinkerTrainer(server, client, training, options.first_version or 0)
            if options.first_version is None:
                await trainer.publish(key="start")
            async with GatheringSampler(TinkerSampler(server, trainer), settle=settle) as sampler:
                yield TinkerService(trainer, sampler, _description(sdk, options, training))


class _PassedOn(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logger.handle(record)


@asynccontextmanager
async def _sdk_logs() -> AsyncGenerator[None]:
    """Let what the SDK logs be notes of the run, and not lines of its own on stderr."""
    theirs, handler = logging.getLogger("tinker"), _PassedOn()
    propagates = theirs.propagate
    theirs.addHandler(handler)
    theirs.propagate = False
    try:
        yield
    finally:
        theirs.removeHandler(handler)
        theirs.propagate = propagates


def _installed_sdk() -> Sdk:
    other = namesake("tinker")
    if other is not None:
        raise MissingExtra('[compute] scope = "tinker"', "tinker", found=other)
    try:
        import tinker  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtra('[compute] scope = "tinker"', "tinker") from error
    return cast(Sdk, tinker)


@asynccontextmanager
async def _session(server: TinkerServer, options: TinkerOptions) -> AsyncGenerator[ServiceClient]:
    with server.told("opening a session"):
        # In a thread: it waits for the network, and not as a coroutine.
        client = await anyio.to_thread.run_sync(
            partial(_connect, server.sdk, options), abandon_on_cancel=True
        )
    try:
        yield client
    finally:
        client.holder.close()


def _connect(sdk: Sdk, options: TinkerOptions) -> ServiceClient:
    client = sdk.ServiceClient(
        {"loops_run": options.run_id}, base_url=options.base_url, api_key=options.api_key
    )
    _ = client.holder  # opens the session now, and not later on the event loop
    return client


@asynccontextmanager
async def _adapter(
    server: TinkerServer, client: ServiceClient, options: TinkerOptions
) -> AsyncGenerator[TrainingClient]:
    with server.told("creating the adapter"):
        training = await client.create_lora_training_client_async(
            base_model=options.model, rank=options.lora_rank, seed=options.seed
        )
    try:
        yield training
    finally:
        await _unload(server.transport, training.model_id)


def _description(
    sdk: Sdk, options: TinkerOptions, training: TrainingClient
) -> dict[str, str | int]:
    return {
        "url": options.base_url,
        "model_id": training.model_id,
        "tinker": sdk.__version__,
    }


async def _require_model(transport: Transport, model: str) -> None:
    """Refuse a name that is not among those the service tells; SkyRL would train what it has."""
    answer = await transport.call("probe", "GET", "/api/v1/get_server_capabilities")
    told = object_of(answer) if answer.status == 200 else {}
    models = cast(list[object], told.get("supported_models") or [])
    names = [cast(dict[str, object], m).get("model_name") for m in models if isinstance(m, dict)]
    if names and model not in names:
        raise ModelError(
            f"model.name: {transport.base_url} does not serve {model!r}; it has "
            f"{', '.join(sorted(map(str, names)))}"
        )


async def _unload(transport: Transport, model_id: str) -> None:
    """SkyRL has places for a few adapters only, and keeps one for minutes after its client left."""
    body = to_json({"model_id": model_id, "type": "unload_model"})
    headers = {"Content-Type": "application/json"}
    with anyio.CancelScope(shield=True), anyio.move_on_after(UNLOAD_SECONDS):
        try:
            await transport.call(
                "probe", "POST", "/api/v1/unload_model", body=body, headers=headers
            )
        except ServiceError as error:
            logger.debug("model %s was not unloaded: %s", model_id, error)
