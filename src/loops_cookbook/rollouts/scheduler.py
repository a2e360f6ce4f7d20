"""When groups start and how they are handed over: never more of them than the gate lets live.

Tasks are drawn in order, each starts a group as soon as the gate allows it, and settled groups come
out of the stream in the order in which they settled. A group that nobody takes stays live, so the
gate is shut and sampling waits: that is the back-pressure. Every group that was started comes out
of the stream or is among the `leftovers`, never both. An error in here comes out of the block.
"""

import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import anyio
from anyio.abc import ObjectReceiveStream, TaskGroup
from anyio.lowlevel import checkpoint
from pydantic import BaseModel

from loops_cookbook.attempts import Group
from loops_cookbook.rollouts.attempt import GroupStart
from loops_cookbook.rollouts.group import run_group
from loops_cookbook.rollouts.keeper import open_group
from loops_cookbook.rollouts.order import draw
from loops_cookbook.rollouts.staleness import Gate
from loops_cookbook.rollouts.trial import AttemptContext
from loops_cookbook.tasks import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScheduleRules:
    """How many groups, of what, in which order."""

    group_size: int
    gate: Gate
    seed: int = 0
    """Of the order of tasks."""
    epochs: int | None = None
    """How often to go through the tasks; None: as long as they are taken."""
    shuffle: bool = True
    first_serial: int = 0
    again: tuple[int, ...] = ()
    """Serials before it that are started first: their groups were cut."""


def _nobody(start: GroupStart) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Counts:
    """Groups so far."""

    started: int
    rejected: int
    published: int
    running: int
    untaken: int
    """Settled, and not yet taken out of the stream."""

    @property
    def in_flight(self) -> int:
        """Started, and neither rejected nor published."""
        return self.started - self.rejected - self.published

    def __str__(self) -> str:
        settled = self.in_flight - self.running
        return f"{self.running} running, {settled} settled and not yet published"


class Scheduler:
    """Starts the groups of a run.

    Args:
        context: what all attempts share.
        tasks: what there is to work at.
        rules: how many groups, of what, in which order.
        on_start: told of each group before any of its attempts begins.
    """

    def __init__(
        self,
        context: AttemptContext,
        tasks: Sequence[Task[BaseModel]],
        rules: ScheduleRules,
        *,
        on_start: Callable[[GroupStart], None] = _nobody,
    ) -> None:
        self._context = context
        self._tasks = tasks
        self._rules = rules
        self._on_start = on_start
        self._version = 0
        self._stream = _SettledGroups()
        self._cut: list[Group] = []
        self._started = self._rejected = self._published = self._running = 0
        self._news = anyio.Event()

    @property
    def counts(self) -> Counts:
        """Groups so far."""
        return Counts(
            started=self._started,
            rejected=self._rejected,
            published=self._published,
            running=self._running,
            untaken=len(self._stream.groups),
        )

    @property
    def leftovers(self) -> tuple[Group, ...]:
        """Groups that were started and not taken out of the stream, in starting order.

        Complete when the block of `running` has been left. Their attempts without an end of their
        own are cancelled.
        """
        return tuple(sorted([*self._cut, *self._stream.groups], key=lambda group: group.serial))

    def published(self, version: int, groups: int) -> None:
        """Tell that an update on so many groups is served as this version."""
        self._version = version
        self._published += groups
        self._tell()

    def rejected(self, serial: int) -> None:
        """Tell that this group will not be trained, so that another may take its place."""
        logger.debug("group %d was rejected", serial)
        self._rejected += 1
        self._tell()

    def told(self) -> str:
        """What groups there are and whether more may start, for people."""
        gate = self._rules.gate
        is_open = gate.may_start(
            started=self._started, rejected=self._rejected, published=self._published
        )
        state = "open" if is_open else "shut until an update is published or a group is rejected"
        return f"groups: {self.counts}; the gate is {state}"

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[ObjectReceiveStream[Group]]:
        """Start groups within the block; it yields the stream of those that settled.

        The stream ends when the tasks run out, or all updates are published, and every group has
        been taken. Leaving the block cancels what still runs.

        Raises:
            EngineDied: no model call can succeed any more.
        """
        async with open_group() as group:
            group.start_soon(self._start_groups, group)
            try:
                yield self._stream
            finally:
                group.cancel_scope.cancel()

    async def _start_groups(self, group: TaskGroup) -> None:
        rules = self._rules
        drawn = draw(
            len(self._tasks),
            rules.seed,
            epochs=rules.epochs,
            shuffle=rules.shuffle,
            first=rules.first_serial,
            again=rules.again,
        )
        for each in drawn:
            if not await self._gate_opened():
                break
            task = self._tasks[each.index]
            start = GroupStart(each.serial, task, each.epoch, policy_version=self._version)
            self._on_start(start)
            group.start_soon(self._run, start)
            self._started += 1
            self._running += 1
            await checkpoint()  # it samples while the next ones are made
        while self._running:
            await self._change()
        self._stream.end()

    async def _gate_opened(self) -> bool:
        """Wait until one more group may start; False when none ever will."""
        gate = self._rules.gate
        while not gate.may_start(
            started=self._started, rejected=self._rejected, published=self._published
        ):
            if gate.is_done(published=self._published):
                return False
            await self._change()
        return True

    async def _run(self, start: GroupStart) -> None:
        group = await run_group(
            self._context, start, size=self._rules.group_size, on_cut=self._cut.append
        )
        self._running -= 1
        self._stream.put(group)
        self._tell()

    async def _change(self) -> None:
        self._news = anyio.Event()
        await self._news.wait()

    def _tell(self) -> None:
        self._news.set()


