"""Reinforcement learning: collect groups, judge them, train on a batch, publish, record.

Groups are collected beside the trainer's loop. In sync mode the gate holds them back while the
trainer works, in async mode it lets as many live as the bound on their age allows: nothing else
differs. Weights are published while attempts sample; an evaluation is awaited before the next
update, for it is of one policy version alone, and sampling goes on beside it.

Every attempt that was started gets exactly one fate: `trained` when the trainer has applied its
group's batch, `unused` or `discarded` when its group is rejected or the run ends first. However the
run ends, what is known is written before the exception goes on.
"""

from loops_cookbook.recipes.frame import Surroundings, open_frame
from loops_cookbook.recipes.memory import Memory
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.rl_run import RLRun
from loops_cookbook.records import Recorder, RunRow
from loops_cookbook.rundir.past import Past
from loops_cookbook.services.base import ServiceFactory


async def run_rl(
    plan: Plan,
    open_service: ServiceFactory,
    recorder: Recorder,
    row: RunRow,
    around: Surroundings | None = None,
    memory: Memory[Past] | None = None,
) -> None:
    """Carry a plan out, from the first evaluation to the last.

    Args:
        plan: the run.
        open_service: opens the trainer and its sampler.
        recorder: told of everything, from `run_started` to `run_ended`, however it ends.
        row: what the run is; the service's own description is added.
        around: what a command has around it.
        memory: what is known of before; None: the run is new, and nothing is kept of it.

    Raises:
        RunStopped: a rule ended the run, or a service failed for good.
        UsageError: the service cannot be had.
    """
    async with (
        open_frame(open_service, recorder, row, around) as frame,
        frame.attempting(plan) as context,
    ):
        run = RLRun(plan, frame, context, memory or Memory[Past]())
        # Until it is settled: what is in flight then can be given no fate any more.
        frame.ending.counts = run.unsettled
        try:
            await run.carry_out()
        finally:
            counts = run.settle()
            frame.ending.counts = lambda: counts
