"""From a plan to what it runs on: the one place that chooses who trains.

Whatever cannot be had is refused here, before a run folder or a process is made.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import anyio
import anyio.to_thread

from loops_cookbook.errors import MissingExtra, ModelError, UsageError
from loops_cookbook.recipes.before import NOTHING, Before
from loops_cookbook.recipes.own_service import OwnService, open_own_service
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.plans import AnyPlan
from loops_cookbook.recipes.producers import open_judges, require_keys
from loops_cookbook.recipes.sandboxes import open_sandboxes, require_sandboxes
from loops_cookbook.recipes.scope import (
    KEY_VARIABLE,
    TEAM_VARIABLE,
    TINKER_KEY_VARIABLE,
    TINKER_URL,
    TINKER_URL_VARIABLE,
    URL_VARIABLE,
    WAYS_OUT,
)
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.services.base import Left, Service, ServiceContext
from loops_cookbook.services.command import EngineOptions
from loops_cookbook.services.extras import LOCAL, TINKER, is_installed, namesake
from loops_cookbook.services.gather import loop_settled

Settle: TypeAlias = Callable[[], Awaitable[None]]
Opened: TypeAlias = AbstractAsyncContextManager[Service]


def require_service(plan: AnyPlan, values: Mapping[str, str]) -> None:
    """Refuse a plan that nobody here can carry out.

    Raises:
        UsageError: what is missing, and the ways out.
        SandboxUnavailable: its sandboxes cannot be made here.
    """
    if isinstance(plan, Plan):
        require_keys(plan.config.producers, values)
    if plan.scope.is_local:
        if not is_installed(LOCAL):
            raise MissingExtra("the embedded engine (scope local)", "local")
    elif plan.scope.is_remote:
        _remote_key(plan, values)
    elif plan.scope.is_tinker:
        _require_tinker(values)
    elif plan.scope.is_hosted and not values.get(KEY_VARIABLE):
        raise UsageError(
            f"model.name: {plan.model.name!r} is not on this machine, and hosted Loops needs "
            f"{KEY_VARIABLE}, which neither the environment nor .env has; set it, or {WAYS_OUT}"
        )
    if plan.detection.renderer is None:
        reasons = "; ".join(plan.detection.warnings) or "its tokenizer cannot be read"
        raise ModelError(f"model.name: {plan.model.name!r} cannot be run: {reasons}")
    if isinstance(plan, Plan):
        require_sandboxes(plan.config)


def rendering_limiter(plan: AnyPlan) -> anyio.CapacityLimiter | None:
    """A thread for a slow renderer, and one only: tokenizers are not thread-safe.

    None where rendering is fast, or was done with the plan, as that of rows is.
    """
    is_slow = isinstance(plan, Plan) and plan.detection.is_slow
    return anyio.CapacityLimiter(1) if is_slow else None


@asynccontextmanager
async def open_service(
    plan: AnyPlan,
    folder: RunFolder,
    values: Mapping[str, str],
    *,
    rendering: anyio.CapacityLimiter | None = None,
    before: Before = NOTHING,
) -> AsyncGenerator[Service]:
    """The trainer and sampler of a plan that `require_service` let through.

    Args:
        plan: the run.
        folder: where the engine's log goes.
        values: the environment, which holds the keys.
        rendering: threads for the renderer. Calls of a group become ready as it lets them, so
            equal ones leave together only once all that it holds are through.
        before: what the policy begins with, and what of it may live on.

    Raises:
        UsageError: the engine refused the model.
        ServiceError: the service refused, or could not be reached.
    """
    settle = loop_settled if rendering is None else partial(_rendered, rendering)
    if plan.own_service is not None:
        context = _service_context(plan, plan.own_service, folder)
        opened = open_own_service(plan.own_service, context, settle=settle)
    elif plan.scope.is_local:
        opened = _local(plan, folder, settle)
    elif plan.scope.is_remote:
        opened = _remote(plan, folder, _remote_key(plan, values), settle, before.left)
    elif plan.scope.is_tinker:
        opened = _tinker(plan, folder, values, settle, before.updates)
    else:
        opened = _hosted(plan, folder, values, settle, before.loads)
    async with opened as service:
        yield service


# The clients' libraries take as long to import as all that check needs: each is imported where a
# service is opened.


def _local(plan: AnyPlan, folder: RunFolder, settle: Settle) -> Opened:
    from loops_cookbook.services.spawn import local_engine

    model = plan.config.model
    assert plan.model.directory is not None, "only models on this machine are let through"
    options = EngineOptions(
        model_dir=plan.model.directory,
        model_name=plan.model.name,
        max_seq_len=model.max_seq_len,
        lora_rank=model.lora_rank,
        lora_alpha=model.lora_alpha,
        seed=model.seed,
        init=model.init,
        deterministic=plan.config.compute.deterministic,
        checkpoints=folder.checkpoints,
    )
    log = folder.root / "engine.log"
    return local_engine(options, run_id=folder.root.name, log_path=log, settle=settle)


def _remote(
    plan: AnyPlan, folder: RunFolder, key: str | None, settle: Settle, left: Left | None
) -> Opened:
    from loops_cookbook.services.remote import RemoteOptions, remote_loops

    compute = plan.config.compute
    assert compute.trainer_url is not None, "the config has a rule for it"
    options = RemoteOptions(
        trainer_url=compute.trainer_url,
        sampler_url=compute.sampler_url or compute.trainer_url,
        model=plan.model.name,
        lora_rank=plan.config.model.lora_rank,
        run_id=folder.root.name,
        api_key=key,
        left=left,
    )
    return remote_loops(options, settle=settle)


def _hosted(
    plan: AnyPlan,
    folder: RunFolder,
    values: Mapping[str, str],
    settle: Settle,
    loads: str | None,
) -> Opened:
    from loops_cookbook.services.control import HOSTED_URL, HostedOptions
    from loops_cookbook.services.loops import hosted_loops

    model, scope = plan.config.model, plan.scope.scope
    options = HostedOptions(
        model=plan.model.name,
        max_seq_len=model.max_seq_len,
        lora_rank=model.lora_rank,
        seed=model.seed,
        mode=scope if scope in ("serverless", "dedicated") else None,
        team=values.get(TEAM_VARIABLE) or None,
        name=folder.root.name,
        path=loads,
    )
    return hosted_loops(
        options,
        api_key=values[KEY_VARIABLE],
        base_url=values.get(URL_VARIABLE) or HOSTED_URL,
        settle=settle,
    )


def _tinker(
    plan: AnyPlan,
    folder: RunFolder,
    values: Mapping[str, str],
    settle: Settle,
    updates: int | None,
) -> Opened:
    from loops_cookbook.services.tinker import TinkerOptions, tinker_service

    model = plan.config.model
    options = TinkerOptions(
        base_url=values.get(TINKER_URL_VARIABLE) or TINKER_URL,
        api_key=values[TINKER_KEY_VARIABLE],
        model=plan.model.name,
        lora_rank=model.lora_rank,
        seed=model.seed,
        run_id=folder.root.name,
        first_version=updates,
    )
    return tinker_service(options, settle=settle)


def _require_tinker(values: Mapping[str, str]) -> None:
    other = namesake("tinker")
    if other is not None or not is_installed(TINKER):
        raise MissingExtra('[compute] scope = "tinker"', "tinker", found=other)
    url = values.get(TINKER_URL_VARIABLE) or TINKER_URL
    if not url.startswith(("http://", "https://")):
        raise UsageError(
            f"{TINKER_URL_VARIABLE}: {url!r} is no address; write it as http://HOST:PORT"
        )
    if not values.get(TINKER_KEY_VARIABLE):
        raise UsageError(
            f"{TINKER_KEY_VARIABLE}: neither the environment nor .env has it; set it to the key of "
            "the service (SkyRL takes any that begins with tml-)"
        )


def _remote_key(plan: AnyPlan, values: Mapping[str, str]) -> str | None:
    """The key of the servers that the config names; None where it names none.

    Raises:
        UsageError: neither the environment nor .env has it.
    """
    variable = plan.config.compute.api_key_env
    if variable is None:
        return None
    if not values.get(variable):
        raise UsageError(
            f"compute.api_key_env: neither the environment nor .env has a {variable}; set it to "
            "the key of the servers"
        )
    return values[variable]


@asynccontextmanager
async def with_judges(plan: Plan, values: Mapping[str, str]) -> AsyncGenerator[Plan]:
    """The plan with models beside the policy that can be called, for the length of the block."""
    async with open_judges(plan.config.producers, values) as judges:
        yield replace(plan, others={**plan.others, **judges})


@asynccontextmanager
async def equipped(
    plan: Plan, folder: RunFolder, values: Mapping[str, str]
) -> AsyncGenerator[Plan]:
    """The plan with all that its attempts use beside the policy, for the length of the block."""
    async with (
        with_judges(plan, values) as judged,
        open_sandboxes(plan.config, folder) as sandboxes,
    ):
        yield replace(judged, sandboxes=sandboxes)


def _service_context(plan: AnyPlan, own: OwnService, folder: RunFolder) -> ServiceContext:
    model = plan.config.model
    return ServiceContext(
        run_id=folder.root.name,
        run_folder=folder.root,
        model=plan.model.name,
        model_directory=plan.model.directory,
        max_seq_len=model.max_seq_len,
        lora_rank=model.lora_rank,
        lora_alpha=model.lora_alpha,
        seed=model.seed,
        options=own.options,
    )


async def _rendered(limiter: anyio.CapacityLimiter) -> None:
    """Wait for all that was to be rendered before this."""
    await anyio.to_thread.run_sync(int, limiter=limiter)
