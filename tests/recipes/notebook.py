"""A Recorder that keeps all it is told, for the recipes' tests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loops_cookbook.attempts import Attempt
from loops_cookbook.records import (
    TRAIN,
    EvaluationRow,
    GroupRow,
    Level,
    RolloutRow,
    RunRow,
    RunStatus,
    StepRow,
)


@dataclass
class Notebook:
    """What a run told, by kind."""

    started: list[RunRow] = field(default_factory=list)
    attempts: list[tuple[str, Attempt]] = field(default_factory=list)
    groups: list[GroupRow] = field(default_factory=list)
    rollouts: list[RolloutRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    evaluations: list[EvaluationRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ended: list[tuple[RunStatus, Mapping[str, int], str | None]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """Of updates and of the ends of evaluation attempts."""

    def run_started(self, row: RunRow) -> None:
        self.started.append(row)

    def attempt_ended(self, attempt: Attempt, purpose: str) -> None:
        self.attempts.append((purpose, attempt))
        if purpose != TRAIN:
            self.order.append(purpose)

    def group_settled(self, row: GroupRow) -> None:
        self.groups.append(row)

    def fates(self, rows: Sequence[RolloutRow]) -> None:
        self.rollouts.extend(rows)

    def update(self, row: StepRow) -> None:
        self.steps.append(row)
        self.order.append(f"update {row.update}")

    def evaluation(self, row: EvaluationRow) -> None:
        self.evaluations.append(row)

    def note(self, level: Level, text: str) -> None:
        self.notes.append(f"{level}: {text}")

    def run_ended(
        self, status: RunStatus, counts: Mapping[str, int], reason: str | None = None
    ) -> None:
        self.ended.append((status, dict(counts), reason))
