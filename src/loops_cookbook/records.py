"""The rows that a run leaves, as we promise them on disk, and the Protocol that receives them.

A row is frozen and knows its JSON form: `to_json` gives it, in the order in which a person
reads it, and the keys are the fields' own names (a `StepRow` alone lies flat). Rows may differ
from the nouns they tell of: `SCHEMA_VERSION` moves when a reader of the old ones would be
misled, and not when a key is added. Times of day are Unix seconds, durations seconds.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from statistics import fmean
from typing import Literal, Protocol, Self, TypeAlias, cast

from loops_cookbook.attempts import (
    Attempt,
    Call,
    Fate,
    Flags,
    Group,
    Rejection,
    Scalar,
    Timing,
)
from loops_cookbook.tokens import Trajectory
from loops_cookbook.values import value

SCHEMA_VERSION = 1

TRAIN = "train"
"""The purpose of an attempt that is not part of an evaluation; else it is the set's name."""

Json: TypeAlias = dict[str, object]
RunStatus: TypeAlias = Literal["running", "done", "stopped", "failed", "interrupted"]
"""`stopped`: by a rule, such as too many unusable groups; `interrupted`: by a signal. A
run that was killed still says `running`."""
Level: TypeAlias = Literal["debug", "info", "warning", "error"]


@value
class Row:
    """What all rows share: their JSON form, as `journal.encode` takes it."""

    def to_json(self) -> Json:
        """One object, a key for each field; a dataclass inside it is written likewise."""
        # `dataclasses.asdict` would copy every container inside, at ten times the cost.
        names, values_of = _fields(type(self))
        return dict(zip(names, values_of(self), strict=True))


@value(kw_only=True)
class RunRow(Row):
    """What a run is, and how it ended: the whole of `run.json`."""

    run: str
    """The name of its folder."""
    status: RunStatus = "running"
    reason: str | None = None
    """Why it ended, where that was not the end of its work."""
    started_at: float
    ended_at: float | None = None
    recipe: str
    scope: str
    model: str
    updates: int | None
    """How many are planned; None where the tasks decide it."""
    attempts_per_update: int | None
    """Attempts of the groups that make a batch; None for a recipe without attempts."""
    max_staleness: int = 0
    """Updates that may lie between a group's start and its training; 0 in sync mode."""
    tasks: Mapping[str, int]
    """How many tasks: `train`, and each evaluation set by its name."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """What each file of tasks or rows holds, as a hash by its key in the config."""
    code: Mapping[str, str] = field(default_factory=dict[str, str])
    """A hash of each module beside the config that was imported, by its path from there; as it was
    when the run began, or went on last."""
    started_from: str | None = None
    """The checkpoint whose weights it began with, as its service calls it; None: its model's."""
    resumed_at: tuple[float, ...] = ()
    """When it was resumed, each time."""
    resumed_from: int = 0
    """Updates that it had when it was resumed last."""
    resume_command: str | None = None
    """What goes on with it, typed where it was begun; None: nothing does."""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """`StepRow.totals` as they last were."""
    service: Mapping[str, str | int]
    """What the service says of itself: its own run id, addresses, device."""
    versions: Mapping[str, str]
    """Of this package, of Python and of the libraries that decide results."""
    config_path: str
    config: Mapping[str, object]
    """Resolved: every default is in it."""

    def to_json(self) -> Json:
        """The object in `run.json`, the schema first."""
        return {"schema": SCHEMA_VERSION, **Row.to_json(self)}


@value(kw_only=True)
class StepRow(Row):
    """One update: one line of `steps.jsonl`."""

    update: int
    """1 for the first; also how many updates the policy then has."""
    at: float
    """When it was applied."""
    metrics: Mapping[str, float]
    """As they were known then: those of an evaluation come after it, with its `EvaluationRow`."""
    totals: Mapping[str, int] = field(default_factory=dict[str, int])
    """Counts over the whole run so far."""

    def to_json(self) -> Json:
        """One flat object, a key for each metric."""
        return {"update": self.update, "at": self.at, **self.metrics, "totals": self.totals}


