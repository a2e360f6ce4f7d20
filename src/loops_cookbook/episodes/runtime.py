"""An Episode class as a runtime: a lease is one instance, for one try.

The instance is made in `setup`, and `close` follows whatever happens, shielded and under the
release clock; that it fails changes nothing that is known by then. The try's sandboxes are
released after it, each under a clock of its own; their processes are stopped before `grade` is
called. `run` takes the sampling slot itself. When `run` or `grade` ends, its models are closed, so
a task that an agent left behind cannot add to the record. What the methods raise passes through,
`Discard` too: the scheduler decides what it means. A model call that failed for good, or a sandbox
that was lost, counts also where the episode swallowed it: in `run` as `Recorded.failure`, in a
grader by being raised after it.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

from pydantic import BaseModel

from loops_cookbook.attempts import Attempt, Scalar
from loops_cookbook.episodes.compute import Workers
from loops_cookbook.episodes.conversation import Models
from loops_cookbook.episodes.episode import Declared, Episode, declared
from loops_cookbook.episodes.phases import (
    Grading,
    GroupAttempt,
    GroupGrading,
    Metadata,
    Sampling,
    Setup,
)
from loops_cookbook.episodes.record import TryRecord
from loops_cookbook.episodes.sandboxes import TrySandboxes
from loops_cookbook.errors import Discard, EpisodeError
from loops_cookbook.problems import found
from loops_cookbook.runtimes.base import (
    Capabilities,
    Graded,
    Place,
    Recorded,
    RuntimeContext,
    Slot,
)
from loops_cookbook.tasks import Task
from loops_cookbook.tokens import Trajectory

NOTICE_SECONDS = 10.0
"""From the end of an Episode's own time to the cut; at most a tenth of a clock that is set."""


class EpisodeRuntime:
    """Runs one Episode class for the length of a run.

    Raises:
        EpisodeError: there is no Episode class, or it cannot be used as one.
    """

    def __init__(self, context: RuntimeContext) -> None:
        if context.episode_class is None:
            raise EpisodeError(
                "the runtime loops_cookbook.episodes:create_runtime runs an Episode, and the "
                'config names none: set class = "module:MyEpisode" in [episode]'
            )
        self._context = context
        self._declared = says = declared(context.episode_class)
        self._workers = Workers()
        self._capabilities = Capabilities(
            model_access=says.model_access,
            model_access_from=says.model_access_from,
            acquires=("sampling",),
            grading_retries=says.grading_retries,
            grading_retries_from=says.grading_retries_from,
            grades_attempts=says.grades_attempts,
            grades_groups=says.grades_groups,
            rollout_seconds=says.rollout_seconds + NOTICE_SECONDS,
        )

    @property
    def capabilities(self) -> Capabilities:
        """What the Episode class declares."""
        return self._capabilities

    async def __aenter__(self) -> Self:
        await self._workers.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._workers.__aexit__(*exc)

    def open(self, task: Task[BaseModel], place: Place) -> "EpisodeLease":
        """A lease on one try; leaving it closes the Episode."""
        return EpisodeLease(self._context, self._declared, self._workers, task, place)

    async def grade_group(self, task: Task[BaseModel], attempts: Sequence[Graded]) -> object:
        """Whatever `Episode.grade_group` returned for these attempts."""
        leases = [cast(EpisodeLease, graded.lease) for graded in attempts]
        members = zip(leases, attempts, strict=True)
        # Seeded as later calls of the first attempt, so that no seed is used twice.
        models = Models(self._context.producers, leases[0].record, trains=False)
        group = GroupGrading(
            _workers=self._workers,
            task=task,
            options=self._context.episode_options,
            models=models,
            attempts=tuple(lease.as_member(graded.attempt) for lease, graded in members),
        )
        with _Ending(models):
            rewards = await _class_in(self._context).grade_group(group)
        return _unless_failed(models, rewards)


