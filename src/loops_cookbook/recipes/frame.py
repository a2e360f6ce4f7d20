"""The frame of a run, whatever its recipe: its service, who is told of it, and how its end is told.

A recipe does its work in the block of `open_frame`. Before the block the run is told as started and
its service is opened; within it, what the run waits for is known, and said where nothing moves.
However the block ends, `run_ended` is told, once the service is closed and with the run's last
counts; then the error goes on.
"""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import anyio

from loops_cookbook.recipes.checkpoints import (
    CheckpointRules,
    Checkpoints,
    checkpointer,
    require_checkpointer,
)
from loops_cookbook.recipes.ending import Ending
from loops_cookbook.recipes.memory import AnyMemory
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.rules import attempt_context
from loops_cookbook.records import Recorder, RunRow
from loops_cookbook.rollouts.keeper import Keeper, open_group, open_keeper
from loops_cookbook.rollouts.stall import Narrator
from loops_cookbook.rollouts.trial import AttemptContext
from loops_cookbook.rollouts.watchdog import watch_event_loop
from loops_cookbook.services.base import Service, ServiceFactory


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a command has around a run; a run in a test needs none of it."""

    rendering: anyio.CapacityLimiter | None = None
    """Threads for the renderer; None renders on the event loop."""
    narrator: Narrator | None = None
    """Knows what the run waits for; None: one of its own, which tells the recorder."""
    ending: Ending | None = None
    """Told of the end, and ends the process where tries ignore cancellation, or one holds the event
    loop; None: one of its own, and the run waits for them."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What a recipe works with."""

    service: Service
    recorder: Recorder
    narrator: Narrator
    ending: Ending
    """Its `counts` are the recipe's to set."""
    keeper: Keeper
    rendering: anyio.CapacityLimiter | None

    @asynccontextmanager
    async def attempting(self, plan: Plan) -> AsyncGenerator[AttemptContext]:
        """What attempts share, for the block; they are told of, and cannot hold the event loop."""
        renderer = plan.detection.renderer
        assert renderer is not None, "a plan that can run has a renderer"
        runtime = plan.runtime(self.service.sampler, renderer, self.rendering)
        context = attempt_context(plan, runtime, self.keeper)
        self.narrator.look_at(self.keeper, context.limits)
        bound = plan.clocks.longest
        watched = watch_event_loop(bound_seconds=bound, on_end=self.ending.tell_blocked)
        async with watched, runtime:
            yield context

    def checkpoints(self, memory: AnyMemory, rules: CheckpointRules) -> Checkpoints | None:
        """What keeps the policy, where the run keeps anything and its trainer can."""
        store = memory.savepoints
        if store is None or (trainer := checkpointer(self.service.trainer, self.recorder)) is None:
            return None
        rows = () if memory.past is None else memory.past.checkpoints
        return Checkpoints(trainer, store, rules, self.narrator, rows)

    async def load(self, path: str, *, with_optimizer: bool) -> None:
        """Let the trainer load a checkpoint.

        Raises:
            ServiceRefused: it cannot.
        """
        trainer = require_checkpointer(self.service.trainer, path)
        with self.narrator.waiting_for(f"{path} to be loaded"):
            await trainer.load(path, with_optimizer=with_optimizer)


@asynccontextmanager
async def open_frame(
    open_service: ServiceFactory,
    recorder: Recorder,
    row: RunRow,
    around: Surroundings | None = None,
) -> AsyncGenerator[Frame]:
    """Open a run's service, and see the run to its end.

    Args:
        open_service: opens the trainer and its sampler.
        recorder: told of everything, from `run_started` to `run_ended`, however it ends.
        row: what the run is; the service's own description is added.
        around: what a command has around it.

    Raises:
        UsageError: the service cannot be had.
        ServiceError: it refused, or could not be reached.
    """
    around = around or Surroundings()
    narrator = around.narrator or Narrator(recorder.note, now=anyio.current_time)
    end = around.ending or Ending(recorder)
    end.counts = lambda: row.counts
    async with open_keeper(end.on_stuck) as keeper:
        end.keeper = keeper
        recorder.run_started(row)
        try:
            async with open_group() as group:
                group.start_soon(narrator.watch)
                async with AsyncExitStack() as stack:
                    with narrator.waiting_for("the trainer and the sampler to start"):
                        service = await stack.enter_async_context(open_service())
                    recorder.run_started(replace(row, service=dict(service.description)))
                    yield Frame(service, recorder, narrator, end, keeper, around.rendering)
                group.cancel_scope.cancel()
        except BaseException as error:  # told, never kept
            end.tell_error(error)
            raise
        end.tell("done")