@value(kw_only=True)
class GroupRow(Row):
    """One settled group: one line of `groups.jsonl`."""

    serial: int
    epoch: int
    task: str
    task_index: int
    source: str
    rewards: tuple[float | None, ...]
    """One for each attempt, None where it has none."""
    mean: float | None
    std: float | None
    """`spread` of the rewards; None without one."""
    usable: bool
    reason: str | None
    """Why it was rejected."""
    policy_version: int
    seconds: float
    update: int
    """The update in whose row of `steps.jsonl` it counts: the one that trains it, or the next
    one to be recorded where it was rejected. A run may end before that update."""

    @classmethod
    def of(cls, group: Group, rejection: Rejection | None, *, update: int) -> Self:
        """The row of a group, and of its rejection if it teaches nothing."""
        graded = [attempt.reward for attempt in group.attempts if attempt.reward is not None]
        return cls(
            serial=group.serial,
            epoch=group.epoch,
            task=group.task,
            task_index=group.task_index,
            source=group.source,
            rewards=tuple(attempt.reward for attempt in group.attempts),
            mean=fmean(graded) if graded else None,
            std=spread(graded) if graded else None,
            usable=rejection is None,
            reason=None if rejection is None else rejection.reason,
            policy_version=group.policy_version,
            seconds=group.seconds,
            update=update,
        )


@value(kw_only=True)
class RolloutRow(Row):
    """One attempt whose fate is known: one line of `rollouts.jsonl`."""

    group: int
    attempt: int
    task: str
    fate: Fate
    reward: float | None
    flags: Flags
    tries: int
    prompt_tokens: int
    sampled_tokens: int
    turns: int = 0
    """Calls of the policy that sampled something."""
    cut_turns: int = 0
    """Those of them that a token limit ended."""
    logprob_mean: float | None = None
    """Of its sampled tokens; None without one."""
    sequences: int
    """Rows that a trainer can use."""
    policy_versions: tuple[int, ...] = ()
    """Those that its tokens were sampled from, each once; more than one where weights were
    published while it went on. Which token is of which stands in its transcript."""
    metadata: Mapping[str, Scalar]
    detail: str
    """For people: why it was discarded."""
    exception: str | None
    timing: Timing
    started_at: float
    transcript: str | None = None
    """Its file in `transcripts/`; whoever wrote it fills this in."""

    def to_json(self) -> Json:
        """One object, with plain values in it: there is a row for each attempt of a run."""
        row = Row.to_json(self)
        row["fate"] = self.fate.value
        row["flags"] = self.flags.to_json()
        row["timing"] = self.timing.to_json()
        return row

    @classmethod
    def of(cls, attempt: Attempt, fate: Fate) -> Self:
        """The row of an attempt with the fate it came to."""
        discarded, totals = attempt.discarded, attempt.trajectory.totals()
        return cls(
            group=attempt.group,
            attempt=attempt.index,
            task=attempt.task,
            fate=fate,
            reward=attempt.reward,
            flags=attempt.flags,
            tries=attempt.tries,
            prompt_tokens=totals.prompt_tokens,
            sampled_tokens=totals.sampled_tokens,
            turns=len(attempt.trajectory.turns),
            cut_turns=totals.cut_turns,
            logprob_mean=totals.logprob_mean,
            sequences=len(attempt.sequences),
            policy_versions=totals.policy_versions,
            metadata=attempt.metadata,
            detail="" if discarded is None else discarded.detail,
            exception=None if discarded is None else discarded.exception,
            timing=attempt.timing,
            started_at=attempt.started_at,
        )


@value(kw_only=True)
class TaskResult(Row):
    """How the attempts at one task of an evaluation set came out."""

    task: str
    group: int
    """The serial of its group in this evaluation."""
    rewards: tuple[float | None, ...]
    fates: tuple[Fate, ...]
    transcripts: tuple[str | None, ...] = ()
    """The files of its attempts in `transcripts/`; whoever wrote them fills this in."""


