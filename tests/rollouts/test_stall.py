"""What the run waits for is said in words, once for each stall, and whenever it is asked."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest
from tests.rollouts.doubles import CLOCKS, Play, PlayRuntime, World, start, task, world

from loops_cookbook.records import Level
from loops_cookbook.rollouts.group import run_group
from loops_cookbook.rollouts.jobs import Job
from loops_cookbook.rollouts.limits import Limits, LimitStatistics
from loops_cookbook.rollouts.scheduler import Scheduler, ScheduleRules
from loops_cookbook.rollouts.staleness import Gate
from loops_cookbook.rollouts.stall import Narrator, situation
from loops_cookbook.runtimes.base import Slot

pytestmark = pytest.mark.anyio


class Heard:
    """What a narrator says."""

    def __init__(self) -> None:
        self.said: list[tuple[Level, str]] = []
        self.narrator = Narrator(self.say, now=anyio.current_time)

    def say(self, level: Level, text: str) -> None:
        self.said.append((level, text))

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.said)


@asynccontextmanager
async def watched(w: World) -> AsyncIterator[Heard]:
    heard = Heard()
    heard.narrator.look_at(w.context.keeper, w.limits)
    async with anyio.create_task_group() as group:
        group.start_soon(heard.narrator.watch)
        yield heard
        group.cancel_scope.cancel()


class Hangs(Play):
    async def run(self, slot: Slot) -> None:
        self.say()
        await anyio.sleep_forever()


PATIENT = replace(CLOCKS, rollout_seconds=10_000)


async def test_a_situation_says_how_full_each_phase_is_and_who_is_longest_where() -> None:
    jobs: list[Job] = []
    for name, phase in (("a", "run"), ("b", "run"), ("c", "grading"), ("d", "waiting")):
        jobs.append(Job(f"attempt {name}", seconds=1, release_seconds=1))
        jobs[-1].enter(phase)
        if phase != "waiting":
            jobs[-1].timer.start(anyio.current_time())
        await anyio.sleep(10)
    told = situation(reversed(jobs), [LimitStatistics("sampling", 2, 2, 5)], anyio.current_time())
    assert told == [
        "slots: sampling 2/2 (5 wait)",
        "run: 2 tries at an unknown line; longest attempt a, 40 s",
        "grading: 1 try at an unknown line; attempt c, 20 s",
        "a starting slot: 1 try; attempt d, 10 s",
    ]


async def test_nothing_is_waited_for_where_there_is_nothing() -> None:
    heard = Heard()
    heard.narrator.tell()
    assert heard.said == [("info", "the run waits for nothing")]


async def test_tries_that_wait_for_a_slot_are_told_apart_from_those_that_work() -> None:
    """A try in `run` whose sampling slot was taken by another was told as if its agent hung."""
    async with (
        world(PlayRuntime(Hangs), limits=Limits(1, 1, 1), clocks=PATIENT) as w,
        watched(w) as heard,
        anyio.create_task_group() as group,
    ):
        group.start_soon(lambda: run_group(w.context, start(), size=4))
        await anyio.sleep(30)
        heard.narrator.tell()
        group.cancel_scope.cancel()
    lines = heard.text.splitlines()
    assert "  slots: starting 2/2 (2 wait), sampling 1/1 (1 wait), grading 0/1 (0 wait)" in lines
    (hanging,) = [line for line in lines if line.startswith("  run: ")]
    assert hanging.startswith("  run: 1 try at tests/rollouts/test_stall.py:")
    assert " of group 0 (task 'task-0'), 30 s" in hanging
    (sampling,) = [line for line in lines if line.startswith("  a sampling slot: ")]
    assert sampling.startswith("  a sampling slot: 1 try; attempt ")
    assert any(line.startswith("  a starting slot: 2 tries; longest attempt") for line in lines)


async def test_whoever_waits_is_told_with_the_time_as_long_as_it_does() -> None:
    heard = Heard()
    async with anyio.create_task_group() as group:
        group.start_soon(heard.narrator.watch)
        with heard.narrator.waiting_for("the trainer, at work on update 3"):
            await anyio.sleep(245)
        group.cancel_scope.cancel()
    heard.narrator.tell()
    assert heard.said[0] == (
        "info",
        "nothing has moved for 120 s; the run waits for:\n  the trainer, at work on update 3, "
        "for 240 s",
    )
    assert heard.said[-1][1] == "the run waits for nothing"


async def test_a_stall_is_told_ever_more_rarely() -> None:
    async with (
        world(PlayRuntime(Hangs), clocks=PATIENT) as w,
        watched(w) as heard,
        anyio.create_task_group() as group,
    ):
        group.start_soon(lambda: run_group(w.context, start(), size=1))
        await anyio.sleep(130 + 120 * 9)
        group.cancel_scope.cancel()
    assert [text.split(";")[0] for _, text in heard.said] == [
        f"nothing has moved for {seconds} s" for seconds in (120, 240, 480, 960)
    ]
    assert {level for level, _ in heard.said} == {"warning"}


async def test_an_agent_whose_model_calls_go_on_does_not_stall() -> None:
    class Talks(Play):
        async def run(self, slot: Slot) -> None:
            for _ in range(10):
                await anyio.sleep(90)
                self.say()

    async with world(PlayRuntime(Talks), clocks=PATIENT) as w, watched(w) as heard:
        await run_group(w.context, start(), size=2)
    assert heard.said == []


async def test_another_word_of_whoever_waits_is_a_move() -> None:
    heard = Heard()
    moves = iter(range(100))
    async with anyio.create_task_group() as group:
        group.start_soon(heard.narrator.watch)
        with heard.narrator.waiting_for(lambda: f"{next(moves)} of 100"):
            await anyio.sleep(500)
        group.cancel_scope.cancel()
    assert heard.said == []


async def test_waiting_for_the_trainer_is_told_as_that_and_is_no_warning() -> None:
    async with world() as w, watched(w) as heard:
        it = Scheduler(w.context, [task()], ScheduleRules(2, Gate(1)))
        with heard.narrator.waiting_for(it.told):
            async with it.running() as groups:
                await groups.receive()
                await anyio.sleep(300)
    assert "1 settled and not yet published; the gate is shut until an update" in heard.text
    assert {level for level, _ in heard.said} == {"info"}


async def test_code_that_holds_the_event_loop_is_told_by_the_frame_of_the_signal() -> None:
    heard = Heard()
    heard.narrator.tell(sys._getframe())
    assert "\n  the event loop is held at tests/rollouts/test_stall.py:" in heard.text
