"""Hosted Loops: a run is opened, its trainer and sampler are waited for, then both are used.

A dedicated deployment is waited for as long as it may still come up; one
that failed, was stopped or was preempted ends the run with that word. Nothing is closed at the end:
the service reclaims what nobody uses, which the heartbeat holds off.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

import anyio
import httpx

from loops_cookbook.errors import ServiceError, ServiceRefused, ServiceUnavailable
from loops_cookbook.services.base import Sampler, Trainer
from loops_cookbook.services.control import HOSTED_URL, ControlPlane, HostedOptions
from loops_cookbook.services.control_bodies import SamplerPlace, TrainerRun
from loops_cookbook.services.direct import HttpSampler
from loops_cookbook.services.gather import GatheringSampler, loop_settled
from loops_cookbook.services.heartbeat import Pulse, beating
from loops_cookbook.services.http import HttpCheckpointer
from loops_cookbook.services.operations import of_run
from loops_cookbook.services.queued import QueuedSampler
from loops_cookbook.services.transport import Patience, Transport, open_transport

logger = logging.getLogger(__name__)

READY_SECONDS = 3600.0
"""For a deployment to come up."""
PROBE_SECONDS = 10.0
"""Between two looks at whether it has."""
HEARTBEAT_SECONDS = 60.0

_OVER = frozenset({"FAILED", "STOPPED", "PREEMPTED"})
_SAMPLER_OVER = frozenset(
    {
        "DEPLOY_FAILED",
        "BUILD_FAILED",
        "BUILD_STOPPED",
        "UNHEALTHY",
        "DEACTIVATING",
        "INACTIVE",
        "FAILED",
    }
)


@dataclass(frozen=True, slots=True)
class HostedService:
    """A hosted run as a `Service`."""

    trainer: Trainer
    sampler: Sampler
    description: Mapping[str, str | int]
    temperature_in_loss: bool = False


@asynccontextmanager
async def hosted_loops(
    options: HostedOptions,
    *,
    api_key: str,
    base_url: str = HOSTED_URL,
    settle: Callable[[], Awaitable[None]] = loop_settled,
    patience: Patience | None = None,
    network: httpx.AsyncBaseTransport | None = None,
) -> AsyncGenerator[HostedService]:
    """Open a run on hosted Loops, with fresh weights to train, for the length of the block.

    Args:
        options: the model and how to hold it.
        api_key: of the workspace.
        base_url: of the control plane.
        settle: when equal samples leave as one request; see `GatheringSampler`.
        patience: for how long a call is tried again; None: as usual.
        network: what carries the requests; None for sockets.

    Raises:
        ModelError: the workspace has no such model, or not at this length.
        ServiceError: the service refused, or did not come up.
    """
    opening = _Opening(api_key, patience or Patience(), network)
    async with opening.transport(base_url) as to_control:
        control = ControlPlane(to_control)
        await control.require_model(options.model, options.max_seq_len)
        await control.enter_team(options.team)
        run = await control.open_run(options)
        logger.info("hosted run %s: %s", run.id, "dedicated" if run.deployment_id else "serverless")
        async with opening.transport(run.base_url) as to_trainer:
            await _trainer_ready(control, to_trainer, run)
            place = await control.open_sampler(run.id)
            trainer = HttpCheckpointer(
                to_trainer, model=run.base_model, run_id=run.id, is_pinned=place.model_id is None
            )
            async with opening.transport(place.base_url) as to_sampler:
                await _sampler_ready(control, opening, place)
                await trainer.init_trainer(options.lora_rank)
                sampler = _sampler(to_sampler, place, run, trainer)
                async with (
                    beating(to_trainer, _pulse(run), partial(_unheard, run.id)),
                    GatheringSampler(sampler, settle=settle) as gathering,
                ):
                    yield HostedService(trainer, gathering, _description(run, place))


@dataclass(frozen=True, slots=True)
class _Opening:
    """How connections to the parts of the service are made."""

    api_key: str
    patience: Patience
    network: httpx.AsyncBaseTransport | None

    @asynccontextmanager
    async def transport(self, url: str) -> AsyncGenerator[Transport]:
        async with open_transport(
            url, api_key=self.api_key, patience=self.patience, network=self.network
        ) as transport:
            yield transport


def _sampler(
    transport: Transport, place: SamplerPlace, run: TrainerRun, trainer: HttpCheckpointer
) -> Sampler:
    if place.model_id is not None:
        return HttpSampler(transport, run_id=run.id, published=trainer.published)
    return QueuedSampler(
        transport, model=run.base_model, run_id=run.id, published=trainer.published
    )


def _description(run: TrainerRun, place: SamplerPlace) -> dict[str, str | int]:
    told: dict[str, str | int] = {
        "run_id": run.id,
        "mode": "dedicated" if run.deployment_id else "serverless",
        "trainer_url": run.base_url,
        "sampler_url": place.base_url,
        "sampler_id": place.id,
    }
    return told | ({"deployment_id": run.deployment_id} if run.deployment_id else {})


async def _trainer_ready(control: ControlPlane, trainer: Transport, run: TrainerRun) -> None:
    """Wait until a trainer answers; its deployment may say sooner that it never will."""
    path = _health(run)
    said = ""
    with anyio.move_on_after(READY_SECONDS):
        while not await _is_healthy(trainer, path, run):
            if run.deployment_id is not None:
                said = await _tolerant(control.trainer_status(run.deployment_id)) or said
                _require_not_over("the trainer", run.id, said, _OVER)
            await anyio.sleep(PROBE_SECONDS)
        return
    raise _not_up("the trainer", run.id, said)


async def _is_healthy(trainer: Transport, path: str, run: TrainerRun) -> bool:
    try:
        answer = await trainer.call("probe", "GET", path, headers=of_run(run.id))
    except ServiceUnavailable:
        return False
    gateway = answer.headers.get("x-baseten-error-source") == "06"
    if gateway and 400 <= answer.status < 500:
        raise ServiceRefused(
            f"the gateway refused the trainer of run {run.id} with {answer.status}: see that this "
            "key may use it"
        )
    return answer.status == 200


async def _sampler_ready(control: ControlPlane, opening: _Opening, place: SamplerPlace) -> None:
    """Wait until a dedicated sampler is active, and wake it where it sleeps."""
    if place.model_id is None or place.deployment_id is None:
        return
    said, is_woken = "", False
    with anyio.move_on_after(READY_SECONDS):
        while said != "ACTIVE":
            status = control.sampler_status(place.model_id, place.deployment_id)
            said = await _tolerant(status) or said
            _require_not_over("the sampler", place.id, said, _SAMPLER_OVER)
            if said == "SCALED_TO_ZERO" and not is_woken:
                is_woken = await _wake(opening, place)
            if said != "ACTIVE":
                await anyio.sleep(PROBE_SECONDS)
        return
    raise _not_up("the sampler", place.id, said)


async def _wake(opening: _Opening, place: SamplerPlace) -> bool:
    async with opening.transport(place.base_url.rstrip("/").removesuffix("/sync")) as root:
        try:
            answer = await root.call("probe", "POST", "/wake", body=b"")
        except ServiceUnavailable:
            return False
    return answer.status in (200, 202)


async def _tolerant(status: Awaitable[str]) -> str:
    """A status; nothing where it could not be told this time."""
    try:
        return await status
    except ServiceUnavailable:
        return ""


def _require_not_over(what: str, its_id: str, status: str, over: frozenset[str]) -> None:
    if status in over:
        raise ServiceUnavailable(
            f"{what} {its_id} will not come up, its deployment is {status}: see the workspace for "
            "why, then run again"
        )


def _not_up(what: str, its_id: str, status: str) -> ServiceError:
    told = f", its deployment is {status}" if status else ""
    return ServiceUnavailable(
        f"{what} {its_id} did not come up within {READY_SECONDS:.0f} s{told}: see the workspace "
        "for why, then run again"
    )


def _pulse(run: TrainerRun) -> Pulse:
    return Pulse(_health(run), HEARTBEAT_SECONDS, of_run(run.id))


def _health(run: TrainerRun) -> str:
    return f"/health?base_model={quote(run.base_model, safe='')}"


def _unheard(run_id: str, seconds: float) -> None:
    logger.warning("run %s has answered no heartbeat for %.0f s", run_id, seconds)
