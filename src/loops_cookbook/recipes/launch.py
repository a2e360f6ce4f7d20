"""From a plan to what it runs on: the one place that chooses who trains.

Whatever cannot be had is refused here, before a run folder or a process is made.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import anyio
import anyio.to_thread

from loops_cookbook.errors import MissingExtra, ModelError, UsageError
from loops_cookbook.recipes.own_service import OwnService, open_own_service
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.producers import open_judges, require_keys
from loops_cookbook.recipes.scope import KEY_VARIABLE, WAYS_OUT
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.services.base import Service, ServiceContext
from loops_cookbook.services.command import EngineOptions
from loops_cookbook.services.extras import LOCAL, is_installed
from loops_cookbook.services.gather import loop_settled


def require_service(plan: Plan, values: Mapping[str, str]) -> None:
    """Refuse a plan that nobody here can carry out.

    Raises:
        UsageError: what is missing, and the ways out.
    """
    require_keys(plan.config.producers, values)
    if plan.scope.is_local:
        if not is_installed(LOCAL):
            raise MissingExtra("the embedded engine (scope local)", "local")
    elif plan.scope.is_own:
        pass
    elif not values.get(KEY_VARIABLE):
        raise UsageError(
            f"model.name: {plan.model.name!r} is not on this machine, and hosted Loops needs "
            f"{KEY_VARIABLE}, which neither the environment nor .env has, and a later version of "
            f"loops-cookbook; {WAYS_OUT}"
        )
    else:
        raise UsageError(
            f"model.name: {plan.model.name!r} is not on this machine, and this version of "
            f"loops-cookbook cannot train on hosted Loops; {WAYS_OUT}"
        )
    if plan.detection.renderer is None:
        reasons = "; ".join(plan.detection.warnings) or "its tokenizer cannot be read"
        raise ModelError(f"model.name: {plan.model.name!r} cannot be run: {reasons}")


def rendering_limiter(plan: Plan) -> anyio.CapacityLimiter | None:
    """A thread for a slow renderer, and one only: tokenizers are not thread-safe."""
    return anyio.CapacityLimiter(1) if plan.detection.is_slow else None


@asynccontextmanager
async def open_service(
    plan: Plan, folder: RunFolder, *, rendering: anyio.CapacityLimiter | None = None
) -> AsyncGenerator[Service]:
    """The trainer and sampler of a plan that `require_service` let through.

    Args:
        plan: the run.
        folder: where the engine's log goes.
        rendering: threads for the renderer. Calls of a group become ready as it lets them, so
            equal ones leave together only once all that it holds are through.

    Raises:
        UsageError: the engine refused the model.
        EngineDied: the engine ended, or did not serve in time.
    """
    settle = loop_settled if rendering is None else partial(_rendered, rendering)
    if plan.own_service is not None:
        context = _service_context(plan, plan.own_service, folder)
        async with open_own_service(plan.own_service, context, settle=settle) as own:
            yield own
        return
    # The client's libraries take as long to import as all that check needs.
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
    )
    log = folder.root / "engine.log"
    async with local_engine(
        options, run_id=folder.root.name, log_path=log, settle=settle
    ) as service:
        yield service


@asynccontextmanager
async def with_judges(plan: Plan, values: Mapping[str, str]) -> AsyncGenerator[Plan]:
    """The plan with models beside the policy that can be called, for the length of the block."""
    async with open_judges(plan.config.producers, values) as judges:
        yield replace(plan, others={**plan.others, **judges})


def _service_context(plan: Plan, own: OwnService, folder: RunFolder) -> ServiceContext:
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