async def run_set(
    context: AttemptContext,
    tasks: Sequence[Task[BaseModel]],
    *,
    attempts: int,
    policy_version: int = 0,
) -> list[Group]:
    """Run every task of an evaluation set, under the same limits as all else.

    The groups come in the order of the tasks, each with its task's index as serial. Nothing is
    trained on them, so no attempt is too long. No gate holds them: each attempt ends by its clocks.

    Args:
        context: what its attempts share; `context.terms.purpose` is the set's name.
        tasks: the set.
        attempts: at each task.
        policy_version: the oldest version that may sample.

    Raises:
        EngineDied: no model call can succeed any more.
    """
    context = replace(context, rules=replace(context.rules, max_seq_len=None))
    settled: dict[int, Group] = {}
    # Groups beyond those that fill every phase would only wait, each with its tasks.
    room = sum(limit.total for limit in context.limits.statistics())
    window = anyio.Semaphore(room // attempts + 1)

    async def run(task: Task[BaseModel]) -> None:
        start = GroupStart(task.index, task, policy_version=policy_version)
        settled[task.index] = await run_group(context, start, size=attempts)
        window.release()

    async with open_group() as group:
        for task in tasks:
            await window.acquire()
            group.start_soon(run, task)
    return [settled[task.index] for task in tasks]


class _SettledGroups(ObjectReceiveStream[Group]):
    """Groups as they settle, each given to one receiver, or still here.

    A memory stream would do but for its ends: a receiver that is cancelled while a group is handed
    to it loses the group, and a sender cannot tell.
    """

    def __init__(self) -> None:
        self.groups: deque[Group] = deque()
        self._is_over = False
        self._news = anyio.Event()

    def put(self, group: Group) -> None:
        self.groups.append(group)
        self._news.set()

    def end(self) -> None:
        """No more will come."""
        self._is_over = True
        self._news.set()

    async def receive(self) -> Group:
        await checkpoint()
        while not self.groups:
            if self._is_over:
                raise anyio.EndOfStream
            self._news = anyio.Event()
            await self._news.wait()
        return self.groups.popleft()

    async def aclose(self) -> None:
        self.end()
