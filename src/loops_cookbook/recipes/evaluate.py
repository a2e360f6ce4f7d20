"""Evaluation alone: some policies on the sets of a config, one after another, and no training.

One service serves them all, loaded with one checkpoint after the other, so every policy meets the
same sets under the same limits, clocks and seeds. Of an RL config the sets are run, of an SFT
config the held-out rows are scored and sampled. What is known is recorded when it is known,
however the evaluation ends.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

from loops_cookbook.config.environment import Environment
from loops_cookbook.config.load import AnyConfig, LoadedConfig
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.errors import ConfigError, ServiceRefused
from loops_cookbook.recipes.comparison import Comparison, compare
from loops_cookbook.recipes.evaluation import Evaluations
from loops_cookbook.recipes.frame import Frame, Surroundings, open_frame
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.plans import AnyPlan, plan_config
from loops_cookbook.recipes.sft_evaluation import HeldOut, Look, scorer
from loops_cookbook.recipes.sft_plan import HELD_OUT, SFTPlan, plan_sft
from loops_cookbook.recipes.start import Start
from loops_cookbook.records import EvaluationRow, Recorder, RunRow
from loops_cookbook.services.base import Checkpointer, ServiceFactory
from loops_cookbook.services.checked import CheckedSampler

BASE = "base"
"""What the policy is called that no training has touched."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy to evaluate."""

    name: str
    """As it was called."""
    start: Start | None
    """None: as its model is."""


Evaluate: TypeAlias = Callable[[str, int, int], Awaitable[None]]
"""Evaluates the policy that is served, by its name, its updates and its version."""


def plan_evaluation(
    loaded: LoadedConfig[AnyConfig],
    environment: Environment,
    values: Mapping[str, str],
    scope: str | None,
) -> AnyPlan:
    """Look at everything that a config names, but for rows to train on.

    Raises:
        UsageError: something in it cannot stand, or there is nothing to evaluate.
    """
    if (sft := loaded.of_recipe(SFTConfig)) is not None:
        if sft.config.data.held_out is None:
            raise ConfigError(
                f"{loaded.path}: has no held-out rows to evaluate; name a file of them in "
                "data.held_out"
            )
        return plan_sft(sft, environment, values, scope, for_training=False)
    plan = plan_config(loaded, environment, values, scope)
    if isinstance(plan, Plan) and not plan.sets:
        raise ConfigError(
            f"{loaded.path}: has no set to evaluate; add [evaluation.sets.held_out] with "
            'tasks = "held_out.jsonl"'
        )
    return plan


async def run_evaluation(
    plan: AnyPlan,
    candidates: Sequence[Candidate],
    open_service: ServiceFactory,
    recorder: Recorder,
    row: RunRow,
    around: Surroundings | None = None,
) -> None:
    """Evaluate policies, one after another.

    Args:
        plan: what `plan_evaluation` gave.
        candidates: the policies, each of another name.
        open_service: opens the trainer and its sampler.
        recorder: told of everything, from `run_started` to `run_ended`, however it ends.
        row: what the evaluation is; the service's own description is added.
        around: what a command has around it.

    Raises:
        RunStopped: a service failed for good.
        UsageError: the service cannot be had.
    """
    async with (
        open_frame(open_service, recorder, row, around) as frame,
        _ready(plan, frame) as evaluate,
    ):
        # A trainer that has loaded a checkpoint has no way back to its model.
        in_turn = sorted(candidates, key=lambda each: each.start is not None)
        for number, candidate in enumerate(in_turn, start=1):
            update, version = await _serve(candidate, frame, number)
            await evaluate(candidate.name, update, version)


def in_order(rows: Sequence[EvaluationRow], candidates: Sequence[Candidate]) -> list[EvaluationRow]:
    """The rows set by set, and in each in the candidates' order."""
    sets = list(dict.fromkeys(row.set for row in rows))
    names = [candidate.name for candidate in candidates]
    return sorted(rows, key=lambda row: (sets.index(row.set), names.index(row.policy or "")))


def comparisons(rows: Sequence[EvaluationRow], candidates: Sequence[Candidate]) -> list[Comparison]:
    """Every later policy beside the first, on each set that has attempts with a reward of both."""
    sets: dict[str, dict[str | None, EvaluationRow]] = {}
    for row in rows:
        sets.setdefault(row.set, {})[row.policy] = row
    first, *others = (candidate.name for candidate in candidates)
    found = [compare(by[first], by[other]) for by in sets.values() for other in others]
    return [each for each in found if each is not None]


async def _serve(candidate: Candidate, frame: Frame, number: int) -> tuple[int, int]:
    """Let the sampler serve a policy; its updates, and the version to ask for."""
    start, trainer = candidate.start, frame.service.trainer
    if start is None:
        return 0, 0
    if not isinstance(trainer, Checkpointer):
        raise ServiceRefused(
            f"{candidate.name}: the trainer has no `load`, so no checkpoint can be evaluated; "
            "give it one, or evaluate the policy as it is"
        )
    with frame.narrator.waiting_for(f"{candidate.name} to be loaded and served"):
        if start.is_here:  # the embedded engine serves what it has loaded
            version = step = await trainer.load(start.path, with_optimizer=False)
        else:
            # With the optimizer, for its step: at step 0 a service serves the base model.
            step = await trainer.load(start.path, with_optimizer=True)
            version = await trainer.publish(key=f"evaluation-{number}")
    return step if start.located is None else start.located.row.update, version


@asynccontextmanager
async def _ready(plan: AnyPlan, frame: Frame) -> AsyncGenerator[Evaluate]:
    """What evaluates, as the recipe has it."""
    if isinstance(plan, SFTPlan):
        yield _held_out(plan, frame)
        return
    async with frame.attempting(plan) as context:
        evaluations = Evaluations(plan.sets, context, frame.recorder, frame.narrator)

        async def evaluate(name: str, update: int, version: int) -> None:
            await evaluations.run(update=update, policy_version=version, policy=name)

        yield evaluate


def _held_out(plan: SFTPlan, frame: Frame) -> Evaluate:
    renderer, service = plan.detection.renderer, frame.service
    assert renderer is not None, "a plan that can run has a renderer"
    assert plan.held_out is not None, "a plan of an evaluation has something to evaluate"
    held_out = HeldOut(plan.held_out, plan.config, renderer, frame.recorder)
    sampler = CheckedSampler(service.sampler, vocabulary=plan.vocabulary)

    async def evaluate(name: str, update: int, version: int) -> None:
        with frame.narrator.waiting_for(f"the evaluation of {HELD_OUT}"):
            # The same key is the same operation, whatever weights there are by then.
            look = Look(f"{update} of {name}", update, version, name)
            await held_out.evaluate(scorer(service.trainer), sampler, look)

    return evaluate
