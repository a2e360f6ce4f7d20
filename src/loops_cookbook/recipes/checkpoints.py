"""When a run keeps its policy, and which of what it kept stays: the newest, the last and the best.

A checkpoint is saved every so many updates, after the last update, and where an evaluation is the
best so far, so that the best policy that was measured can be had again. Its row is written when the
trainer has confirmed it; only then are older ones deleted. One that cannot be saved is told of and
does not end the run, since the batches after the one before are kept; but the last one does.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loops_cookbook.errors import EngineDied, ServiceError, ServiceRefused
from loops_cookbook.records import EvaluationRow, Recorder
from loops_cookbook.rollouts.stall import Narrator
from loops_cookbook.rundir.rows import CheckpointRow, best_of
from loops_cookbook.rundir.savepoints import SavePoints
from loops_cookbook.services.base import Checkpointer, Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """Which checkpoints a run saves and keeps."""

    every: int
    """Updates between two; 0: only the last, and the best."""
    keep: int
    """The newest that stay, the last at least; the best stays besides."""
    is_loss: bool = False
    """Whether the best is the lowest."""


@dataclass(frozen=True, slots=True)
class Score:
    """What an evaluation made of a policy."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands, as a checkpoint's row has it."""

    next_serial: int = 0
    unfinished: tuple[int, ...] = ()
    counts: Mapping[str, int] | None = None


def is_due(
    update: int, rules: CheckpointRules, *, is_last: bool, score: Score | None, best: float | None
) -> bool:
    """Whether a checkpoint is saved after this update.

    Args:
        update: how many the policy has had.
        rules: of the run.
        is_last: whether it is the last.
        score: of the policy as it is, where it was evaluated.
        best: of the checkpoints before.
    """
    if update == 0:
        return False
    if is_last or (rules.every > 0 and update % rules.every == 0):
        return True
    return score is not None and (best is None or is_better(score.value, best, rules))


def is_better(value: float, than: float, rules: CheckpointRules) -> bool:
    """Whether a score is."""
    return value < than if rules.is_loss else value > than


def superseded(rows: Sequence[CheckpointRow], rules: CheckpointRules) -> list[CheckpointRow]:
    """Those of a run's checkpoints, the oldest first, that do not stay."""
    staying = list(rows[-max(1, rules.keep) :])
    if (best := best_of(rows)) is not None:
        staying.append(best)
    return [row for row in rows if all(row is not each for each in staying)]


def score_of(rows: Sequence[EvaluationRow], *, is_loss: bool) -> Score | None:
    """What the best is chosen by: the mean reward of the first set, or the loss of SFT's."""
    if not rows:
        return None
    first = rows[0]
    value = first.loss if is_loss else first.reward_mean
    if value is None:
        return None
    return Score(f"eval/{first.set}/{'loss' if is_loss else 'reward_mean'}", value)


def require_checkpointer(trainer: Trainer, path: str) -> Checkpointer:
    """The trainer, as one that can load a checkpoint.

    Raises:
        ServiceRefused: it cannot.
    """
    if not isinstance(trainer, Checkpointer):
        raise ServiceRefused(
            f"the trainer keeps no checkpoints, so {path} cannot be loaded; {_GIVE_IT_ONE}"
        )
    return trainer


_GIVE_IT_ONE = (
    "start the server with a folder for them (`loops serve --checkpoints FOLDER`), or give a "
    "trainer of your own `save` and `load`"
)


def checkpointer(trainer: Trainer, recorder: Recorder) -> Checkpointer | None:
    """The trainer, if it keeps checkpoints; the recorder is warned if it does not."""
    if isinstance(trainer, Checkpointer):
        return trainer
    recorder.note(
        "warning",
        "the trainer keeps no checkpoints: this run cannot be resumed, and what it learns is lost "
        f"when its service ends; {_GIVE_IT_ONE}",
    )
    return None


class Checkpoints:
    """The checkpoints of a run.

    Args:
        trainer: keeps them.
        store: where they are told.
        rules: which are saved, and which stay.
        narrator: told what is waited for.
        rows: those that are there already, the oldest first.
    """

    def __init__(
        self,
        trainer: Checkpointer,
        store: SavePoints,
        rules: CheckpointRules,
        narrator: Narrator,
        rows: Sequence[CheckpointRow] = (),
    ) -> None:
        self._trainer = trainer
        self._store = store
        self._rules = rules
        self._narrator = narrator
        self._rows = list(rows)

    async def after(
        self, update: int, standing: Standing, *, is_last: bool, score: Score | None
    ) -> None:
        """Save one where it is due, then delete those that it supersedes."""
        best = best_of(self._rows)
        if self._rows and self._rows[-1].update == update:
            return
        if not is_due(update, self._rules, is_last=is_last, score=score, best=best and best.score):
            return
        name = f"update-{update:06}"
        try:
            with self._narrator.waiting_for(f"the checkpoint of update {update} to be saved"):
                path = await self._trainer.save(name)
        except ServiceError as error:
            if is_last or isinstance(error, EngineDied):
                raise
            logger.warning("no checkpoint of update %d: %s; the run goes on", update, error)
            return
        row = CheckpointRow(
            update=update,
            name=name,
            path=path,
            folder=self._store.folder_of(path),
            at=time.time(),
            score=None if score is None else score.value,
            score_name=None if score is None else score.name,
            next_serial=standing.next_serial,
            unfinished=standing.unfinished,
            counts=standing.counts or {},
        )
        self._store.checkpointed(row)
        self._rows.append(row)
        gone = superseded(self._rows, self._rules)
        self._store.remove(gone)
        self._rows = [row for row in self._rows if row not in gone]
