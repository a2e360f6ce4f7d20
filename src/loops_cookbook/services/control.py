"""The control plane of hosted Loops: what it serves, and where a run is trained and sampled.

Whether that is serverless or dedicated is read from its answers alone. What it makes is asked for
once, since a request that is repeated might make it twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from loops_cookbook.errors import ModelError, ServiceRefused
from loops_cookbook.services.bodies import WireError, read, write
from loops_cookbook.services.control_bodies import (
    Capabilities,
    OpenedSampler,
    OpenedSession,
    OpenedTrainer,
    OpenSampler,
    OpenTrainer,
    SamplerPlace,
    SamplerStatus,
    SupportedModel,
    Teams,
    TrainerRun,
    TrainerStatus,
)
from loops_cookbook.services.transport import Transport

HOSTED_URL = "https://api.baseten.co"
"""The control plane of hosted Loops, unless `LOOPS_BASE_URL` names another."""

Mode: TypeAlias = Literal["serverless", "dedicated"]
BodyT = TypeVar("BodyT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class HostedOptions:
    """What a hosted run is asked for."""

    model: str
    max_seq_len: int
    lora_rank: int
    seed: int
    mode: Mode | None = None
    """None: serverless where the workspace has it, else dedicated."""
    team: str | None = None
    """By its name; None: the key's own."""
    name: str | None = None
    """Of the run, for people."""
    path: str | None = None
    """The checkpoint that will be loaded into it; None: none, that is known of."""


class ControlPlane:
    """The control plane's calls."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._root = "/v1/loops"
        self._session = ""

    async def capabilities(self) -> Sequence[SupportedModel]:
        """The models that the workspace may train."""
        answer = await self._get("/v1/loops/capabilities", Capabilities)
        return answer.supported_models

    async def require_model(self, name: str, max_seq_len: int) -> SupportedModel:
        """The model as the service knows it.

        Raises:
            ModelError: it has none of this name, or it takes shorter sequences only.
        """
        return supported(await self.capabilities(), name, max_seq_len)

    async def enter_team(self, name: str | None) -> None:
        """Let what is opened from now on belong to a team."""
        if name is None:
            return
        teams = (await self._get("/v1/teams", Teams)).teams
        found = next((team for team in teams if team.name == name), None)
        if found is None:
            names = ", ".join(team.name for team in teams) or "none"
            raise ModelError(f"LOOPS_TEAM: the workspace has no team {name!r}, it has {names}")
        self._root = f"/v1/teams/{quote(found.id, safe='')}/loops"

    async def open_run(self, options: HostedOptions) -> TrainerRun:
        """A run and its trainer, which may still have to come up."""
        session = await self._post(f"{self._root}/sessions", None, OpenedSession)
        self._session = session.session.id
        body = OpenTrainer(
            session_id=self._session,
            base_model=options.model,
            lora_rank=options.lora_rank,
            replicas=1,
            availability_model="dedicated",
            seed=options.seed,
            max_seq_len=options.max_seq_len,
        )
        if options.name is not None:
            body = body.model_copy(update={"name": options.name})
        if options.path is not None:
            body = body.model_copy(update={"path": options.path})
        path = f"{self._root}/trainers"
        if options.mode is not None:
            scope = {"serverless": "serverless", "dedicated": "deployment"}[options.mode]
            body = body.model_copy(update={"scope": scope})
            path = f"{self._root}/debug/trainers"
        run = (await self._post(path, body, OpenedTrainer)).run
        is_serverless = run.deployment_id is None
        if options.mode is not None and is_serverless != (options.mode == "serverless"):
            has = "serverless" if is_serverless else "dedicated"
            raise ServiceRefused(
                f"{self._transport.base_url}: {options.mode} was asked for, and run {run.id} is "
                f"{has}: see what the workspace may use, or set another scope"
            )
        return run

    async def open_sampler(self, run_id: str) -> SamplerPlace:
        """The sampler that is paired with a run; the same one however often it is asked for."""
        body = OpenSampler(session_id=self._session, run_id=run_id)
        return (await self._post(f"{self._root}/samplers", body, OpenedSampler)).sampler

    async def trainer_status(self, deployment_id: str) -> str:
        """In one word; empty where it is not told."""
        path = f"/v1/loops/deployments/{quote(deployment_id, safe='')}"
        return (await self._get(path, TrainerStatus)).deployment.status.name or ""

    async def sampler_status(self, model_id: str, deployment_id: str) -> str:
        """In one word; empty where it is not told."""
        model, deployment = quote(model_id, safe=""), quote(deployment_id, safe="")
        path = f"/v1/models/{model}/deployments/{deployment}"
        return (await self._get(path, SamplerStatus)).status or ""

    async def _get(self, path: str, model: type[BodyT]) -> BodyT:
        return self._read(path, (await self._transport.call("control", "GET", path)).body, model)

    async def _post(self, path: str, body: BaseModel | None, model: type[BodyT]) -> BodyT:
        content = b"" if body is None else write(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        answer = await self._transport.call("control", "POST", path, body=content, headers=headers)
        return self._read(path, answer.body, model)

    def _read(self, path: str, body: bytes, model: type[BodyT]) -> BodyT:
        try:
            return read(body, model)
        except WireError as error:
            raise ServiceRefused(
                f"{self._transport.base_url}{path} breaks the Loops protocol ({error}): see that "
                "the service and this package are of versions that fit"
            ) from error


def supported(models: Sequence[SupportedModel], name: str, max_seq_len: int) -> SupportedModel:
    """A model among those that a service has.

    Raises:
        ModelError: it has none of this name, or it takes shorter sequences only.
    """
    found = next((model for model in models if model.model_name == name), None)
    if found is None:
        names = ", ".join(sorted(model.model_name for model in models)) or "none"
        raise ModelError(
            f"model.name: hosted Loops does not serve {name!r} to this workspace; it has {names}"
        )
    limit = found.max_context_length
    if limit is not None and max_seq_len > limit:
        raise ModelError(
            f"model.max_seq_len: found {max_seq_len}, and hosted Loops serves {name} up to "
            f"{limit}; use {limit} or less"
        )
    return found
