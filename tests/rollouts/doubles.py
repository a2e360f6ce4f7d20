"""A scripted runtime: what an attempt does is a `Play`, and what was done to it is on the play."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
from pydantic import BaseModel

from loops_cookbook.attempts import Attempt, Call, Scalar
from loops_cookbook.rollouts.attempt import Finished, GroupStart, run_attempts
from loops_cookbook.rollouts.jobs import Job, Timer
from loops_cookbook.rollouts.keeper import Keeper, open_keeper
from loops_cookbook.rollouts.limits import Limits
from loops_cookbook.rollouts.trial import AttemptContext, AttemptRules, SamplingTerms
from loops_cookbook.runtimes.base import Capabilities, Clocks, Graded, Place, Recorded, Slot
from loops_cookbook.services.base import SampleParams
from loops_cookbook.tasks import Task
from loops_cookbook.tokens import SampledTokens, Trajectory, Turn, ids_of, logprobs_of

CLOCKS = Clocks(
    rollout_seconds=100,
    setup_seconds=20,
    grading_seconds=50,
    release_seconds=30,
)


class Play:
    """A try that says two tokens and is worth 1; subclasses say what else it does."""

    def __init__(self, task: Task[Any], place: Place) -> None:
        self.task = task
        self.place = place
        self.turns: list[Turn] = []
        self.calls: list[Call] = []
        self.metadata: dict[str, Scalar] = {}
        self.failure: Exception | None = None
        self.context_full = False
        self.log: list[str] = []

    def say(self, tokens: int = 2, prompt: Sequence[int] = (1, 2)) -> None:
        sampled = SampledTokens(ids_of([7] * tokens), logprobs_of([-0.5] * tokens), "stop")
        self.turns.append(Turn(ids_of(prompt), sampled))
        self.calls.append(Call("main", (), (), {}, "stop"))

    async def setup(self) -> None: ...

    async def run(self, slot: Slot) -> None:
        self.say()

    async def grade(self, *, timed_out: bool) -> object:
        return 1.0

    async def close(self) -> None: ...


class PlayLease:
    def __init__(self, play: Play, *, acquires: bool) -> None:
        self.play = play
        self._acquires = acquires

    async def setup(self) -> None:
        self.play.log.append("setup")
        await self.play.setup()

    async def run(self, slot: Slot) -> None:
        if not self._acquires:
            self.play.log.append("run")
            await self.play.run(slot)
            return
        async with slot:
            self.play.log.append("run")
            await self.play.run(slot)

    async def grade(self, *, timed_out: bool) -> object:
        self.play.log.append("grade")
        return await self.play.grade(timed_out=timed_out)

    def recorded(self) -> Recorded:
        return Recorded(
            Trajectory(tuple(self.play.turns)),
            calls=tuple(self.play.calls),
            metadata=dict(self.play.metadata),
            context_full=self.play.context_full,
            failure=self.play.failure,
        )


class PlayRuntime:
    """Runs plays; keeps every play that it opened."""

    def __init__(
        self,
        play: Callable[[Task[Any], Place], Play] = Play,
        grade_group: Callable[[Sequence[Graded]], object] | None = None,
        **capabilities: Any,
    ) -> None:
        self.capabilities = Capabilities(grades_groups=grade_group is not None, **capabilities)
        self.plays: list[Play] = []
        self._play = play
        self._grade_group = grade_group

    async def __aenter__(self) -> PlayRuntime:
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    @asynccontextmanager
    async def open(self, task: Task[BaseModel], place: Place) -> AsyncIterator[PlayLease]:
        play = self._play(task, place)
        self.plays.append(play)
        try:
            yield PlayLease(play, acquires="sampling" in self.capabilities.acquires)
        finally:
            play.log.append("close")
            await play.close()
            play.log.append("closed")

    async def grade_group(self, task: Task[BaseModel], attempts: Sequence[Graded]) -> object:
        assert self._grade_group is not None
        result = self._grade_group(attempts)
        return await result if hasattr(result, "__await__") else result


class Nothing(BaseModel):
    """A task that holds nothing."""


def task(index: int = 0) -> Task[BaseModel]:
    return Task(index=index, name=f"task-{index}", value=Nothing(), source=f"tasks.jsonl:{index}")


def start(serial: int = 0, policy_version: int = 0) -> GroupStart:
    return GroupStart(serial, task(serial), policy_version=policy_version)


class World:
    """A context for attempts, and every attempt that ended in it."""

    def __init__(self, runtime: PlayRuntime, keeper: Keeper, limits: Limits, **rules: Any) -> None:
        self.runtime = runtime
        self.ended: list[Attempt] = []
        self.context = AttemptContext(
            runtime=runtime,
            limits=limits,
            keeper=keeper,
            rules=replace(AttemptRules(clocks=CLOCKS, max_seq_len=64), **rules),
            terms=SamplingTerms(SampleParams(max_tokens=16), seed=5),
            on_end=self.ended.append,
        )

    @property
    def limits(self) -> Limits:
        return self.context.limits

    def context_with(self, **changes: Any) -> AttemptContext:
        return replace(self.context, **changes)


@asynccontextmanager
async def world(
    runtime: PlayRuntime | None = None,
    *,
    limits: Limits | None = None,
    on_stuck: Callable[[Sequence[str]], None] | None = None,
    **rules: Any,
) -> AsyncIterator[World]:
    async with open_keeper(on_stuck) as keeper:
        yield World(runtime or PlayRuntime(), keeper, limits or Limits(16, 16, 2), **rules)


@asynccontextmanager
async def watched_timers() -> AsyncIterator[Callable[[], Timer]]:
    """Makes timers of jobs that idle; a Keeper does what they say."""
    async with open_keeper() as keeper, anyio.create_task_group() as group:

        def new_timer() -> Timer:
            job = Job("a job", seconds=10_000, release_seconds=5)
            job.timer.start(anyio.current_time())
            group.start_soon(keeper.outcome, job, anyio.sleep_forever)
            return job.timer

        yield new_timer
        group.cancel_scope.cancel()


async def ignore_cancellation(until: anyio.Event, step: float = 1) -> None:
    """Wait as code does that catches everything."""
    while not until.is_set():
        try:
            await until.wait()
        except anyio.get_cancelled_exc_class():
            # Else virtual time would never go on.
            with anyio.CancelScope(shield=True):
                await anyio.sleep(step)


async def run_attempt(
    context: AttemptContext,
    start: GroupStart,
    index: int,
    *,
    on_end: Callable[[Finished], None] = lambda finished: None,
) -> Finished:
    """Run a single attempt; its end."""
    ended: list[Finished] = []

    def end(finished: Finished) -> None:
        ended.append(finished)
        on_end(finished)

    await run_attempts(context, start, [index], on_end=end)
    return ended[0]