class EpisodeLease:
    """One try: an Episode instance, and what it leaves."""

    def __init__(
        self,
        context: RuntimeContext,
        says: Declared,
        workers: Workers,
        task: Task[BaseModel],
        place: Place,
    ) -> None:
        self.record = TryRecord(place, context.max_seq_len)
        self._context = context
        self._says = says
        self._workers = workers
        self._task = task
        self._metadata = Metadata()
        self._episode: _Episode | None = None
        self._models: Models | None = None
        self._whose = f"task {task.name}, group {place.group}, attempt {place.attempt}"
        self._sandboxes = TrySandboxes(context.sandboxes, f"{self._whose}, try {place.trial}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            if self._episode is not None and self._says.closes:
                await self._episode.close()
        finally:
            await self._sandboxes.release()

    async def setup(self) -> None:
        """Make the instance and let it prepare."""
        episode = _class_in(self._context)(self._task, self._context.episode_options)
        if getattr(episode, "task", None) is not self._task:
            raise EpisodeError(
                f"{self._says.name}.__init__ left self.task unset: begin it with "
                "`super().__init__(task, options)`"
            )
        self._episode = episode
        if self._says.sets_up:
            await episode.setup(Setup(self._workers, self._sandboxes))

    async def run(self, slot: Slot) -> None:
        """Let the agent work, in the sampling slot."""
        episode = self._made()
        models = self._models = Models(self._context.producers, self.record, trains=True)
        sample = Sampling(
            _workers=self._workers,
            models=models,
            metadata=self._metadata,
            sandboxes=self._sandboxes,
            _clock=lambda: slot.seconds_left() - _notice_seconds(self._context),
        )
        with _Ending(models):
            async with slot:
                self._note(await episode.run(sample))

    async def grade(self, *, timed_out: bool) -> object:
        """Whatever `Episode.grade` returned, of what the agent left and does not touch any more."""
        episode = self._made()
        await self._sandboxes.stop_processes()
        fresh = TrySandboxes(self._context.sandboxes, f"{self._whose}, grading")
        models = Models(self._context.producers, self.record, trains=False)
        grading = Grading(
            _workers=self._workers,
            timed_out=timed_out,
            metadata=self._metadata,
            transcript=tuple(self.record.calls),
            models=models,
            sandboxes=self._sandboxes,
            _fresh=fresh,
        )
        try:
            with _Ending(models):
                reward = await episode.grade(grading)
        finally:
            await fresh.release()
        if (lost := self._sandboxes.failure or fresh.failure) is not None:
            raise lost
        return _unless_failed(models, reward)

    def recorded(self) -> Recorded:
        """What the try left so far."""
        return Recorded(
            trajectory=Trajectory(tuple(self.record.turns)),
            calls=tuple(self.record.calls),
            metadata=self._metadata.data.copy(),
            context_full=self.record.context_full,
            failure=(self._models.failure if self._models else None) or self._sandboxes.failure,
        )

    def as_member(self, attempt: Attempt) -> GroupAttempt:
        """The try as `grade_group` sees it."""
        return GroupAttempt(
            episode=self._episode,
            reward=attempt.reward if self._says.grades_attempts else None,
            metadata={**attempt.metadata},  # its own: nothing checks what a grader may set in it
            timed_out=attempt.flags.timed_out,
            context_full=attempt.flags.context_full,
            retried=attempt.flags.retried,
            transcript=attempt.calls,
        )

    def _made(self) -> "_Episode":
        assert self._episode is not None, "the scheduler calls setup first"
        return self._episode

    def _note(self, returned: object) -> None:
        if returned is None:
            return
        if not isinstance(returned, Mapping):
            raise EpisodeError(
                f"{self._says.name}.run() returned {found(returned)}: return metadata as a "
                "mapping, or nothing"
            )
        self._metadata.update(cast(Mapping[str, Scalar], returned))


class _CreateRuntime:
    """Makes the runtime of the Episode class that a config names."""

    options_model: type[BaseModel] | None = None
    """It takes no [runtime_options]."""

    def __call__(self, context: RuntimeContext) -> EpisodeRuntime:
        """The runtime.

        Raises:
            EpisodeError: there is no Episode class, or it cannot be used as one.
        """
        return EpisodeRuntime(context)


create_runtime = _CreateRuntime()
"""The default of the config's `runtime`."""

_Episode: TypeAlias = Episode[Any, Any]


def _class_in(context: RuntimeContext) -> type[_Episode]:
    return cast(type[_Episode], context.episode_class)


def _notice_seconds(context: RuntimeContext) -> float:
    if context.rollout_seconds is None:
        return NOTICE_SECONDS
    return min(NOTICE_SECONDS, context.rollout_seconds / 10)


class _Ending:
    """Closes the models after a method, and takes a Discard out of the group it may come in."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._models.close()
        if not isinstance(error, ExceptionGroup):
            return
        # An agent whose branches run in a task group raises it inside one.
        for each in _leaves(cast(ExceptionGroup[Exception], error)):
            if isinstance(each, Discard):
                raise each from error


def _leaves(group: ExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in group.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from _leaves(cast(ExceptionGroup[Exception], error))
        else:
            yield error


def _unless_failed(models: Models, graded: object) -> object:
    """What a grader returned; but a judge that failed must not become a number."""
    if models.failure is not None:
        raise models.failure
    return graded
