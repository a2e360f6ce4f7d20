"""From a plan to what it runs on: the one place that chooses who trains.

Whatever cannot be had is refused here, before a run folder or a process is made.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec

from loops_cookbook.errors import MissingExtra, ModelError, UsageError
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.scope import KEY_VARIABLE, WAYS_OUT
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.services.base import Service
from loops_cookbook.services.spawn import NEEDED, EngineOptions, local_engine


def require_service(plan: Plan, values: Mapping[str, str]) -> None:
    """Refuse a plan that nobody here can carry out.

    Raises:
        UsageError: what is missing, and the ways out.
    """
    if plan.scope.is_local:
        if not engine_is_installed():
            raise MissingExtra("the embedded engine (scope local)", "local")
    elif not values.get(KEY_VARIABLE):
        raise UsageError(
            f"model.name: {plan.model.name!r} is not on this machine, and hosted Loops needs "
            f"{KEY_VARIABLE}, which neither the environment nor .env has; set it, or {WAYS_OUT}"
        )
    else:
        raise UsageError(
            f"model.name: {plan.model.name!r} is not on this machine, and this version of "
            f"loops-cookbook cannot train on hosted Loops; {WAYS_OUT}"
        )
    if plan.detection.renderer is None:
        reasons = "; ".join(plan.detection.warnings) or "its tokenizer cannot be read"
        raise ModelError(f"model.name: {plan.model.name!r} cannot be run: {reasons}")


def engine_is_installed() -> bool:
    """Whether the extra `local` is there; imports none of it."""
    return all(find_spec(module) is not None for module in NEEDED)


@asynccontextmanager
async def open_service(plan: Plan, folder: RunFolder) -> AsyncGenerator[Service]:
    """The trainer and sampler of a plan that `require_service` let through.

    Raises:
        UsageError: the engine refused the model.
        EngineDied: the engine ended, or did not serve in time.
    """
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
    async with local_engine(options, run_id=folder.root.name, log_path=log) as service:
        yield service
