import logging
from dataclasses import replace

import anyio
import pytest
from tests.rollouts.doubles import CLOCKS, Play, PlayRuntime, task, world

from loops_cookbook.rollouts.keeper import Job, open_keeper
from loops_cookbook.rollouts.limits import Limits, LimitStatistics
from loops_cookbook.rollouts.scheduler import Scheduler, ScheduleRules
from loops_cookbook.rollouts.staleness import Gate
from loops_cookbook.rollouts.stall import situation, tell_of_stalls
from loops_cookbook.runtimes.base import Slot

pytestmark = pytest.mark.anyio


async def test_a_situation_says_how_full_each_phase_is_and_who_is_longest_in_it() -> None:
    jobs: list[Job] = []
    for name, phase in (("a", "run"), ("b", "run"), ("c", "grading")):
        jobs.append(Job(f"attempt {name}", seconds=1, release_seconds=1))
        jobs[-1].enter(phase)
        await anyio.sleep(10)
    told = situation(
        reversed(jobs),
        [LimitStatistics("sampling", 2, 2, 5)],
        "groups: 3 running",
        anyio.current_time(),
    )
    assert told == (
        "tries: 2 in run, 1 in grading; slots: sampling 2/2 (5 wait); groups: 3 running; "
        "attempt a: 30 s in run, at an unknown line; "
        "attempt c: 10 s in grading, at an unknown line"
    )


async def test_a_run_that_waits_for_nothing_says_so() -> None:
    assert situation([], [], "gate shut", 0) == "tries: none; slots: ; gate shut"


async def test_a_stall_is_told_once_for_each_time_that_nothing_moved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_keeper() as keeper, anyio.create_task_group() as group:
        keeper.jobs.add(Job("a job", seconds=1, release_seconds=1))
        group.start_soon(tell_of_stalls, keeper, Limits(1, 1), lambda: "outside", 60.0)
        await anyio.sleep(185)
        group.cancel_scope.cancel()
        keeper.jobs.clear()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert caplog.records[0].message.startswith("nothing moved for 60 s: tries: 1 in waiting")


async def test_an_agent_whose_model_calls_go_on_does_not_stall(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Talks(Play):
        async def run(self, slot: Slot) -> None:
            for _ in range(10):
                await anyio.sleep(90)
                self.say()

    clocks = replace(CLOCKS, rollout_seconds=1000)
    async with world(PlayRuntime(Talks), clocks=clocks) as w:
        it = Scheduler(w.context, [task()], ScheduleRules(2, Gate(1)))
        async with it.running() as groups:
            await groups.receive()
    assert caplog.records == []


async def test_whatever_moves_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    async with open_keeper() as keeper, anyio.create_task_group() as group:
        moves = iter(range(100))
        group.start_soon(tell_of_stalls, keeper, Limits(1, 1), lambda: f"{next(moves)}", 60.0)
        await anyio.sleep(185)
        group.cancel_scope.cancel()
    assert caplog.records == []


async def test_a_run_that_hangs_names_the_line_at_which_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hangs(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            await anyio.sleep_forever()

    clocks = replace(CLOCKS, rollout_seconds=1000)
    async with world(PlayRuntime(Hangs), clocks=clocks) as w:
        it = Scheduler(w.context, [task()], ScheduleRules(2, Gate(1)))
        async with it.running():
            await anyio.sleep(250)
    assert "tries: 2 in run" in caplog.text
    assert "240 s in run, at tests/rollouts/test_stall.py:" in caplog.text


async def test_waiting_for_the_trainer_is_told_as_that_and_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with world() as w:
        it = Scheduler(w.context, [task()], ScheduleRules(2, Gate(1)))
        async with it.running() as groups:
            await groups.receive()
            await anyio.sleep(300)
    assert "1 with the trainer; gate shut until an update is published" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.INFO}