@value(kw_only=True)
class EvaluationRow(Row):
    """One evaluation of one set: one line of `evaluations.jsonl`."""

    set: str
    update: int
    """How many updates the policy had: 0 before the first."""
    policy_version: int
    at: float
    seconds: float
    attempts: int
    """At each task."""
    solved_at: float
    """A reward of at least this much counts as solved."""
    reward_mean: float | None
    """Over the attempts with a reward; None where no attempt has one."""
    solve_rate: float | None
    """Over the attempts with a reward."""
    pass_at_k: Mapping[int, float]
    """Chance that one of k attempts solves a task, averaged over tasks; empty for one attempt."""
    fates: Mapping[str, int]
    """How many attempts came to each fate."""
    tasks: tuple[TaskResult, ...]
    loss: float | None = None
    """SFT: mean over the trained tokens of the held-out rows, in nats."""
    row_losses: Mapping[str, float] = field(default_factory=dict[str, float])
    """The same of each row alone, by its file and line."""
    policy: str | None = None
    """What was evaluated, as it was named; None: the policy of the run, as it then was."""
    reward_interval: tuple[float, float] | None = None
    """Of `reward_mean`, with 95 % confidence, over tasks; None of fewer than two."""
    solve_rate_interval: tuple[float, float] | None = None
    """Likewise."""
    pass_at_k_intervals: Mapping[int, tuple[float, float]] = field(
        default_factory=dict[int, tuple[float, float]]
    )
    """Likewise."""

    @property
    def metrics(self) -> dict[str, float]:
        """Its scores under the names of metrics, which belong to the row of its update."""
        named = {
            "loss": self.loss,
            "reward_mean": self.reward_mean,
            "solve_rate": self.solve_rate,
        }
        named |= {f"pass_at_{k}": value for k, value in self.pass_at_k.items()}
        return {f"eval/{self.set}/{key}": v for key, v in named.items() if v is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """All that was said in one attempt, in text and in exact tokens: one file of its own."""

    purpose: str
    group: int
    attempt: int
    task: str
    fate: Fate | None
    """None where it is decided later, with the group: then it stands in `rollouts.jsonl`."""
    reward: float | None
    detail: str
    exception: str | None
    flags: Flags
    tries: int
    metadata: Mapping[str, Scalar]
    timing: Timing
    started_at: float
    calls: tuple[Call, ...]
    trajectory: Trajectory


class Recorder(Protocol):
    """Whoever is told what happens in a run, as it happens.

    Every method returns quickly and waits for nothing: it is called on the event loop.
    """

    def run_started(self, row: RunRow) -> None:
        """The run begins; the first of all calls. Told again when its service is there."""
        ...

    def attempt_ended(self, attempt: Attempt, purpose: str) -> None:
        """An attempt ended; `purpose` is `TRAIN` or the name of an evaluation set."""
        ...

    def group_settled(self, row: GroupRow) -> None:
        """All attempts of a group ended, and it was judged."""
        ...

    def fates(self, rows: Sequence[RolloutRow]) -> None:
        """The fates of some attempts became known; each attempt comes once."""
        ...

    def update(self, row: StepRow) -> None:
        """An update was applied and published."""
        ...

    def evaluation(self, row: EvaluationRow) -> None:
        """An evaluation of one set is complete."""
        ...

    def note(self, level: Level, text: str) -> None:
        """Something to read for a person, in one line or more."""
        ...

    def run_ended(
        self, status: RunStatus, counts: Mapping[str, int], reason: str | None = None
    ) -> None:
        """The run is over; the last of all calls."""
        ...


def spread(values: Iterable[float]) -> float:
    """The sample standard deviation (divided by n - 1); 0 for a single value."""
    numbers = list(values)
    if len(numbers) < 2:
        return 0.0
    first = numbers[0]  # from which equal numbers lie exactly 0 away
    mean = first + fmean([number - first for number in numbers])
    # `statistics.stdev` goes by way of fractions, at thirty times the cost.
    return math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))


@cache
def _fields(row: type[Row]) -> tuple[tuple[str, ...], Callable[[Row], tuple[object, ...]]]:
    """The names of its fields, of which there are several, and what reads them all at once."""
    names = tuple(item.name for item in fields(row))
    return names, cast(Callable[[Row], tuple[object, ...]], attrgetter(*names))
