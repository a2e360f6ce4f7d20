"""All that the scheduler may ask of what it runs: a `Runtime`, and a `Lease` on one try.

An Episode, a Harbor task and a user's own code stand behind these two Protocols. A runtime is
an async context manager that lives as long as the run. `open` gives a lease on one try, an
async context manager too: leaving it closes the episode and releases what it holds, whatever
happened. The scheduler owns every clock and every slot; a runtime that says so in
`Capabilities.acquires` enters the sampling slot by itself, which starts its clock.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, cast

import numpy as np
from pydantic import BaseModel

from loops_cookbook.attempts import Attempt, Call, Scalar
from loops_cookbook.errors import EpisodeError
from loops_cookbook.problems import found
from loops_cookbook.runtimes.producers import Producers
from loops_cookbook.sandboxes.source import SandboxSource
from loops_cookbook.services.base import SampleParams
from loops_cookbook.tasks import Task
from loops_cookbook.tokens import Trajectory
from loops_cookbook.values import value


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runtime does, for the scheduler and for the check report."""

    model_access: str = "direct"
    model_access_from: str = "the runtime"
    """Where that is declared, such as `AnswerEpisode.model_access`."""
    acquires: tuple[str, ...] = ("sampling",)
    """Phases whose slot the runtime takes itself."""
    grading_retries: int = 0
    grading_retries_from: str = "the runtime"
    grades_attempts: bool = True
    """False: `Lease.grade` is never called, only `Runtime.grade_group`."""
    grades_groups: bool = False
    rollout_seconds: float = 110.0
    """When an attempt is cut, unless `[clocks] rollout_seconds` says otherwise."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds that each phase of a try may take."""

    rollout_seconds: float
    setup_seconds: float
    grading_seconds: float
    release_seconds: float

    @property
    def longest(self) -> float:
        """The longest of them."""
        return max(
            self.rollout_seconds, self.setup_seconds, self.grading_seconds, self.release_seconds
        )


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """What a runtime factory is given: `create(context) -> Runtime`."""

    tasks: Sequence[Task[BaseModel]]
    options: BaseModel | None
    """Validated by the factory's `options_model`; None without one."""
    episode_class: type[object] | None
    """The class that `[episode] class` names, when it names one."""
    episode_options: BaseModel | None
    producers: Producers
    max_seq_len: int
    rollout_seconds: float | None = None
    """When an attempt is cut, as `[clocks]` sets it; None: the runtime derives it."""
    release_seconds: float = 30.0
    """How long closing and releasing a try may take."""
    sandboxes: SandboxSource | None = None
    """Opens sandboxes; None where the config has none, and while nothing is launched."""


@value
class Place:
    """Which try this is, and under what terms it samples."""

    group: int
    """Serial of the group, unique in the run; it is also the sampler's affinity key."""
    attempt: int
    trial: int
    """0 for the first try."""
    params: SampleParams
    """Temperature, top_p, top_k, stop and the token limit of one reply."""
    policy_version: int
    """The oldest version that may sample."""
    call_seed: Callable[[int], int]
    """The seed of the try's call number i, from 0."""
    max_attempt_tokens: int | None = None
    """Sampled tokens over all calls of the attempt; None: no limit."""
    purpose: str = "train"
    """`train`, or the name of an evaluation set."""

    @property
    def affinity_key(self) -> str:
        """What keeps a group's calls where their common prefix is cached."""
        return f"{self.purpose}-{self.group}"


class Slot(Protocol):
    """A place in a phase and its clock: entering waits for room, then starts the clock.

    The clock cuts the block quietly: the code after the `with` block goes on, and `timed_out`
    tells. Entering it twice is an error.
    """

    @property
    def timed_out(self) -> bool:
        """Whether the clock ran out before the block ended."""
        ...

    def seconds_left(self) -> float:
        """Until the cut; only inside the block."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> bool | None: ...


@value
class Recorded:
    """What a try left so far; whole at any moment, also after a cut."""

    trajectory: Trajectory = field(default_factory=Trajectory)
    calls: tuple[Call, ...] = ()
    metadata: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    context_full: bool = False
    failure: Exception | None = None
    """A model call that failed for good, also where the agent swallowed it."""

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.trajectory), Trajectory):
            raise TypeError(
                f"a Recorded's trajectory is {found(self.trajectory)}: use Trajectory(turns)"
            )
        for turn in self.trajectory.turns:
            if not len(turn.prompt_ids):
                raise ValueError(
                    "a recorded turn has an empty prompt: nothing predicts its first sampled token"
                )
        _require_records(self)


def _require_records(recorded: Recorded) -> None:
    """Refuse what no row and no metric could hold: it would be found out far from who gave it."""
    if not isinstance(cast(object, recorded.metadata), Mapping):
        raise EpisodeError(
            f"a Recorded's metadata is {found(recorded.metadata)}: use scalars by name"
        )
    for key, item in recorded.metadata.items():
        if not (isinstance(cast(object, key), str) and isinstance(cast(object, item), _SCALARS)):
            raise EpisodeError(
                f"a Recorded's metadata has {found(key)}: {found(item)}: use a number, a boolean "
                "or a string under a word"
            )
    if not all(isinstance(cast(object, call), Call) for call in recorded.calls):
        raise EpisodeError(f"a Recorded's calls are {found(recorded.calls)}: use a tuple of Call")
    failure = cast(object, recorded.failure)
    if failure is not None and not isinstance(failure, Exception):
        raise EpisodeError(f"a Recorded's failure is {found(failure)}: use an Exception, or None")


_SCALARS = (float, int, str, np.generic)


class Lease(Protocol):
    """One try of one attempt."""

    async def setup(self) -> None:
        """Prepare; under the setup clock."""
        ...

    async def run(self, slot: Slot) -> None:
        """Let the agent work. Enters `slot` around it where the runtime acquires `sampling`."""
        ...

    async def grade(self, *, timed_out: bool) -> object:
        """Whatever the grader returned; the caller checks that it is a finite number."""
        ...

    def recorded(self) -> Recorded:
        """What the try left."""
        ...


def recorded_of(lease: Lease, before: Recorded) -> Recorded:
    """What a try left so far; where its lease cannot tell, what it left before, and the failure."""
    try:
        recorded = cast(object, lease.recorded())
    except Exception as error:  # user code may raise anything
        return replace(before, failure=before.failure or error)
    except SystemExit as error:
        recorded = error  # which is no Recorded either
    if isinstance(recorded, Recorded):
        return recorded
    fault = EpisodeError(f"recorded() of a lease gave {found(recorded)}: give a Recorded")
    return replace(before, failure=before.failure or fault)


@dataclass(frozen=True, slots=True)
class Graded:
    """An attempt and the lease of its last try, for `grade_group`."""

    lease: Lease
    attempt: Attempt


class Runtime(Protocol):
    """Runs tries for the length of a run."""

    @property
    def capabilities(self) -> Capabilities:
        """What it does; known before it is entered."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> bool | None: ...

    def open(self, task: Task[BaseModel], place: Place) -> AbstractAsyncContextManager[Lease]:
        """A lease on one try; leaving the block closes and releases."""
        ...

    async def grade_group(self, task: Task[BaseModel], attempts: Sequence[Graded]) -> object:
        """Rewards for the whole group, one for each of `attempts`; the caller checks them."""
        ...
