"""Reinforcement learning: collect groups, judge them, train on a batch, publish, record.

Every attempt that was started gets exactly one fate here: `trained` when the trainer has applied
its group's batch, `unused` or `discarded` when its group is rejected or the run ends first. However
the run ends, what is known is written before the exception goes on.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import anyio
from anyio.abc import ObjectReceiveStream

from loops_cookbook.attempts import Attempt, Fate, Group
from loops_cookbook.errors import LoopsError, NoLearningSignal
from loops_cookbook.learning.batches import Batch, Batcher, JudgedGroup
from loops_cookbook.recipes.evaluation import evaluate, is_due
from loops_cookbook.recipes.metrics import MetricRow, RunMetrics, UpdateFacts, fates
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.rules import adam_params, attempt_context, loss_spec, schedule_rules
from loops_cookbook.recipes.scores import evaluation_metrics
from loops_cookbook.records import (
    EvaluationRow,
    GroupRow,
    Recorder,
    RolloutRow,
    RunRow,
    RunStatus,
    StepRow,
)
from loops_cookbook.rollouts.keeper import Keeper, open_keeper
from loops_cookbook.rollouts.scheduler import Scheduler
from loops_cookbook.rollouts.watchdog import watch_event_loop
from loops_cookbook.runtimes.base import Runtime
from loops_cookbook.services.base import Service, ServiceFactory


async def run_rl(
    plan: Plan,
    open_service: ServiceFactory,
    recorder: Recorder,
    row: RunRow,
    *,
    rendering: anyio.CapacityLimiter | None = None,
    on_stuck: Callable[[RunStatus, Sequence[str]], None] | None = None,
) -> None:
    """Carry a plan out, from the first evaluation to the last.

    Args:
        plan: the run.
        open_service: opens the trainer and its sampler.
        recorder: told of everything, from `run_started` to `run_ended`, however it ends.
        row: what the run is; the service's own description is added.
        rendering: threads for the renderer; None renders on the event loop.
        on_stuck: told, after `run_ended`, how the run ended and which tries ignore cancellation;
            without it the run waits for them.

    Raises:
        RunStopped: a rule ended the run, or a service failed for good.
        UsageError: the service cannot be had.
    """
    run = _Run(plan, recorder, row, rendering)

    def stuck(jobs: Sequence[str]) -> None:
        if on_stuck is not None:
            on_stuck(run.status, jobs)

    async with open_keeper(stuck if on_stuck is not None else None) as keeper:
        recorder.run_started(row)
        try:
            async with open_service() as service:
                await run.with_service(service, keeper)
        except BaseException as error:  # told, never kept
            run.end(*_ending(error))
            raise
        run.end("done")


class _Run:
    """A run from before its service is there until it is told how it ended."""

    def __init__(
        self,
        plan: Plan,
        recorder: Recorder,
        row: RunRow,
        rendering: anyio.CapacityLimiter | None,
    ) -> None:
        self._plan = plan
        self._rendering = rendering
        self._recorder = recorder
        self._row = row
        self.status: RunStatus = "running"
        self._counts: dict[str, int] = {}

    async def with_service(self, service: Service, keeper: Keeper) -> None:
        self._recorder.run_started(replace(self._row, service=dict(service.description)))
        plan, clocks = self._plan, self._plan.clocks
        renderer = plan.detection.renderer
        assert renderer is not None, "a plan that can run has a renderer"
        runtime = plan.runtime(service.sampler, renderer, self._rendering)
        longest = max(
            clocks.rollout_seconds,
            clocks.setup_seconds,
            clocks.grading_seconds,
            clocks.release_seconds,
        )
        async with watch_event_loop(bound_seconds=longest), runtime:
            run = RLRun(plan, service, runtime, self._recorder, keeper)
            try:
                await run.carry_out()
            finally:
                self._counts = run.settle()

    def end(self, status: RunStatus, reason: str | None = None) -> None:
        self.status = status
        self._recorder.run_ended(status, self._counts, reason)


class RLRun:
    """One run of the RL recipe, and how far it came."""

    def __init__(
        self, plan: Plan, service: Service, runtime: Runtime, recorder: Recorder, keeper: Keeper
    ) -> None:
        self._plan = plan
        self._service = service
        self._recorder = recorder
        self._metrics = RunMetrics()
        self._context = attempt_context(plan, runtime, keeper, recorder)
        self._scheduler = Scheduler(self._context, plan.tasks, schedule_rules(plan))
        training = plan.config.training
        self._batcher = Batcher(
            training.groups_per_update,
            max_consecutive_unusable=training.max_consecutive_unusable_groups,
            advantage=training.advantage,
            aggregation=training.loss_aggregation,
        )
        self._loss = loss_spec(plan, service)
        self._batches: deque[Batch] = deque()
        """Full, and not applied yet."""
        self._applied: list[tuple[Attempt, Fate]] = []
        """Of a batch that was applied and is in no row yet."""
        self._losses: set[tuple[Fate, str | None]] = set()
        """The ways in which attempts were lost so far."""
        self._update = 0
        """Updates applied so far."""
        self._version = 0
        """The policy version that is served."""
        self._mark = 0.0
        """When the last update, or the evaluation after it, ended."""

    async def carry_out(self) -> None:
        """Evaluate, then update after update until the plan is done or the tasks run out."""
        await self._evaluate()
        self._mark = anyio.current_time()
        async with self._scheduler.running() as groups:
            while self._update != self._last and await self._has_batch(groups):
                await self._train_on_next()
        if not self._is_due():
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
        waiting = [judged for batch in self._batches for judged in (*batch.groups, *batch.rejected)]
        waiting += self._batcher.leftovers
        left = [judged.group for judged in waiting if judged.rejection is None]
        surplus = [pair for g in (*left, *self._scheduler.leftovers) for pair in _surplus(g)]
        self._recorder.fates(_rows(surplus))
        told = [pair for judged in waiting if judged.rejection for pair in _fates(judged)]
        return self._metrics.end(
            [*self._applied, *told, *surplus], attempts_started=self._attempts_started
        )

    @property
    def _last(self) -> int | None:
        return self._plan.config.training.updates

    @property
    def _attempts_started(self) -> int:
        return self._scheduler.counts.started * self._plan.config.training.group_size

    def _is_due(self) -> bool:
        return is_due(self._update, every=self._plan.config.evaluation.every, last=self._last)

    async def _has_batch(self, groups: ObjectReceiveStream[Group]) -> bool:
        """Take groups until a batch is full; False when there is nothing more to train on."""
        while not self._batches:
            try:
                group = await groups.receive()
            except anyio.EndOfStream:
                last = self._batcher.flush()
                self._batches.extend([last] if last else [])
                break
            try:
                judged = self._batcher.add(group)
            except NoLearningSignal:  # this group is the last one to be told of
                self._note_group(next(j for j in self._batcher.leftovers if j.group is group))
                raise
            self._note_group(judged.group)
            self._batches.extend(judged.batches)
        return bool(self._batches)

    def _note_group(self, judged: JudgedGroup) -> None:
        self._warn_of_losses(judged.group)
        self._recorder.group_settled(
            GroupRow.of(judged.group, judged.rejection, update=self._update + 1)
        )
        if judged.rejection is not None:
            self._recorder.fates(_rows(_fates(judged)))
            self._scheduler.rejected(judged.group.serial)

    def _warn_of_losses(self, group: Group) -> None:
        """Tell of the first attempt that is lost in each way; rollouts.jsonl has all of them."""
        for attempt in group.attempts:
            lost = attempt.discarded
            if lost is None or (kind := (lost.fate, lost.exception)) in self._losses:
                continue
            self._losses.add(kind)
            self._recorder.note(
                "warning",
                f"attempt {attempt.index} of group {group.serial} (task {group.task!r}) is "
                f"{lost.fate}: {lost.detail}; more of this kind are only counted, and named in "
                "rollouts.jsonl",
            )

    async def _train_on_next(self) -> None:
        batch, update = self._batches[0], self._update + 1
        adam, key = adam_params(self._plan, update), f"update-{update}"
        began = anyio.current_time()
        trainer = self._service.trainer
        result = await trainer.train(batch.datums, self._loss, adam, key=key)
        # It is applied: whatever comes now, its attempts were trained, and never again.
        self._batches.popleft()
        self._applied = [pair for judged in batch.groups for pair in _fates(judged)]
        self._recorder.fates(_rows(self._applied))
        self._applied += [pair for judged in batch.rejected for pair in _fates(judged)]
        version = await trainer.publish(key=key)
        now = anyio.current_time()
        metrics = self._metrics.update(
            UpdateFacts(
                trained=[judged.group for judged in batch.groups],
                rejected=[
                    (each.group, each.rejection) for each in batch.rejected if each.rejection
                ],
                datums=batch.datums,
                result=result,
                adam=adam,
                trained_version=self._version,
                published_version=version,
                attempts_started=self._attempts_started,
                update_seconds=now - self._mark,
                training_seconds=now - began,
            )
        )
        self._applied, self._update, self._version = [], update, version
        await self._finish_update(metrics)
        self._scheduler.published(version, len(batch.groups))

    async def _finish_update(self, metrics: MetricRow) -> None:
        """Evaluate where it is due, and record the update, also if the evaluation is cut."""
        row = StepRow(
            update=self._update, at=time.time(), metrics=metrics, totals=self._metrics.totals
        )
        try:
            if self._is_due():
                for evaluation in await self._evaluate():
                    row = replace(row, metrics={**row.metrics, **evaluation_metrics(evaluation)})
        finally:
            self._recorder.update(row)
            self._mark = anyio.current_time()

    async def _evaluate(self) -> list[EvaluationRow]:
        return await evaluate(
            self._plan.sets,
            self._context,
            self._recorder,
            update=self._update,
            policy_version=self._version,
        )


def _ending(error: BaseException) -> tuple[RunStatus, str]:
    if isinstance(error, NoLearningSignal):
        return "stopped", str(error)
    if isinstance(error, LoopsError):
        return "failed", str(error)
    if isinstance(error, Exception):
        return "failed", f"a bug of loops-cookbook: {type(error).__name__}: {error}"
    return "interrupted", "stopped by a signal"


def _fates(judged: JudgedGroup) -> list[tuple[Attempt, Fate]]:
    return fates(judged.group, judged.rejection)


def _surplus(group: Group) -> list[tuple[Attempt, Fate]]:
    return [
        (attempt, Fate.SURPLUS if attempt.discarded is None else attempt.discarded.fate)
        for attempt in group.attempts
    ]


def _rows(fated: Iterable[tuple[Attempt, Fate]]) -> list[RolloutRow]:
    return [RolloutRow.of(attempt, fate) for attempt, fate in fated]
