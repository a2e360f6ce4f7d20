"""How long a job may go on, and what is known of it from outside."""

import math
import threading

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from loops_cookbook.rollouts.blocks import Block
from loops_cookbook.rollouts.jobs import Job, Timer

pytestmark = pytest.mark.anyio


async def test_a_hard_deadline_passes_only_once_it_was_started() -> None:
    timer = Timer(5)
    assert timer.hard_at == math.inf
    await anyio.sleep(3)
    timer.start(anyio.current_time())
    assert timer.hard_at == anyio.current_time() + 5
    timer.stop()
    assert timer.hard_at == math.inf


async def test_what_is_left_of_a_hard_deadline_is_left_after_it_stood_still() -> None:
    timer, expected = Timer(5), list[float]()
    timer.expect = expected.append
    began = anyio.current_time()
    timer.start(anyio.current_time())
    await anyio.sleep(2)
    with timer.standing_still(anyio.current_time()):
        await anyio.sleep(100)
        assert timer.hard_at == math.inf
    assert expected == [began + 5, began + 105] == [began + 5, timer.hard_at]


async def test_a_hard_deadline_that_was_not_started_does_not_run_after_it_stood_still() -> None:
    timer = Timer(5)
    with timer.standing_still(anyio.current_time()):
        await anyio.sleep(1)
    assert timer.hard_at == math.inf


async def test_a_job_that_begins_anew_waits_and_has_its_whole_time_before_it() -> None:
    job = Job("a job", seconds=5, release_seconds=1)
    job.timer.start(anyio.current_time())
    job.enter("run")
    await anyio.sleep(1)
    job.begin(lambda: 3)
    assert (job.phase, job.since, job.progress()) == ("waiting", anyio.current_time(), 3)
    assert job.timer.hard_at == math.inf


async def test_a_clock_stands_still_while_room_is_waited_for_and_none_is_had() -> None:
    timer, block = Timer(100), Block()
    now = anyio.current_time()
    timer.start(now)
    timer.begin_clock(block, now + 10)
    with timer.waiting():
        await anyio.sleep(7)
        assert (timer.cuts_at, timer.hard_at, timer.at) == (math.inf, math.inf, math.inf)
        with timer.served():  # in another branch
            assert timer.cuts_at == now + 17
            await anyio.sleep(2)
        await anyio.sleep(5)
    assert (timer.cuts_at, timer.hard_at) == (now + 10 + 12, now + 100 + 12)
    assert timer.at == now + 22


async def test_a_clock_that_begins_while_time_stands_still_has_its_whole_time_before_it() -> None:
    timer = Timer(100)
    with timer.waiting():  # in a task that an earlier phase left
        await anyio.sleep(3)
        timer.start(anyio.current_time())
        timer.begin_clock(Block(), anyio.current_time() + 10)
        await anyio.sleep(4)
    now = anyio.current_time()
    assert (timer.cuts_at, timer.hard_at) == (now + 10, now + 100)


async def test_time_goes_on_only_when_nothing_is_waited_for() -> None:
    timer = Timer(100)
    timer.start(0)
    with timer.standing_still(anyio.current_time()):
        with timer.waiting():
            await anyio.sleep(1)
        assert timer.hard_at == math.inf
    assert timer.stood(anyio.current_time()) == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_job_that_waits_for_a_thread_is_not_said_to_ignore_its_cancellation() -> None:
    started, done = anyio.Event(), threading.Event()

    def work() -> None:
        anyio.from_thread.run_sync(started.set)
        done.wait()

    async def waits() -> None:
        await anyio.to_thread.run_sync(work)

    job = Job("a job", seconds=1, release_seconds=1)
    async with anyio.create_task_group() as group:
        group.start_soon(job.perform, waits)
        await started.wait()
        stayed = job.stayed
        done.set()
    assert stayed.startswith("could not be cancelled at tests/rollouts/test_jobs.py:")
    assert "in waits, which waits for a thread that runs " in stayed
    assert "in work: give such work to compute()" in stayed
