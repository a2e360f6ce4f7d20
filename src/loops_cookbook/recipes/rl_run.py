"""The loop of an RL run: the next batch, an update, its records, and what comes between two.

A batch is kept before it is sent, and its attempts are told as trained once the trainer has applied
it: whatever comes in between, it is in the weights exactly once. A run that goes on loads what was
kept last, applies the batches that were sent since, and starts the groups that were cut again.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import anyio

from loops_cookbook.attempts import Attempt, Fate, Group
from loops_cookbook.errors import NoLearningSignal
from loops_cookbook.learning.batches import Batch, JudgedGroup
from loops_cookbook.recipes.before import held_by
from loops_cookbook.recipes.checkpoints import CheckpointRules, Standing, score_of
from loops_cookbook.recipes.collect import Collector
from loops_cookbook.recipes.evaluation import Evaluations, is_due
from loops_cookbook.recipes.frame import Frame
from loops_cookbook.recipes.memory import Memory
from loops_cookbook.recipes.metrics import BatchFacts, Counted, OutcomeFacts, RunMetrics
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.producers import retries_of
from loops_cookbook.recipes.rules import (
    adam_params,
    batcher,
    loss_spec,
    planned_updates,
    schedule_rules,
)
from loops_cookbook.recipes.sent import SentUpdate, from_kept, to_keep
from loops_cookbook.recipes.tally import fate_counts, rollout_rows, token_counts, told_of_cuts
from loops_cookbook.records import TRAIN, EvaluationRow, GroupRow, RolloutRow, StepRow
from loops_cookbook.rollouts.attempt import GroupStart
from loops_cookbook.rollouts.keeper import open_group
from loops_cookbook.rollouts.scheduler import Scheduler
from loops_cookbook.rollouts.trial import AttemptContext
from loops_cookbook.rundir.past import Past
from loops_cookbook.services.base import StepResult


class RLRun:
    """One run of the RL recipe, and how far it came."""

    def __init__(
        self,
        plan: Plan,
        frame: Frame,
        shared: AttemptContext,
        memory: Memory[Past],
    ) -> None:
        past = memory.past or Past()
        recorder, narrator = frame.recorder, frame.narrator
        self._plan = plan
        self._frame = frame
        self._service = frame.service
        self._recorder = recorder
        self._narrator = narrator
        self._memory = memory
        self._past = past
        self._metrics = RunMetrics(_counted(past))
        context = replace(shared, on_end=self._attempt_ended)
        self._evaluations = Evaluations(plan.sets, context, recorder, narrator)
        self._scheduler = Scheduler(
            context, plan.tasks, schedule_rules(plan, past), on_start=self._group_started
        )
        self._collector = Collector(
            batcher(plan, past),
            advantage=plan.config.training.advantage,
            rejected=self._group_rejected,
            placed=self._group_placed,
        )
        self._loss = loss_spec(plan, frame.service)
        training = plan.config.training
        rules = CheckpointRules(training.checkpoint_every, training.keep)
        self._checkpoints = frame.checkpoints(memory, rules)
        self._savepoints = memory.savepoints if self._checkpoints is not None else None
        self._batch: Batch | None = None
        """Taken, and not known to be applied."""
        self._applied: Sequence[RolloutRow] = ()
        """Of a batch that was applied and is in no row yet."""
        self._told: set[object] = set()
        """What is told once: the ways in which attempts were lost, and that replies are cut."""
        self._unfinished: set[int] = set(past.again)
        """Groups that were started, and neither trained nor rejected."""
        self._next_serial = past.next_serial
        self._update = past.update
        """Updates applied so far."""
        self._scores: Sequence[EvaluationRow] = past.evaluations
        """The evaluations of the policy as it is."""
        self._next_row = past.update + 1
        """The update in whose row a group counts that is started now, or rejected."""
        self._version = 0
        """The policy version that is served."""
        self._mark = 0.0
        """When the last update, or the evaluation after it, ended."""

    def unsettled(self) -> dict[str, int]:
        """The run's last counts, where it ends at once: what has no row yet stays in flight."""
        return self._metrics.end((), attempts_started=self._attempts_started)

    async def carry_out(self) -> None:
        """Evaluate, then update after update until the plan is done or the tasks run out."""
        last = self._plan.config.training.updates
        await self._begin()
        with self._narrator.waiting_for(self._scheduler.told):
            async with self._scheduler.running() as groups, open_group() as beside:
                beside.start_soon(self._collector.collect, groups)
                await self._look(is_last=self._update == last)
                while self._update != last and (batch := await self._next_batch()) is not None:
                    await self._train_on(batch)
                beside.cancel_scope.cancel()
        if self._update == 0:
            raise NoLearningSignal(
                f"the tasks ran out and no group of {self._scheduler.counts.started} could be "
                "trained on: see groups.jsonl for why, and choose tasks that the model solves some "
                "of the time"
            )
        if self._update != last:  # an end that was not known beforehand
            await self._look(is_last=True)

    def settle(self) -> dict[str, int]:
        """Give every attempt that has no fate yet the one that the end of the run gives it.

        Returns:
            The run's last counts.
        """
        untrained: list[Group] = []
        if self._batch is not None:
            untrained = [each.group for each in self._batch.groups]
            if self._savepoints is not None:  # it is not known to be applied: it is sampled anew
                self._savepoints.updates.forget(self._update + 1)
        left = [*untrained, *self._collector.close(), *self._scheduler.leftovers]
        surplus = [row for group in left for row in rollout_rows(group, Fate.SURPLUS)]
        told = [*self._applied, *surplus]
        self._recorder.fates(told)
        return self._metrics.end(told, attempts_started=self._attempts_started)

    @property
    def _attempts_started(self) -> int:
        size = self._plan.config.training.group_size
        return self._past.attempts_started + self._scheduler.counts.started * size

    def _is_due(self) -> bool:
        config = self._plan.config
        return is_due(self._update, every=config.evaluation.every, last=config.training.updates)

    async def _begin(self) -> None:
        """Be where the run stood, or at its first weights."""
        memory, past, trainer = self._memory, self._past, self._service.trainer
        if memory.past is None and memory.start is None:
            return
        if past.lost:
            self._recorder.fates(past.lost)
        held = held_by(self._service, self._recorder)
        again = [update for update in past.kept if held is None or update > past.recorded]
        if held is None:
            await self._load()
        for update in again:
            key = None if held is None else held.sent
            await self._apply_again(update, key or memory.key(f"update-{update}"))
        if past.update <= past.recorded:  # else it was published with its row
            self._version = await trainer.publish(key=memory.key(f"begin-{self._update}"))
        self._scheduler.published(self._version, 0)
        self._mark = anyio.current_time()

    async def _load(self) -> None:
        past = self._past
        path = self._memory.start if past.checkpoint is None else past.checkpoint.path
        if path is not None:
            await self._frame.load(path, with_optimizer=past.checkpoint is not None)

    async def _apply_again(self, update: int, key: str) -> None:
        assert self._memory.savepoints is not None, "a run that goes on has them"
        sent = from_kept(self._memory.savepoints.updates.read(update))
        began = anyio.current_time()
        with self._narrator.waiting_for(f"the trainer, at work on update {update} again"):
            result = await self._service.trainer.train(sent.datums, sent.loss, sent.adam, key=key)
        if update <= self._past.recorded:
            return
        self._version = await self._service.trainer.publish(key=key)
        missing = self._past.missing
        places = {(row.group, row.attempt): row for row in sent.rows}
        self._applied = [
            replace(places[place], transcript=missing[place])
            for place in places
            if place in missing
        ]
        outcome = OutcomeFacts(
            datums=sent.datums,
            result=result,
            adam=sent.adam,
            policy_version=self._version,
            training_seconds=anyio.current_time() - began,
            update_seconds=None,
        )
        self._record(sent, outcome)

    def _group_started(self, start: GroupStart) -> None:
        if self._savepoints is not None:
            self._savepoints.started(
                start.serial,
                start.task.name,
                policy_version=start.policy_version,
                update=self._next_row,
            )
        self._unfinished.add(start.serial)
        self._next_serial = max(self._next_serial, start.serial + 1)

    def _attempt_ended(self, attempt: Attempt) -> None:
        """Tell of it, and of the first that is lost in each way; rollouts.jsonl has all of them."""
        self._recorder.attempt_ended(attempt, TRAIN)
        lost = attempt.discarded
        if lost is None or lost.fate is Fate.CANCELLED:
            return
        if (kind := (lost.fate, lost.exception)) not in self._told:
            self._told.add(kind)
            self._recorder.note(
                "warning",
                f"attempt {attempt.index} of group {attempt.group} (task {attempt.task!r}) is "
                f"{lost.fate}: {lost.detail}; more of this kind are only counted, and named in "
                "rollouts.jsonl",
            )

    def _group_rejected(self, judged: JudgedGroup) -> None:
        group, why = judged.group, judged.rejection
        assert why is not None
        rows = rollout_rows(group, why.fate)
        self._recorder.fates(rows)
        # Its row is what settles it, and comes last: a kill before it has the group start again.
        self._recorder.group_settled(GroupRow.of(group, why, update=self._next_row))
        self._metrics.rejected(rows, why)
        self._unfinished.discard(group.serial)
        self._scheduler.rejected(group.serial)

    def _group_placed(self, judged: JudgedGroup, batch: int) -> None:
        update = self._past.update + batch + 1
        self._recorder.group_settled(GroupRow.of(judged.group, None, update=update))

    async def _next_batch(self) -> Batch | None:
        with self._narrator.waiting_for(f"the batch of update {self._update + 1}"):
            return await self._collector.next()

    async def _train_on(self, batch: Batch) -> None:
        self._batch, update = batch, self._update + 1
        began, trainer = anyio.current_time(), self._service.trainer
        sent = self._sent(batch, update)
        if self._savepoints is not None:
            self._savepoints.keep(to_keep(sent))
        with self._narrator.waiting_for(f"the trainer, at work on update {update}"):
            result = await trainer.train(sent.datums, sent.loss, sent.adam, key=sent.key)
        # It is applied: whatever comes now, its attempts were trained, and never again.
        self._batch, self._applied = None, sent.rows
        with self._narrator.waiting_for(f"the weights of update {update} to be published"):
            version = await trainer.publish(key=sent.key)
        self._record(sent, self._outcome(sent, result, version, began))
        self._unfinished.difference_update(sent.groups)
        self._scheduler.published(version, len(sent.groups))
        await self._look(is_last=update == self._plan.config.training.updates)

    def _sent(self, batch: Batch, update: int) -> SentUpdate:
        groups = [judged.group for judged in batch.groups]
        rows = [rollout_rows(group, Fate.TRAINED) for group in groups]
        facts = BatchFacts(
            groups=groups,
            rows=rows,
            policy_version=self._version,
            attempts_started=self._attempts_started,
            retries=retries_of(self._plan.others),
        )
        draft = self._metrics.draft(facts)
        self._next_row = update + 1
        return SentUpdate(
            update=update,
            key=self._memory.key(f"update-{update}"),
            datums=batch.datums,
            loss=self._loss,
            adam=adam_params(
                self._plan.config.training, update, planned=planned_updates(self._plan)
            ),
            groups=tuple(group.serial for group in groups),
            rows=tuple(row for of_group in rows for row in of_group),
            draft=draft,
        )

    def _outcome(
        self, sent: SentUpdate, result: StepResult, version: int, began: float
    ) -> OutcomeFacts:
        now = anyio.current_time()
        self._version = version
        since, self._mark = now - self._mark, now
        return OutcomeFacts(
            datums=sent.datums,
            result=result,
            adam=sent.adam,
            policy_version=version,
            training_seconds=now - began,
            update_seconds=since,
        )

    def _record(self, sent: SentUpdate, outcome: OutcomeFacts) -> None:
        """Write an update's row right after those of its attempts: no kill comes easily between."""
        assert sent.draft is not None, "this recipe makes one for every update"
        self._update, self._scores = sent.update, ()
        metrics = self._metrics.applied(sent.draft, outcome)
        applied, self._applied = self._applied, ()
        self._recorder.fates(applied)
        self._recorder.update(
            StepRow(
                update=sent.update, at=time.time(), metrics=metrics, totals=self._metrics.totals
            )
        )
        self._tell_cuts(metrics)

    def _tell_cuts(self, metrics: Mapping[str, float]) -> None:
        """Say once that replies are cut; the groups of an update differ in their rewards."""
        turns, cut = metrics["turns/sampled"], metrics["turns/cut"]
        limit = self._plan.config.sampling.max_tokens
        cuts = told_of_cuts(turns, cut, max_tokens=limit, enough=True)
        if "cuts" not in self._told and cuts is not None:
            self._told.add("cuts")
            told = f"update {self._update}: {cuts}; turns/cut counts them in each update"
            self._recorder.note("warning", told)

    async def _look(self, *, is_last: bool) -> None:
        """Evaluate the policy and save it, where either is due; not twice."""
        if is_last or self._is_due():
            self._scores = await self._evaluations.run(
                update=self._update, policy_version=self._version, done=self._scores
            )
        if self._checkpoints is not None:
            standing = Standing(
                next_serial=self._next_serial,
                unfinished=tuple(sorted(self._unfinished)),
                counts=self._metrics.totals,
            )
            score = score_of(self._scores, is_loss=False)
            await self._checkpoints.after(self._update, standing, is_last=is_last, score=score)
        self._mark = anyio.current_time()


def _counted(past: Past) -> Counted:
    """What was counted before a run goes on."""
    rows = [*past.told, *past.lost]
    totals = fate_counts(rows) + token_counts(rows)
    return Counted(
        totals={**totals, **past.groups, "tokens/trained": past.trained_tokens} if rows else {},
        attempts_started=past.attempts_started - past.uncounted,
        counted=[row for row in (*past.told, *past.drafted) if row.fate is not Fate.SURPLUS],
        rejected=past.rejected,
    )
