"""Evaluation alone: some policies on the sets of a config, one after another, and no training.

One service serves them all, loaded with one checkpoint after the other, so every policy meets the
same sets under the same limits, clocks and seeds. Of an RL config the sets are run, of an SFT
config the held-out rows are scored and sampled. What is known is recorded when it is known,
however the evaluation ends.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import anyio

from loops_cookbook.config.environment import Environment
from loops_cookbook.config.load import AnyConfig, LoadedConfig
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.errors import ConfigError, ServiceRefused
from loops_cookbook.recipes.comparison import Comparison, compare
from loops_cookbook.recipes.ending import Ending, ending
from loops_cookbook.recipes.evaluation import Evaluations
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.plans import AnyPlan, plan_config
from loops_cookbook.recipes.rl import Surroundings
from loops_cookbook.recipes.rules import attempt_context
from loops_cookbook.recipes.sft_evaluation import HeldOut, Look, scorer
from loops_cookbook.recipes.sft_plan import HELD_OUT, SFTPlan, plan_sft
from loops_cookbook.recipes.start import Start
from loops_cookbook.records import EvaluationRow, Recorder, RunRow
from loops_cookbook.rollouts.keeper import Keeper, open_group, open_keeper
from loops_cookbook.rollouts.stall import Narrator
from loops_cookbook.rollouts.watchdog import watch_event_loop
from loops_cookbook.services.base import Checkpointer, Service, ServiceFactory, Trainer
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
    run = _Run(plan, recorder, row, around or Surroundings())
    async with open_keeper(run.ending.on_stuck) as keeper:
        run.ending.keeper = keeper
        recorder.run_started(row)
        try:
            async with open_group() as group:
                group.start_soon(run.narrator.watch)
                await run.carry_out(candidates, open_service, keeper)
                group.cancel_scope.cancel()
        except BaseException as error:  # told, never kept
            status, reason = ending(error)
            run.ending.tell(status, {}, reason)
            raise
        run.ending.tell("done", {})


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


class _Run:
    """An evaluation from before its service is there until it is told how it ended."""

    def __init__(
        self, plan: AnyPlan, recorder: Recorder, row: RunRow, around: Surroundings
    ) -> None:
        self.ending = around.ending or Ending(recorder)
        self.narrator = around.narrator or Narrator(recorder.note, now=anyio.current_time)
        self._plan = plan
        self._recorder = recorder
        self._row = row
        self._around = around

    async def carry_out(
        self, candidates: Sequence[Candidate], open_service: ServiceFactory, keeper: Keeper
    ) -> None:
        async with self._opened(open_service) as service, self._ready(service, keeper) as evaluate:
            # A trainer that has loaded a checkpoint has no way back to its model.
            in_turn = sorted(candidates, key=lambda each: each.start is not None)
            for number, candidate in enumerate(in_turn, start=1):
                update, version = await self._serve(candidate, service.trainer, number)
                await evaluate(candidate.name, update, version)

    @asynccontextmanager
    async def _opened(self, open_service: ServiceFactory) -> AsyncGenerator[Service]:
        async with AsyncExitStack() as stack:
            with self.narrator.waiting_for("the service to start"):
                service = await stack.enter_async_context(open_service())
            self._recorder.run_started(replace(self._row, service=dict(service.description)))
            yield service

    async def _serve(self, candidate: Candidate, trainer: Trainer, number: int) -> tuple[int, int]:
        """Let the sampler serve a policy; its updates, and the version to ask for."""
        start = candidate.start
        if start is None:
            return 0, 0
        if not isinstance(trainer, Checkpointer):
            raise ServiceRefused(
                f"{candidate.name}: the trainer has no `load`, so no checkpoint can be evaluated; "
                "give it one, or evaluate the policy as it is"
            )
        with self.narrator.waiting_for(f"{candidate.name} to be loaded and served"):
            if start.is_here:  # the embedded engine serves what it has loaded
                version = step = await trainer.load(start.path, with_optimizer=False)
            else:
                # With the optimizer, for its step: at step 0 a service serves the base model.
                step = await trainer.load(start.path, with_optimizer=True)
                version = await trainer.publish(key=f"evaluation-{number}")
        return step if start.located is None else start.located.row.update, version

    @asynccontextmanager
    async def _ready(self, service: Service, keeper: Keeper) -> AsyncGenerator[Evaluate]:
        """What evaluates, as the recipe has it."""
        plan = self._plan
        if isinstance(plan, SFTPlan):
            yield self._held_out(plan, service)
            return
        renderer = plan.detection.renderer
        assert renderer is not None, "a plan that can run has a renderer"
        runtime = plan.runtime(service.sampler, renderer, self._around.rendering)
        context = attempt_context(plan, runtime, keeper)
        self.narrator.look_at(keeper, context.limits)
        evaluations = Evaluations(plan.sets, context, self._recorder, self.narrator)

        async def evaluate(name: str, update: int, version: int) -> None:
            await evaluations.run(update=update, policy_version=version, policy=name)

        bound = plan.clocks.longest
        watched = watch_event_loop(bound_seconds=bound, on_end=self.ending.tell_blocked)
        async with watched, runtime:
            yield evaluate

    def _held_out(self, plan: SFTPlan, service: Service) -> Evaluate:
        renderer = plan.detection.renderer
        assert renderer is not None, "a plan that can run has a renderer"
        assert plan.held_out is not None, "a plan of an evaluation has something to evaluate"
        held_out = HeldOut(plan.held_out, plan.config, renderer, self._recorder)
        sampler = CheckedSampler(service.sampler, vocabulary=plan.vocabulary)

        async def evaluate(name: str, update: int, version: int) -> None:
            with self.narrator.waiting_for(f"the evaluation of {HELD_OUT}"):
                # The same key is the same operation, whatever weights there are by then.
                look = Look(f"{update} of {name}", update, version, name)
                await held_out.evaluate(scorer(service.trainer), sampler, look)

        return evaluate
