"""The nouns of a rollout, frozen: what one attempt came to, and the group it belongs to.

An attempt that could not be used carries a `Discarded`, one that can be carries a reward, and
never both: no path turns a failure into a number. The fate of a rewarded attempt is decided
later, with its group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

from loops_cookbook.messages import Message, Tool
from loops_cookbook.tokens import Sequence, Trajectory
from loops_cookbook.values import value

Scalar: TypeAlias = float | int | bool | str
"""What a value of an attempt's metadata may be."""


class Fate(StrEnum):
    """How an attempt ended; each ends in exactly one. Evaluation attempts alone end EVALUATED."""

    CANCELLED = "discarded/cancelled"
    DROPPED = "discarded/dropped"
    FAILED = "discarded/failed"
    NO_REPLY = "discarded/no_reply"
    UNGRADED = "discarded/ungraded"
    TOO_LONG = "discarded/too_long"
    TOO_FEW = "unused/too_few"
    NO_VARIANCE = "unused/no_variance"
    SURPLUS = "unused/surplus"
    TRAINED = "trained"
    EVALUATED = "evaluated"

    @property
    def kind(self) -> str:
        """`trained`, `unused`, `discarded` or `evaluated`."""
        return self.value.split("/")[0]

    @property
    def reason(self) -> str:
        """The part after the slash, or the whole where there is none."""
        return self.value.split("/")[-1]


@dataclass(frozen=True, slots=True)
class Discarded:
    """Why an attempt has no reward to train on."""

    fate: Fate
    detail: str = ""
    """One line for people: what happened and where."""
    exception: str | None = None
    """The exception's type name, for `discarded/failed` and `discarded/ungraded`."""
    place: str | None = None
    """The line that raised it, where that is known."""


@value
class Flags:
    """What is worth knowing about an attempt beside its fate."""

    timed_out: bool = False
    """A deadline cut the agent; it was graded all the same."""
    context_full: bool = False
    """A prompt no longer fitted the window."""
    retried: bool = False
    """An earlier try of it was thrown away."""

    def to_json(self) -> dict[str, bool]:
        """One object, which the encoder writes at a fifth of what a dataclass takes it."""
        return {
            "timed_out": self.timed_out,
            "context_full": self.context_full,
            "retried": self.retried,
        }


@value
class Timing:
    """Seconds an attempt's last try spent in each phase, waiting for a slot included in none."""

    setup: float = 0.0
    sampling: float = 0.0
    grading: float = 0.0
    waiting: float = 0.0
    """For slots and, in sampling and grading, for workers and judges; over all tries."""

    def to_json(self) -> dict[str, float]:
        """One object; see `Flags.to_json`."""
        return {
            "setup": self.setup,
            "sampling": self.sampling,
            "grading": self.grading,
            "waiting": self.waiting,
        }


@dataclass(frozen=True, slots=True)
class Call:
    """One model call as an attempt's transcript tells it, in the order of their ends."""

    producer: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    reply: Message
    finish_reason: str
    origin: str | None = None
    """For the policy: how its prompt came about (`tokens.Origin`)."""
    turn: int | None = None
    """For the policy: the index in the trajectory; None for a model that is not trained."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One of the `group_size` places of a group, when it has ended."""

    group: int
    """The serial of its group, unique in the run."""
    index: int
    task: str
    reward: float | None = None
    discarded: Discarded | None = None
    flags: Flags = field(default_factory=Flags)
    tries: int = 1
    trajectory: Trajectory = field(default_factory=Trajectory)
    sequences: tuple[Sequence, ...] = ()
    """The rows of its trajectory that fit the trainer."""
    metadata: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    calls: tuple[Call, ...] = ()
    timing: Timing = field(default_factory=Timing)
    started_at: float = 0.0
    """Unix time."""

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.discarded is None):
            raise ValueError("an attempt has either a reward or a reason why it has none")

    def fate(self, rewarded: Fate) -> Fate:
        """Why it has no reward, or what came of the one that it has."""
        return rewarded if self.discarded is None else self.discarded.fate


@dataclass(frozen=True, slots=True)
class Group:
    """All attempts of one task under one policy, settled."""

    serial: int
    task: str
    task_index: int
    source: str
    epoch: int
    policy_version: int
    """The version that was served when the group started."""
    attempts: tuple[Attempt, ...]
    seconds: float = 0.0

    @property
    def graded(self) -> tuple[Attempt, ...]:
        """The attempts that have a reward, in order."""
        return tuple(a for a in self.attempts if a.reward is not None)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a group teaches nothing."""

    reason: Literal["no_variance", "too_few"]

    @property
    def fate(self) -> Fate:
        """The fate of the group's attempts that have a reward."""
        return Fate.NO_VARIANCE if self.reason == "no_variance" else Fate.TOO_FEW
