"""Reinforcement learning: collect groups, judge them, train on a batch, publish, record.

Groups are collected beside the trainer's loop. In sync mode the gate holds them back while the
trainer works, in async mode it lets as many live as the bound on their age allows: nothing else
differs. Weights are published while attempts sample; an evaluation is awaited before the next
update, for it is of one policy version alone, and sampling goes on beside it.

Every attempt that was started gets exactly one fate: `trained` when the trainer has applied its
group's batch, `unused` or `discarded` when its group is rejected or the run ends first. However the
run ends, what is known is written before the exception goes on.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import anyio

from loops_cookbook.attempts import Attempt, Fate, Group
from loops_cookbook.errors import NoLearningSignal
from loops_cookbook.learning.batches import Batch, JudgedGroup
from loops_cookbook.recipes.collect import Collector
from loops_cookbook.recipes.ending import ending
from loops_cookbook.recipes.evaluation import Evaluations, is_due
from loops_cookbook.recipes.metrics import RunMetrics, UpdateFacts
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.rules import (
    adam_params,
    attempt_context,
    batcher,
    loss_spec,
    schedule_rules,
)
from loops_cookbook.recipes.tally import fates
from loops_cookbook.records import (
    TRAIN,
    GroupRow,
    Recorder,
    RolloutRow,
    RunRow,
    RunStatus,
    StepRow,
)
from loops_cookbook.rollouts.keeper import Keeper, open_group, open_keeper
from loops_cookbook.rollouts.scheduler import Scheduler
from loops_cookbook.rollouts.stall import Narrator
from loops_cookbook.rollouts.trial import AttemptContext
from loops_cookbook.rollouts.watchdog import watch_event_loop
from loops_cookbook.runtimes.base import Clocks
from loops_cookbook.services.base import Service, ServiceFactory

Fated = tuple[Attempt, Fate]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a command has around a run; a run in a test needs none of it."""

    rendering: anyio.CapacityLimiter | None = None
    """Threads for the renderer; None renders on the event loop."""
    narrator: Narrator | None = None
    """Knows what the run waits for; None: one of its own, which tells the recorder."""
    end_process: Callable[[RunStatus, Sequence[str]], None] | None = None
    """Told, after `run_ended`, how the run ended and why the process must end at once: tries ignore
    cancellation, or one holds the event loop. Without it the run waits for them."""


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
    async with open_keeper(run.on_stuck) as keeper:
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
        self.narrator = around.narrator or Narrator(recorder.note, now=anyio.current_time)
        self._plan = plan
        self._recorder = recorder
        self._row = row
        self._around = around
        self._ended: tuple[RunStatus, str | None] = ("running", None)
        self._counts: Mapping[str, int] = {}

    @property
    def on_stuck(self) -> Callable[[Sequence[str]], None] | None:
        """For the keeper: ends the process, where there is someone who can."""
        end_process = self._around.end_process
        if end_process is None:
            return None

        def stuck(jobs: Sequence[str]) -> None:
            status, reason = self._ended
            why = [reason] if reason and status != "interrupted" else []
            end_process(status, [*why, f"ended without waiting for {'; '.join(jobs)}"])

        return stuck

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
            run = RLRun(self._plan, service, context, self._recorder, self.narrator)
            bound = _longest(self._plan.clocks)
            watched = watch_event_loop(bound_seconds=bound, on_end=self._blocked(run))
            async with watched, runtime:
                try:
                    await run.carry_out()
                finally:
                    self._counts = run.settle()

    def end(self, status: RunStatus, reason: str | None = None) -> None:
        self._ended = (status, reason)
        self._recorder.run_ended(status, self._counts, reason)

    def _blocked(self, run: "RLRun") -> Callable[[str], None]:
        """For the watchdog: the run is over, and its attempts can be given no fate any more."""

        def told(why: str) -> None:
            self._counts = run.totals
            self.end("failed", why)
            if self._around.end_process is not None:
                self._around.end_process("failed", [why])

        return told


