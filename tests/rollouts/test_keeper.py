from collections.abc import Sequence

import anyio
import pytest
from tests.rollouts.doubles import ignore_cancellation

from loops_cookbook.rollouts.blocks import REMINDER_SECONDS, Block
from loops_cookbook.rollouts.jobs import Job
from loops_cookbook.rollouts.keeper import STRAY_SECONDS, Keeper, open_group, open_keeper
from loops_cookbook.rollouts.limits import Limit, PhaseSlot

pytestmark = pytest.mark.anyio


def job(seconds: float = 100, release_seconds: float = 5) -> Job:
    made = Job("a job", seconds=seconds, release_seconds=release_seconds)
    made.timer.start(anyio.current_time())
    return made


async def test_an_error_comes_out_of_a_group_as_itself() -> None:
    async def fail() -> None:
        raise LookupError("one")

    async def nested() -> None:
        async with open_group() as outer, open_group() as inner:
            inner.start_soon(fail)
            outer.start_soon(anyio.sleep_forever)
            await anyio.sleep_forever()

    with pytest.raises(LookupError, match="one"):
        await nested()


async def test_an_error_keeps_its_cause() -> None:
    async def fail() -> None:
        raise LookupError("one") from KeyError("root")

    with pytest.raises(LookupError) as caught:
        async with open_group() as group:
            group.start_soon(fail)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_cancelling_around_a_group_is_no_error() -> None:
    with anyio.move_on_after(1) as scope:
        async with open_group() as group:
            group.start_soon(anyio.sleep_forever)
            group.start_soon(anyio.sleep_forever)
    assert scope.cancelled_caught


async def test_a_job_that_ends_in_time_is_waited_for() -> None:
    async with open_keeper() as keeper:
        assert await keeper.outcome(job(), work(10))
        assert not keeper.jobs


async def test_what_a_job_raises_comes_out_where_it_is_waited_for() -> None:
    async def fail() -> None:
        raise LookupError("ours")

    async with open_keeper() as keeper:
        with pytest.raises(LookupError, match="ours"):
            await keeper.outcome(job(), fail)


async def test_an_error_of_one_job_cancels_those_it_is_waited_for_with() -> None:
    released: list[float] = []

    async def fail() -> None:
        await anyio.sleep(1)
        raise LookupError("ours")

    async def hold() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(4)
                released.append(anyio.current_time())

    async with open_keeper() as keeper:
        began = anyio.current_time()
        with pytest.raises(LookupError, match="ours"):
            await keeper.outcomes({job(): hold, job(): fail, job(): hold})
        assert released == [began + 5] * 2
        assert not keeper.jobs


async def test_of_several_jobs_each_is_left_behind_at_its_own_hard_deadline() -> None:
    """One timer looks at them all, and the next to pass may be the last that was started."""
    left: list[tuple[str, float]] = []
    until = anyio.Event()

    def stubborn(name: str, seconds: float) -> Job:
        def on_left() -> None:
            left.append((name, anyio.current_time() - began))

        made = Job(name, seconds=seconds, release_seconds=5, on_left=on_left)
        made.timer.start(anyio.current_time())
        return made

    async with open_keeper() as keeper:
        began = anyio.current_time()
        jobs = [stubborn("a", 9), stubborn("b", 3), stubborn("c", 6)]
        await keeper.outcomes({job: lambda: ignore_cancellation(until) for job in jobs})
        assert left == [("b", 3), ("c", 6), ("a", 9)]
        assert not await keeper.outcome(job(seconds=4), lambda: ignore_cancellation(until))
        assert anyio.current_time() - began == 13
        until.set()


async def test_a_job_that_outlasts_its_hard_deadline_is_left_and_cancelled() -> None:
    cancelled: list[float] = []

    async def wait() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(anyio.current_time())

    async with open_keeper() as keeper:
        began = anyio.current_time()
        assert not await keeper.outcome(job(seconds=7), wait)
        assert anyio.current_time() - began == 7
    assert cancelled == [began + 7]


async def test_cancelling_the_wait_cancels_the_job_and_waits_for_its_release() -> None:
    released: list[float] = []

    async def hold() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(4)
                released.append(anyio.current_time())

    async with open_keeper() as keeper:
        began = anyio.current_time()
        with anyio.move_on_after(1):
            await keeper.outcome(job(), hold)
        assert released == [began + 5] == [anyio.current_time()]


async def test_cancelling_the_wait_does_not_wait_for_ever() -> None:
    until = anyio.Event()
    async with open_keeper() as keeper:
        began = anyio.current_time()
        with anyio.move_on_after(1):
            await keeper.outcome(job(release_seconds=5), lambda: ignore_cancellation(until))
        took = anyio.current_time() - began
        until.set()
    assert took == 1 + 5 + STRAY_SECONDS


async def test_the_end_of_a_run_is_bounded_once_however_often_it_is_waited_for() -> None:
    """Ctrl-C amid an agent that ignores cancellation took the last while of its group, and then
    that of the run."""
    until = anyio.Event()
    ended_at: list[float] = []

    def end(jobs: Sequence[str]) -> None:
        ended_at.append(anyio.current_time())
        until.set()

    began = anyio.current_time()
    with anyio.move_on_after(1):
        async with open_keeper(end) as keeper:
            await keeper.outcome(job(release_seconds=5), lambda: ignore_cancellation(until))
    assert ended_at == [began + 1 + 5 + STRAY_SECONDS]


