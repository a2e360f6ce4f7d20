"""What each method of an Episode is handed: `Setup`, `Sampling`, `Grading`, `GroupGrading`.

Each is made anew for one call of one method and is worth nothing after it: models refuse, and
`seconds_left` is 0. Metadata alone goes on through a try: what an agent notes in it stands also
when a clock cuts the agent.
"""

from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, TypeVarTuple, cast, dataclass_transform

import numpy as np

from loops_cookbook.attempts import Call, Scalar
from loops_cookbook.episodes.compute import Workers
from loops_cookbook.episodes.conversation import Model, Models
from loops_cookbook.episodes.sandboxes import TrySandboxes, no_sandboxes
from loops_cookbook.errors import EpisodeError
from loops_cookbook.problems import found
from loops_cookbook.runtimes.producers import MAIN
from loops_cookbook.sandboxes.base import Sandbox
from loops_cookbook.tasks import Task

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LARGEST_INT = 10**300
"""Beyond it a whole number has no place among floats, of which a metric is the mean."""


class Metadata(UserDict[str, Scalar]):
    """Numbers, booleans and strings by name; anything else is refused where it is set."""

    def __setitem__(self, key: str, item: Scalar) -> None:
        self.data[_checked_key(key)] = _plain(key, item)

    def __ior__(self, other: object) -> Self:
        self.update(cast(Mapping[str, Scalar], other))
        return self


@dataclass_transform(field_specifiers=(field,))
def _handed(cls: type[T]) -> type[T]:
    """Make a class a dataclass with slots, whose fields are set once, when it is made."""
    made = dataclass(frozen=True, slots=True)(cls)
    made.__setattr__ = _refuse_another  # says what to do, and lets `|=` be
    return made


def _refuse_another(self: object, name: str, value: object) -> None:
    # `sample.metadata |= {...}` sets the field to what it is already, and is no harm.
    if getattr(self, name) is not value:
        raise AttributeError(
            f"{name} of {type(self).__name__} cannot be replaced: change what it holds"
        )


@_handed
class _Phase:
    """What all four share."""

    _workers: Workers

    async def compute(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call `function(*args)` in a worker process, which is killed at the clock.

        The function stands at the top of a module; it, its arguments and what it returns pass
        through pickle.
        """
        return await self._workers.run(function, *args)


@_handed
class Setup(_Phase):
    """For `Episode.setup`."""

    _sandboxes: TrySandboxes = field(default_factory=no_sandboxes)

    async def sandbox(self, name: str = "main", **overrides: Any) -> Sandbox:
        """Open a sandbox for this try; `run` and `grade` find it under its name.

        Args:
            name: its own among the try's.
            overrides: keys of `[sandbox]` that are different for this one.

        Raises:
            EpisodeError: the config has no sandboxes, or an override or the name cannot be.
            SandboxError: it could not be made.
        """
        return await self._sandboxes.open(name, overrides)


@_handed
class Sampling(_Phase):
    """For `Episode.run`: the models, and the time there is."""

    models: Models
    """Models by name; `main` is the policy."""
    metadata: Metadata
    """Notes on the attempt, reported as `rollout/<key>`; what `run` returns is merged in."""
    _clock: Callable[[], float]
    sandboxes: Mapping[str, Sandbox] = field(default_factory=dict[str, Sandbox])
    """What `setup` opened, by name."""

    @property
    def model(self) -> Model:
        """The policy."""
        return self.models[MAIN]

    @property
    def seconds_left(self) -> float:
        """Until the agent should have ended; it is cut some seconds after that."""
        return max(0.0, self._clock()) if self.models.is_open else 0.0


@_handed
class Grading(_Phase):
    """For `Episode.grade`: what is known of the attempt."""

    timed_out: bool
    """A deadline cut the agent."""
    metadata: Metadata
    """What the agent noted; a grader may add to it."""
    transcript: tuple[Call, ...]
    """The agent's model calls, in the order of their ends."""
    models: Models
    """Models by name, such as a judge. What `main` says here is not trained."""
    sandboxes: Mapping[str, Sandbox] = field(default_factory=dict[str, Sandbox])
    """What `setup` opened, by name, as the agent left it; none of its processes runs any more."""
    _fresh: TrySandboxes = field(default_factory=no_sandboxes)

    async def sandbox(self, name: str = "grader", **overrides: Any) -> Sandbox:
        """Open a sandbox that the agent never saw; it is released when this call of `grade` ends.

        Raises:
            EpisodeError: the config has no sandboxes, or an override or the name cannot be.
            SandboxError: it could not be made.
        """
        return await self._fresh.open(name, overrides)


@dataclass(frozen=True, slots=True)
class GroupAttempt:
    """One attempt of a group that is to be graded as a whole."""

    episode: Any
    """The Episode, closed: what it left on itself is still there."""
    reward: float | None
    """What `grade` gave; None where the Episode grades groups only."""
    metadata: Mapping[str, Scalar]
    timed_out: bool
    """A deadline cut the agent."""
    context_full: bool
    """A prompt no longer fitted the window."""
    retried: bool
    """An earlier try was thrown away."""
    transcript: tuple[Call, ...]


@_handed
class GroupGrading(_Phase):
    """For `Episode.grade_group`: the attempts at one task that can be graded."""

    task: Task[Any]
    options: Any
    models: Models
    """Models by name, such as a judge. What `main` says here is not trained."""
    attempts: tuple[GroupAttempt, ...]
    """A reward is due for each of these, in this order."""


def _checked_key(key: object) -> str:
    if not isinstance(key, str) or not key:
        raise EpisodeError(f"metadata has the key {found(key)}: use a word")
    return key


def _plain(key: str, value: object) -> Scalar:
    """The value as a plain Python one, of which a numpy scalar or an enum is made."""
    match cast(object, value.item()) if isinstance(value, np.generic) else value:
        case bool() as truth:
            return truth
        case int() as whole if abs(whole) < LARGEST_INT:
            return int(whole)
        case int() as whole:
            raise EpisodeError(f"metadata {key!r} is {found(whole)}: use one that a float can hold")
        case float() as number:
            return float(number)
        case str() as text:
            return str.__str__(text)
        case other:
            raise EpisodeError(
                f"metadata {key!r} is {found(other)}: use a number, a boolean or a string"
            )