class RLRun:
    """One run of the RL recipe, and how far it came."""

    def __init__(
        self,
        plan: Plan,
        service: Service,
        shared: AttemptContext,
        recorder: Recorder,
        narrator: Narrator,
    ) -> None:
        self._plan = plan
        self._service = service
        self._recorder = recorder
        self._narrator = narrator
        self._metrics = RunMetrics()
        context = replace(shared, on_end=self._attempt_ended)
        self._evaluations = Evaluations(plan.sets, context, recorder, narrator)
        self._scheduler = Scheduler(context, plan.tasks, schedule_rules(plan))
        self._collector = Collector(
            batcher(plan),
            advantage=plan.config.training.advantage,
            rejected=self._group_rejected,
            placed=self._group_placed,
        )
        self._loss = loss_spec(plan, service)
        self._batch: Batch | None = None
        """Taken, and not known to be applied."""
        self._applied: list[Fated] = []
        """Of a batch that was applied and is in no row yet."""
        self._losses: set[tuple[Fate, str | None]] = set()
        """The ways in which attempts were lost so far."""
        self._update = 0
        """Updates applied so far."""
        self._version = 0
        """The policy version that is served."""
        self._mark = 0.0
        """When the last update, or the evaluation after it, ended."""

    @property
    def totals(self) -> dict[str, int]:
        """Counts over the run so far."""
        return self._metrics.totals

    async def carry_out(self) -> None:
        """Evaluate, then update after update until the plan is done or the tasks run out."""
        last = self._plan.config.training.updates
        with self._narrator.waiting_for(self._scheduler.told):
            async with self._scheduler.running() as groups, open_group() as beside:
                beside.start_soon(self._collector.collect, groups)
                await self._evaluate()
                while self._update != last and (batch := await self._next_batch()) is not None:
                    await self._train_on(batch)
                beside.cancel_scope.cancel()
        if not self._is_due():  # an end that was not known beforehand
            await self._evaluate()
        if self._update == 0:
            raise NoLearningSignal(
                f"the tasks ran out and no group of {self._scheduler.counts.started} could be "
                "trained on: see groups.jsonl for why, and choose tasks that the model solves some "
                "of the time"
            )

    def settle(self) -> dict[str, int]:
        """Give every attempt that has no fate yet the one that the end of the run gives it.

        Returns:
            The run's last counts.
        """
        untrained = [each.group for each in self._batch.groups] if self._batch else []
        left = [*untrained, *self._collector.close(), *self._scheduler.leftovers]
        told = [*self._applied, *(pair for group in left for pair in _surplus(group))]
        self._recorder.fates(_rows(told))
        return self._metrics.end(told, attempts_started=self._attempts_started)

    @property
    def _attempts_started(self) -> int:
        return self._scheduler.counts.started * self._plan.config.training.group_size

    def _is_due(self) -> bool:
        config = self._plan.config
        return is_due(self._update, every=config.evaluation.every, last=config.training.updates)

    def _attempt_ended(self, attempt: Attempt) -> None:
        """Tell of it, and of the first that is lost in each way; rollouts.jsonl has all of them."""
        self._recorder.attempt_ended(attempt, TRAIN)
        lost = attempt.discarded
        if lost is None or lost.fate is Fate.CANCELLED:
            return
        if (kind := (lost.fate, lost.exception)) not in self._losses:
            self._losses.add(kind)
            self._recorder.note(
                "warning",
                f"attempt {attempt.index} of group {attempt.group} (task {attempt.task!r}) is "
                f"{lost.fate}: {lost.detail}; more of this kind are only counted, and named in "
                "rollouts.jsonl",
            )

    def _group_rejected(self, judged: JudgedGroup) -> None:
        group, why = judged.group, judged.rejection
        assert why is not None
        self._recorder.group_settled(GroupRow.of(group, why, update=self._update + 1))
        self._recorder.fates(_rows(fates(group, why)))
        self._metrics.rejected(group, why)
        self._scheduler.rejected(group.serial)

    def _group_placed(self, judged: JudgedGroup, batch: int) -> None:
        self._recorder.group_settled(GroupRow.of(judged.group, None, update=batch + 1))

    async def _next_batch(self) -> Batch | None:
        with self._narrator.waiting_for(f"the batch of update {self._update + 1}"):
            return await self._collector.next()

    async def _train_on(self, batch: Batch) -> None:
        self._batch, update = batch, self._update + 1
        adam, key = adam_params(self._plan, update), f"update-{update}"
        began = anyio.current_time()
        trainer = self._service.trainer
        with self._narrator.waiting_for(f"the trainer, at work on update {update}"):
            result = await trainer.train(batch.datums, self._loss, adam, key=key)
        # It is applied: whatever comes now, its attempts were trained, and never again.
        self._batch = None
        self._applied = [pair for judged in batch.groups for pair in fates(judged.group, None)]
        with self._narrator.waiting_for(f"the weights of update {update} to be published"):
            version = await trainer.publish(key=key)
        now = anyio.current_time()
        facts = UpdateFacts(
            trained=[judged.group for judged in batch.groups],
            datums=batch.datums,
            result=result,
            adam=adam,
            trained_version=self._version,
            published_version=version,
            attempts_started=self._attempts_started,
            update_seconds=now - self._mark,
            training_seconds=now - began,
        )
        self._update, self._version, self._mark = update, version, now
        self._record(facts)
        self._scheduler.published(version, len(batch.groups))
        if self._is_due():
            await self._evaluate()

    def _record(self, facts: UpdateFacts) -> None:
        """Write an update's row right after those of its attempts: no kill comes easily between."""
        metrics = self._metrics.update(facts)
        applied, self._applied = self._applied, []
        self._recorder.fates(_rows(applied))
        self._recorder.update(
            StepRow(
                update=self._update, at=time.time(), metrics=metrics, totals=self._metrics.totals
            )
        )

    async def _evaluate(self) -> None:
        await self._evaluations.run(update=self._update, policy_version=self._version)
        self._mark = anyio.current_time()


def _longest(clocks: Clocks) -> float:
    return max(
        clocks.rollout_seconds,
        clocks.setup_seconds,
        clocks.grading_seconds,
        clocks.release_seconds,
    )


def _surplus(group: Group) -> list[Fated]:
    return [
        (attempt, Fate.SURPLUS if attempt.discarded is None else attempt.discarded.fate)
        for attempt in group.attempts
    ]


def _rows(fated: Iterable[Fated]) -> list[RolloutRow]:
    return [RolloutRow.of(attempt, fate) for attempt, fate in fated]
