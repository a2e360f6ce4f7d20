"""The rows that a run writes for itself alone, so that it can go on after a kill."""

from collections.abc import Mapping, Sequence
from dataclasses import field

from loops_cookbook.records import Row
from loops_cookbook.values import value


@value(kw_only=True)
class StartRow(Row):
    """One group that was started: one line of `starts.jsonl`, written before any of its attempts
    begins. One that is started again, in a run that is resumed, has another row."""

    serial: int
    task: str
    policy_version: int
    at: float
    update: int = 0
    """The update in whose row of `steps.jsonl` its attempts count as started, unless they are cut
    before that row is made; 0 of a row that does not tell."""


@value(kw_only=True)
class CheckpointRow(Row):
    """One checkpoint, written once it is whole: one line of `checkpoints.jsonl`."""

    update: int
    """How many updates it has had."""
    name: str
    path: str
    """Where it is, as the service that keeps it calls it: `bt://...`, `tinker://...`."""
    folder: str | None = None
    """Where it lies in the run folder; None of one that a service keeps elsewhere."""
    at: float
    score: float | None = None
    """What the best is chosen by, where it was evaluated."""
    score_name: str | None = None
    """The metric that the score is."""
    next_serial: int = 0
    """Of the group to start next."""
    unfinished: tuple[int, ...] = ()
    """Groups that were started, and neither trained nor rejected."""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """`StepRow.totals` as they then were."""

    @property
    def is_loss(self) -> bool:
        """Whether its score is a loss, of which the lowest is the best."""
        return (self.score_name or "").endswith("/loss")


def best_of(rows: Sequence[CheckpointRow]) -> CheckpointRow | None:
    """The one with the best score, the first of those that are equal; None where none has one."""
    scored = [(row.score, row) for row in rows if row.score is not None]
    costs = [(score if row.is_loss else -score, row) for score, row in scored]
    return min(costs, key=lambda each: each[0], default=(0.0, None))[1]
