"""Servers that speak the Loops protocol, at addresses that the config names.

Such a server is `loops serve` on another machine, as a rule. It is waited for, since it may still
be loading its model, but not for long: an address that is wrong never answers. `/version` tells
whether it is ours, whose trainer takes the sampling temperature in its loss, whether it keeps
checkpoints, and how many tokens its model knows: any other would end the run at the trainer. A run
begins with fresh weights, unless it was killed and the trainer can show that it still has what the
run left there.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import quote

import anyio
import httpx

from loops_cookbook.errors import ServiceRefused, ServiceUnavailable
from loops_cookbook.services.answers import detail, object_of
from loops_cookbook.services.base import Held, Left, Sampler, Trainer
from loops_cookbook.services.checked import CheckedSampler
from loops_cookbook.services.direct import HttpSampler
from loops_cookbook.services.gather import GatheringSampler, loop_settled
from loops_cookbook.services.http import HttpCheckpointer, HttpTrainer
from loops_cookbook.services.transport import Patience, Transport, open_transport

logger = logging.getLogger(__name__)

READY_SECONDS = 120.0
"""For a server to answer."""
PROBE_SECONDS = 2.0
"""Between two looks at whether it does."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Where a run is trained and sampled."""

    trainer_url: str
    sampler_url: str
    model: str
    """As the servers call it."""
    lora_rank: int
    run_id: str
    """Names the run on the wire."""
    api_key: str | None = field(default=None, repr=False)
    left: Left | None = None
    """Of a run that was killed and goes on."""


@dataclass(frozen=True, slots=True)
class RemoteService:
    """Two servers as a `Service`."""

    trainer: Trainer
    sampler: Sampler
    description: Mapping[str, str | int]
    temperature_in_loss: bool
    held: Held | None = None
    """What the trainer still has of a run that was killed; None: it has fresh weights."""


@asynccontextmanager
async def remote_loops(
    options: RemoteOptions,
    *,
    settle: Callable[[], Awaitable[None]] = loop_settled,
    patience: Patience | None = None,
    network: httpx.AsyncBaseTransport | None = None,
) -> AsyncGenerator[RemoteService]:
    """Begin a run on servers that are there, or go on with one that a trainer still has.

    Args:
        options: where they are.
        settle: when equal samples leave as one request; see `GatheringSampler`.
        patience: for how long a call is tried again; None: as usual.
        network: what carries the requests; None for sockets.

    Raises:
        ServiceUnavailable: nobody answers there.
        ServiceRefused: the server has another model, or wants another key.
    """
    patience = patience or Patience()
    key = options.api_key
    async with (
        open_transport(
            options.trainer_url, api_key=key, patience=patience, network=network
        ) as to_trainer,
        open_transport(
            options.sampler_url, api_key=key, patience=patience, network=network
        ) as to_sampler,
    ):
        for transport in {each.base_url: each for each in (to_trainer, to_sampler)}.values():
            await answering(transport, f"/health?base_model={quote(options.model, safe='')}")
        engine = await _version(to_trainer)
        trainer, held = await _trainer(to_trainer, options, engine)
        sampler = HttpSampler(to_sampler, run_id=options.run_id)
        known = engine.get("vocab_size")
        async with GatheringSampler(sampler, settle=settle) as gathering:
            yield RemoteService(
                trainer,
                CheckedSampler(gathering, vocabulary=known if isinstance(known, int) else None),
                {
                    "run_id": options.run_id,
                    "beginning": trainer.beginning,
                    "trainer_url": options.trainer_url,
                    "sampler_url": options.sampler_url,
                    **engine,
                },
                temperature_in_loss="loops_cookbook" in engine,
                held=held,
            )


async def _trainer(
    transport: Transport, options: RemoteOptions, engine: Mapping[str, str | int]
) -> tuple[HttpTrainer, Held | None]:
    """The trainer as a killed run left it, where it shows that it is; else with fresh weights."""
    # A server that is not ours does not tell beforehand, and is found out by the first checkpoint.
    kind = HttpCheckpointer if engine.get("checkpoints", True) else HttpTrainer
    begun = partial(kind, transport, model=options.model, run_id=options.run_id)
    if options.left is not None:
        trainer = begun(beginning=options.left.beginning)
        if (held := await trainer.held(options.left)) is not None:
            return trainer, held
    trainer = begun()
    await trainer.init_trainer(options.lora_rank)
    return trainer, None


async def answering(
    transport: Transport, path: str, *, mend: str = "the addresses in [compute]"
) -> None:
    """Wait until a server says that it is well.

    Args:
        transport: to it.
        path: what to ask it.
        mend: what to look at where it does not.

    Raises:
        ServiceUnavailable: nobody answers there.
        ServiceRefused: the server has another model, or wants another key.
    """
    began, told = anyio.current_time(), ""
    while True:
        try:
            answer = await transport.call("probe", "GET", path)
        except ServiceUnavailable as error:
            reason = str(error)
        else:
            if answer.status == 200:
                return
            reason = f"GET {transport.base_url}{path} answered {answer.status}: {detail(answer)}"
            if answer.status in (401, 403, 422):
                raise ServiceRefused(f"{transport.without_key(reason)}: see {mend}")
        if anyio.current_time() - began > READY_SECONDS:
            raise ServiceUnavailable(
                f"{transport.without_key(reason)} (tried for {READY_SECONDS:.0f} s): see that the "
                f"server runs, and {mend}"
            )
        if reason != told:
            logger.warning("waiting for %s: %s", transport.base_url, transport.without_key(reason))
        told = reason
        await anyio.sleep(PROBE_SECONDS)


async def _version(transport: Transport) -> dict[str, str | int]:
    """What the server says of itself, where it is ours."""
    answer = await transport.call("probe", "GET", "/version")
    told = object_of(answer) if answer.status == 200 else {}
    return {k: v if isinstance(v, str | int) else str(v) for k, v in told.items()}
