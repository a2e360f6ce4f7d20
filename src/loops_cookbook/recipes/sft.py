"""Supervised fine-tuning: batch after batch of demonstrated replies, and the held-out rows between.

The batches were planned before anything was launched, so each row is trained exactly once in each
epoch, whatever happens in between: a run that goes on loads its last checkpoint and trains on the
batches after it, those that have a row already without another. One update is sent at a time: the
next leaves when the last has been applied and recorded. The policy is published only where it is
sampled.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import anyio

from loops_cookbook.recipes.before import held_by
from loops_cookbook.recipes.checkpoints import CheckpointRules, Standing, score_of
from loops_cookbook.recipes.evaluation import is_due
from loops_cookbook.recipes.frame import Frame, Surroundings, open_frame
from loops_cookbook.recipes.memory import Memory
from loops_cookbook.recipes.rules import adam_params
from loops_cookbook.recipes.sft_batches import BatchPlan
from loops_cookbook.recipes.sft_evaluation import HeldOut, Look, scorer
from loops_cookbook.recipes.sft_metrics import SFTMetrics, SFTUpdateFacts
from loops_cookbook.recipes.sft_plan import HELD_OUT, SFTPlan
from loops_cookbook.records import EvaluationRow, Recorder, RunRow, StepRow
from loops_cookbook.rundir.past import SFTPast
from loops_cookbook.services.base import AdamParams, LossSpec, ServiceFactory
from loops_cookbook.services.checked import CheckedSampler

LOSS = LossSpec("cross_entropy")


async def run_sft(
    plan: SFTPlan,
    open_service: ServiceFactory,
    recorder: Recorder,
    row: RunRow,
    around: Surroundings | None = None,
    memory: Memory[SFTPast] | None = None,
) -> None:
    """Carry a plan out, from the first look at the held-out rows to the last.

    Args:
        plan: the run.
        open_service: opens the trainer and its sampler.
        recorder: told of everything, from `run_started` to `run_ended`, however it ends.
        row: what the run is; the service's own description is added.
        around: what a command has around it.
        memory: what is known of before; None: the run is new, and nothing is kept of it.

    Raises:
        RunStopped: a service failed for good.
        UsageError: the service cannot be had.
    """
    memory = memory or Memory[SFTPast]()
    metrics = SFTMetrics(memory.past.totals if memory.past else None)
    async with open_frame(open_service, recorder, row, around) as frame:
        frame.ending.counts = lambda: metrics.totals
        await SFTRun(plan, frame, metrics, memory).carry_out()


class SFTRun:
    """One run of the SFT recipe, and how far it came."""

    def __init__(
        self,
        plan: SFTPlan,
        frame: Frame,
        metrics: SFTMetrics,
        memory: Memory[SFTPast],
    ) -> None:
        past = memory.past or SFTPast()
        renderer = plan.detection.renderer
        assert renderer is not None, "a plan that can run has a renderer"
        self._plan = plan
        self._frame = frame
        self._trainer = frame.service.trainer
        self._sampler = CheckedSampler(frame.service.sampler, vocabulary=plan.vocabulary)
        self._recorder = frame.recorder
        self._metrics = metrics
        self._narrator = frame.narrator
        self._held_out = None
        if plan.held_out is not None:
            self._held_out = HeldOut(plan.held_out, plan.config, renderer, frame.recorder)
        self._memory = memory
        self._past = past
        training = plan.config.training
        rules = CheckpointRules(training.checkpoint_every, training.keep, is_loss=True)
        self._checkpoints = frame.checkpoints(memory, rules)
        self._scores: Sequence[EvaluationRow] = past.evaluations
        """The evaluations of the policy as it is, once it is where the run stood."""
        self._update = past.loaded
        """Updates applied so far."""
        self._version = 0
        """The policy version that is served."""
        self._published: int | None = 0
        """The update after which it was; None where that is not known."""
        self._sent: str | None = None
        """The key that the next update was sent under before the run was killed, if it was."""
        self._mark = 0.0
        """When the last update, or the look at the held-out rows after it, ended."""

    async def carry_out(self) -> None:
        """Look at the held-out rows, then train on batch after batch."""
        await self._begin()
        if self._update >= self._past.recorded:
            await self._look()
        for batch in self._plan.batches[self._update :]:
            await self._train_on(batch)
            if self._update >= self._past.recorded:
                await self._look()

    async def _begin(self) -> None:
        """Load where the run stood, or where it is to begin; not where the trainer lived on."""
        memory, past = self._memory, self._past
        if memory.past is None and memory.start is None:
            return
        self._published = None
        if (held := held_by(self._frame.service, self._recorder)) is not None:
            self._update, self._sent = past.recorded, held.sent
            return
        path = past.checkpoints[-1].path if past.checkpoints else memory.start
        if path is not None:
            await self._frame.load(path, with_optimizer=bool(past.checkpoints))

    async def _train_on(self, batch: BatchPlan) -> None:
        rows = [self._plan.train.rows[place] for place in batch.rows]
        update, began = self._update + 1, anyio.current_time()
        adam = self._adam(update)
        datums = [datum for row in rows for datum in row.datums]
        key, self._sent = self._sent or self._key(update), None
        with self._narrator.waiting_for(f"the trainer, at work on update {update}"):
            result = await self._trainer.train(datums, LOSS, adam, key=key)
        now = anyio.current_time()
        facts = SFTUpdateFacts(
            batch=batch,
            of_rows=len(self._plan.train.rows),
            read_tokens=sum(row.tokens for row in rows),
            trained_tokens=sum(row.trained_tokens for row in rows),
            result=result,
            adam=adam,
            update_seconds=now - self._mark,
            training_seconds=now - began,
        )
        self._update, self._mark = update, now
        if update <= self._past.recorded:
            return
        self._scores = ()
        metrics = self._metrics.update(facts)
        self._recorder.update(
            StepRow(update=update, at=time.time(), metrics=metrics, totals=self._metrics.totals)
        )

    def _adam(self, update: int) -> AdamParams:
        """An update that is applied again has the rate that it had, however long the run is now."""
        adam = adam_params(self._plan.config.training, update, planned=len(self._plan.batches))
        rate = self._past.learning_rates.get(update, adam.learning_rate)
        return replace(adam, learning_rate=rate)

    def _key(self, update: int) -> str:
        return self._memory.key(f"update-{update}")

    def _is_due(self) -> bool:
        every, last = self._plan.config.evaluation.every, len(self._plan.batches)
        return is_due(self._update, every=every, last=last)

    async def _look(self) -> None:
        """Evaluate the policy and save it, where either is due; not twice."""
        if self._held_out is not None and self._is_due() and not self._scores:
            self._scores = [await self._evaluate(self._held_out)]
        if self._checkpoints is not None:
            await self._checkpoints.after(
                self._update,
                Standing(counts=self._metrics.totals),
                is_last=self._update == len(self._plan.batches),
                score=score_of(self._scores, is_loss=True),
            )
        self._mark = anyio.current_time()

    async def _evaluate(self, held_out: HeldOut) -> EvaluationRow:
        can_score = scorer(self._trainer)
        if held_out.asks_the_policy and self._published != self._update:
            await self._publish()
        with self._narrator.waiting_for(f"the evaluation of {HELD_OUT}"):
            look = Look(self._key(self._update), self._update, self._version)
            return await held_out.evaluate(can_score, self._sampler, look)

    async def _publish(self) -> None:
        with self._narrator.waiting_for(f"the weights of update {self._update} to be published"):
            self._version = await self._trainer.publish(key=self._key(self._update))
        self._published = self._update
