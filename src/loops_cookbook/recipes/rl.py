"""Reinforcement learning: collect groups, judge them, train on a batch, publish, record.

Groups are collected beside the trainer's loop. In sync mode the gate holds them back while the
trainer works, in async mode it lets as many live as the bound on their age allows: nothing else
differs. Weights are published while attempts sample; an evaluation is awaited before the next
update, for it is of one policy version alone, and sampling goes on beside it.

Every attempt that was started gets exactly one fate: `trained` when the trainer has applied its
group's batch, `unused` or `discarded` when its group is rejected or the run ends first. However the
run ends, what is known is written before the exception goes on.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import anyio

from loops_cookbook.recipes.ending import Ending, ending
from loops_cookbook.recipes.memory import Memory
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.rl_run import RLRun
from loops_cookbook.recipes.rules import attempt_context
from loops_cookbook.records import Recorder, RunRow, RunStatus
from loops_cookbook.rollouts.keeper import Keeper, open_group, open_keeper
from loops_cookbook.rollouts.stall import Narrator
from loops_cookbook.rollouts.watchdog import watch_event_loop
from loops_cookbook.rundir.past import Past
from loops_cookbook.services.base import ServiceFactory


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
    memory: Memory[Past] = field(default_factory=Memory[Past])
    """What is known of before, and where it is kept."""


async def run_rl(
    plan: Plan,
    open_service: ServiceFactory,
    recorder: Recorder,
    row: RunRow,
    around: Surroundings | None = None,
) -> None:
    """Carry a plan out, from the first evaluation to the last.

    Args:
        plan: the run.
        open_service: opens the trainer and its sampler.
        recorder: told of everything, from `run_started` to `run_ended`, however it ends.
        row: what the run is; the service's own description is added.
        around: what a command has around it.

    Raises:
        RunStopped: a rule ended the run, or a service failed for good.
        UsageError: the service cannot be had.
    """
    run = _Run(plan, recorder, row, around or Surroundings())
    async with open_keeper(run.ending.on_stuck) as keeper:
        run.ending.keeper = keeper
        recorder.run_started(row)
        try:
            async with open_group() as group:
                group.start_soon(run.narrator.watch)
                await run.carry_out(open_service, keeper)
                group.cancel_scope.cancel()
        except BaseException as error:  # told, never kept
            run.end(*ending(error))
            raise
        run.end("done")


class _Run:
    """A run from before its service is there until it is told how it ended."""

    def __init__(self, plan: Plan, recorder: Recorder, row: RunRow, around: Surroundings) -> None:
        self.ending = around.ending or Ending(recorder)
        self.narrator = around.narrator or Narrator(recorder.note, now=anyio.current_time)
        self._plan = plan
        self._recorder = recorder
        self._row = row
        self._around = around
        self._counts: Mapping[str, int] = {}

    async def carry_out(self, open_service: ServiceFactory, keeper: Keeper) -> None:
        async with AsyncExitStack() as stack:
            with self.narrator.waiting_for("the trainer and the sampler to start"):
                service = await stack.enter_async_context(open_service())
            self._recorder.run_started(replace(self._row, service=dict(service.description)))
            renderer = self._plan.detection.renderer
            assert renderer is not None, "a plan that can run has a renderer"
            runtime = self._plan.runtime(service.sampler, renderer, self._around.rendering)
            context = attempt_context(self._plan, runtime, keeper)
            self.narrator.look_at(keeper, context.limits)
            memory = self._around.memory
            run = RLRun(self._plan, service, context, self._recorder, self.narrator, memory)
            # What is in flight then can be given no fate any more.
            self.ending.counts = run.unsettled
            bound = self._plan.clocks.longest
            watched = watch_event_loop(bound_seconds=bound, on_end=self.ending.tell_blocked)
            async with watched, runtime:
                try:
                    await run.carry_out()
                finally:
                    counts = self._counts = run.settle()
                    self.ending.counts = lambda: counts

    def end(self, status: RunStatus, reason: str | None = None) -> None:
        self.ending.tell(status, self._counts, reason)
