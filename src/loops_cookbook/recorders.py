"""Several recorders as one."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from loops_cookbook.attempts import Attempt
from loops_cookbook.records import (
    EvaluationRow,
    GroupRow,
    Level,
    Recorder,
    RolloutRow,
    RunRow,
    RunStatus,
    StepRow,
)


@dataclass(frozen=True, slots=True)
class Fanout:
    """A Recorder that tells several, in their order; with none it tells nobody."""

    recorders: tuple[Recorder, ...] = ()

    def run_started(self, row: RunRow) -> None:
        """Told to each."""
        for recorder in self.recorders:
            recorder.run_started(row)

    def attempt_ended(self, attempt: Attempt, purpose: str) -> None:
        """Told to each."""
        for recorder in self.recorders:
            recorder.attempt_ended(attempt, purpose)

    def group_settled(self, row: GroupRow) -> None:
        """Told to each."""
        for recorder in self.recorders:
            recorder.group_settled(row)

    def fates(self, rows: Sequence[RolloutRow]) -> None:
        """Told to each."""
        for recorder in self.recorders:
            recorder.fates(rows)

    def update(self, row: StepRow) -> None:
        """Told to each."""
        for recorder in self.recorders:
            recorder.update(row)

    def evaluation(self, row: EvaluationRow) -> None:
        """Told to each."""
        for recorder in self.recorders:
            recorder.evaluation(row)

    def note(self, level: Level, text: str) -> None:
        """Told to each."""
        for recorder in self.recorders:
            recorder.note(level, text)

    def run_ended(
        self, status: RunStatus, counts: Mapping[str, int], reason: str | None = None
    ) -> None:
        """Told to each, also where one of them raises: what ends a run may be a full disk."""
        with ExitStack() as stack:
            for recorder in reversed(self.recorders):  # the last that is entered is told first
                stack.callback(recorder.run_ended, status, counts, reason)