@pytest.mark.parametrize("seconds", [0.0, 2.0])
async def test_an_end_that_is_hurried_waits_for_no_job(seconds: float) -> None:
    """A second Ctrl-C changed nothing."""
    told: list[Sequence[str]] = []
    until = anyio.Event()

    def end(jobs: Sequence[str]) -> None:
        told.append(jobs)
        until.set()

    async def release() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await until.wait()

    async def hurry(keeper: Keeper) -> None:
        await anyio.sleep(1 + seconds)
        keeper.hurry()

    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        with anyio.move_on_after(1):
            async with open_keeper(end) as keeper:
                group.start_soon(hurry, keeper)
                await keeper.outcomes({job(): release, job(): release})
        assert anyio.current_time() == began + 1 + seconds
    ((line,),) = told
    assert line.startswith("a job and 1 more: waiting, at tests/rollouts/test_keeper.py:")


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_run_that_is_cancelled_before_it_begins_ends() -> None:
    """What keeps the time is shielded, and was waited for."""
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with open_keeper():
            await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_strays_that_end_soon_are_no_trouble() -> None:
    told: list[Sequence[str]] = []

    async def linger() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(20)

    async with open_keeper(told.append) as keeper:
        assert not await keeper.outcome(job(seconds=15), linger)
    assert told == []


async def test_who_must_end_the_process_is_told_of_strays_that_do_not_end() -> None:
    until = anyio.Event()
    told: list[Sequence[str]] = []

    def end(jobs: Sequence[str]) -> None:
        told.append(jobs)
        until.set()  # a command ends its process instead

    async with open_keeper(end) as keeper:
        assert not await keeper.outcome(job(seconds=1), lambda: ignore_cancellation(until))
    (jobs,) = told
    assert len(jobs) == 1
    assert "a job: waiting, at tests/rollouts/doubles.py:" in jobs[0]
    assert "in ignore_cancellation" in jobs[0]


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("run_ends", [False, True], ids=["during the run", "after its end"])
async def test_a_stray_is_cancelled_now_and_then_and_not_in_every_turn_of_the_loop(
    run_ends: bool,
) -> None:
    """One that swallowed cancellation took the whole of a CPU, up to the end of the process."""
    cancelled = 0
    until = anyio.Event()

    async def swallow() -> None:
        nonlocal cancelled
        with Block() as made.block:
            while not until.is_set():
                try:
                    await until.wait()
                except anyio.get_cancelled_exc_class():
                    cancelled += 1

    async def settle() -> None:
        await anyio.sleep(0.4)
        until.set()

    async with anyio.create_task_group() as group, open_keeper() as keeper:
        made = job(seconds=0.05)
        await keeper.outcome(made, swallow)
        group.start_soon(settle)
        if not run_ends:
            await anyio.sleep(0.3)
    assert 1 <= cancelled < 10


async def test_what_ignores_its_clock_is_reminded_of_it_and_not_in_every_turn_of_the_loop() -> None:
    """An agent that swallowed the cut took the whole of a CPU, up to its hard deadline."""
    made = job()
    tries = 0

    async def stubborn() -> None:
        nonlocal tries
        async with PhaseSlot(Limit("sampling", 1), 10, made.timer):
            with anyio.CancelScope(shield=True):
                await anyio.sleep(11.5)  # beyond the clock, and long enough to be calmed
            while tries < 3:
                try:
                    await anyio.sleep_forever()
                except anyio.get_cancelled_exc_class():
                    tries += 1
            await anyio.sleep_forever()

    async with open_keeper() as keeper:
        began = anyio.current_time()
        assert await keeper.outcome(made, stubborn)
        reminded = anyio.current_time() - began - 11.5
        # A reminder lasts a turn of the loop, in which a task is cancelled once or twice.
        assert REMINDER_SECONDS <= reminded <= 4 * REMINDER_SECONDS


async def test_what_was_calmed_in_its_phase_is_cancelled_when_the_run_ends() -> None:
    ended = False

    async def once_deaf() -> None:
        nonlocal ended
        async with PhaseSlot(Limit("sampling", 1), 10, made.timer):
            with anyio.CancelScope(shield=True):
                await anyio.sleep(11.5)
            try:
                await anyio.sleep_forever()
            finally:
                ended = True

    made = job()
    async with anyio.create_task_group() as group, open_keeper() as keeper:
        group.start_soon(keeper.outcome, made, once_deaf)
        await anyio.sleep(11.6)
        assert not ended
        group.cancel_scope.cancel()
    assert ended


async def test_a_stray_that_heeds_a_later_cancellation_ends() -> None:
    tries = 0

    async def stubborn() -> None:
        nonlocal tries
        with Block() as made.block:
            while tries < 3:
                try:
                    await anyio.sleep_forever()
                except anyio.get_cancelled_exc_class():
                    tries += 1

    made = job(seconds=10)
    async with open_keeper() as keeper:
        assert not await keeper.outcome(made, stubborn)
        await anyio.sleep(STRAY_SECONDS)
        assert not keeper.jobs


async def test_strays_are_named_in_the_log_by_default(caplog: pytest.LogCaptureFixture) -> None:
    until = anyio.Event()

    async def end_later(keeper: Keeper) -> None:
        await keeper.outcome(job(seconds=1), lambda: ignore_cancellation(until))

    async with anyio.create_task_group() as group, open_keeper() as keeper:
        await end_later(keeper)
        group.start_soon(sleep_and_set, until)
    assert "the run cannot end, because these ignore cancellation: a job" in caplog.text


async def sleep_and_set(event: anyio.Event) -> None:
    await anyio.sleep(STRAY_SECONDS + 5)
    event.set()


def work(seconds: float):
    async def sleep() -> None:
        await anyio.sleep(seconds)

    return sleep
