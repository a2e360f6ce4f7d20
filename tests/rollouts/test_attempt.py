import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import numpy as np
import pytest
from pydantic import BaseModel
from tests.rollouts.doubles import (
    CLOCKS,
    Play,
    PlayLease,
    PlayRuntime,
    World,
    ignore_cancellation,
    run_attempt,
    start,
    world,
)

from loops_cookbook.attempts import Attempt, Fate
from loops_cookbook.errors import Discard, EngineDied, ServiceUnavailable
from loops_cookbook.rollouts.attempt import Finished
from loops_cookbook.rollouts.jobs import Job, Timer
from loops_cookbook.rollouts.limits import Limits
from loops_cookbook.runtimes.base import Place, Recorded, Slot
from loops_cookbook.tasks import Task

pytestmark = pytest.mark.anyio


async def attempt_of(runtime: PlayRuntime, **rules: int) -> Attempt:
    async with world(runtime, **rules) as w:
        return (await run_attempt(w.context, start(), 3)).attempt


def fate_of(attempt: Attempt) -> Fate | None:
    return None if attempt.discarded is None else attempt.discarded.fate


class Raises(Play):
    """Its first `faulty` tries raise."""

    faulty = 99

    async def run(self, slot: Slot) -> None:
        self.say()
        if self.place.trial < self.faulty:
            raise ConnectionError("no route")


async def test_a_graded_attempt_has_a_reward_and_its_tokens() -> None:
    attempt = await attempt_of(PlayRuntime())
    assert (attempt.reward, attempt.discarded, attempt.index) == (1.0, None, 3)
    assert [row.ids.tolist() for row in attempt.sequences] == [[1, 2, 7, 7]]
    assert (attempt.tries, attempt.flags.retried, attempt.flags.timed_out) == (1, False, False)


async def test_a_try_goes_through_its_phases_in_order() -> None:
    runtime = PlayRuntime()
    await attempt_of(runtime)
    assert runtime.plays[0].log == ["setup", "run", "grade", "close", "closed"]


async def test_a_try_that_raises_is_tried_again_on_a_new_lease() -> None:
    runtime = PlayRuntime(type("Twice", (Raises,), {"faulty": 2}))
    attempt = await attempt_of(runtime)
    assert [play.place.trial for play in runtime.plays] == [0, 1, 2]
    assert all(play.log[-1] == "closed" for play in runtime.plays)
    assert (attempt.reward, attempt.tries, attempt.flags.retried) == (1.0, 3, True)


async def test_an_attempt_whose_every_try_raises_is_discarded_as_failed_and_not_graded() -> None:
    runtime = PlayRuntime(Raises)
    attempt = await attempt_of(runtime, max_rollout_retries=1)
    assert attempt.discarded is not None
    assert (attempt.discarded.fate, attempt.discarded.exception) == (
        Fate.FAILED,
        "ConnectionError",
    )
    assert "no route" in attempt.discarded.detail
    assert "test_attempt.py:" in attempt.discarded.detail
    assert len(runtime.plays) == 2
    assert not any("grade" in play.log for play in runtime.plays)


async def test_a_setup_that_raises_is_tried_again() -> None:
    class Fails(Play):
        async def setup(self) -> None:
            raise OSError("no sandbox")

    runtime = PlayRuntime(Fails)
    attempt = await attempt_of(runtime)
    assert fate_of(attempt) == Fate.FAILED
    assert [play.log for play in runtime.plays] == [["setup", "close", "closed"]] * 3


async def test_a_setup_that_outlasts_its_clock_is_tried_again() -> None:
    class Slow(Play):
        async def setup(self) -> None:
            if self.place.trial == 0:
                await anyio.sleep(21)

    runtime = PlayRuntime(Slow)
    attempt = await attempt_of(runtime)
    assert (attempt.reward, attempt.tries) == (1.0, 2)
    assert runtime.plays[0].log == ["setup", "close", "closed"]


async def test_a_setup_clock_that_ran_out_on_every_try_is_a_failure_of_that_type() -> None:
    class Slow(Play):
        async def setup(self) -> None:
            await anyio.sleep(21)

    attempt = await attempt_of(PlayRuntime(Slow))
    assert attempt.discarded is not None
    assert (attempt.discarded.fate, attempt.discarded.exception) == (Fate.FAILED, "ClockRanOut")
    assert attempt.timing.setup == 20


async def test_a_setup_that_keeps_its_cut_to_itself_ran_out_of_time_all_the_same() -> None:
    class Deaf(Play):
        async def setup(self) -> None:
            with suppress(anyio.get_cancelled_exc_class()):
                await anyio.sleep_forever()

    runtime = PlayRuntime(Deaf)
    attempt = await attempt_of(runtime)
    assert attempt.discarded is not None
    assert attempt.discarded.detail == "setup: ClockRanOut: setup outlasted its clock of 20 s"
    assert runtime.plays[0].log == ["setup", "close", "closed"]


async def test_a_lease_that_cannot_be_opened_is_a_failed_try() -> None:
    class Broken(Play):
        def __init__(self, *args: object) -> None:
            raise TypeError("a constructor's fault")

    attempt = await attempt_of(PlayRuntime(Broken))
    assert attempt.discarded is not None
    assert (attempt.discarded.exception, attempt.tries) == ("TypeError", 3)


async def test_a_model_call_that_failed_fails_the_try_also_where_the_agent_swallowed_it() -> None:
    """An infrastructure failure must never become a reward of 0."""

    class Swallows(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            self.failure = ServiceUnavailable("the sampler is away")

        async def grade(self, *, timed_out: bool) -> object:
            return 0.0

    attempt = await attempt_of(PlayRuntime(Swallows))
    assert attempt.discarded is not None
    assert (attempt.reward, attempt.tries) == (None, 3)
    assert attempt.discarded.exception == "ServiceUnavailable"


async def test_discard_in_run_drops_the_attempt_without_another_try() -> None:
    class Drops(Play):
        async def run(self, slot: Slot) -> None:
            self.failure = ServiceUnavailable("swallowed before")
            raise Discard("unparsable task")

    attempt = await attempt_of(PlayRuntime(Drops))
    assert attempt.discarded is not None
    assert (attempt.discarded.fate, attempt.discarded.detail) == (Fate.DROPPED, "unparsable task")
    assert attempt.tries == 1


async def test_discard_in_grade_drops_the_attempt_without_another_grading_try() -> None:
    class Drops(Play):
        async def grade(self, *, timed_out: bool) -> object:
            raise Discard("no verdict")

    runtime = PlayRuntime(Drops, grading_retries=2)
    attempt = await attempt_of(runtime)
    assert fate_of(attempt) == Fate.DROPPED
    assert runtime.plays[0].log.count("grade") == 1


async def test_discard_inside_a_task_group_of_the_episode_is_still_discard() -> None:
    class Drops(Play):
        async def run(self, slot: Slot) -> None:
            async with anyio.create_task_group():
                raise Discard("from inside")

    assert fate_of(await attempt_of(PlayRuntime(Drops))) == Fate.DROPPED


async def test_an_attempt_without_a_sampled_token_is_neither_graded_nor_tried_again() -> None:
    class Silent(Play):
        async def run(self, slot: Slot) -> None:
            self.say(tokens=0)

    runtime = PlayRuntime(Silent)
    attempt = await attempt_of(runtime)
    assert (fate_of(attempt), attempt.tries) == (Fate.NO_REPLY, 1)
    assert "grade" not in runtime.plays[0].log


async def test_an_agent_that_is_cut_before_its_first_reply_is_discarded() -> None:
    class Waits(Play):
        async def run(self, slot: Slot) -> None:
            await anyio.sleep_forever()

    attempt = await attempt_of(PlayRuntime(Waits))
    assert (fate_of(attempt), attempt.flags.timed_out) == (Fate.NO_REPLY, True)


@pytest.mark.parametrize("acquires", [("sampling",), ()])
async def test_an_agent_that_its_clock_cuts_is_graded_and_told_so(acquires: tuple[str]) -> None:
    class Slow(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            await anyio.sleep_forever()

        async def grade(self, *, timed_out: bool) -> object:
            return 0.25 if timed_out else 1.0

    attempt = await attempt_of(PlayRuntime(Slow, acquires=acquires))
    assert (attempt.reward, attempt.flags.timed_out) == (0.25, True)
    assert attempt.timing.sampling == 100


async def test_what_an_agent_raises_because_it_is_cut_is_part_of_the_cut() -> None:
    class Complains(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            try:
                await anyio.sleep_forever()
            finally:
                raise RuntimeError("the browser is gone")

    attempt = await attempt_of(PlayRuntime(Complains))
    assert (attempt.reward, attempt.flags.timed_out, attempt.tries) == (1.0, True, 1)


async def test_discard_raised_at_the_cut_still_drops() -> None:
    class Drops(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            try:
                await anyio.sleep_forever()
            finally:
                raise Discard("too slow to count")

    assert fate_of(await attempt_of(PlayRuntime(Drops))) == Fate.DROPPED


async def test_grading_is_tried_again_on_the_same_lease_and_in_its_own_clock() -> None:
    class Flaky(Play):
        async def grade(self, *, timed_out: bool) -> object:
            tries = self.log.count("grade")
            if tries == 1:
                raise ValueError("judge said nothing")
            if tries == 2:
                await anyio.sleep(51)
            return 0.5

    runtime = PlayRuntime(Flaky, grading_retries=2)
    attempt = await attempt_of(runtime)
    assert (attempt.reward, len(runtime.plays), attempt.timing.grading) == (0.5, 1, 50)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1.0", np.array([1.0])])
async def test_what_is_no_finite_number_is_no_reward(value: object) -> None:
    class Grades(Play):
        async def grade(self, *, timed_out: bool) -> object:
            return value

    runtime = PlayRuntime(Grades, grading_retries=1)
    attempt = await attempt_of(runtime)
    assert attempt.discarded is not None
    assert (attempt.discarded.fate, attempt.discarded.exception) == (Fate.UNGRADED, "GradeError")
    assert "attempt 3 of group 0 (task 'task-0')" in attempt.discarded.detail
    assert runtime.plays[0].log.count("grade") == 2


async def test_a_grader_that_never_ends_leaves_no_reward() -> None:
    class Hangs(Play):
        async def grade(self, *, timed_out: bool) -> object:
            await anyio.sleep_forever()
            return 0.0

    attempt = await attempt_of(PlayRuntime(Hangs))
    assert attempt.discarded is not None
    assert (attempt.discarded.fate, attempt.discarded.exception) == (Fate.UNGRADED, "ClockRanOut")


async def test_a_rewarded_attempt_that_no_trainer_takes_is_too_long() -> None:
    attempt = await attempt_of(PlayRuntime(), max_seq_len=3)
    assert (attempt.reward, fate_of(attempt), attempt.sequences) == (None, Fate.TOO_LONG, ())


async def test_only_the_sequences_that_fit_are_kept() -> None:
    class Branches(Play):
        async def run(self, slot: Slot) -> None:
            self.say(prompt=[1, 2])
            self.say(prompt=[9] * 5)

    attempt = await attempt_of(PlayRuntime(Branches), max_seq_len=4)
    assert attempt.reward == 1.0
    assert [len(row.ids) for row in attempt.sequences] == [4]


async def test_metadata_and_flags_come_from_the_last_try() -> None:
    class Notes(Raises):
        faulty = 1

        async def run(self, slot: Slot) -> None:
            self.metadata["trial"] = self.place.trial
            self.context_full = True
            await super().run(slot)

    attempt = await attempt_of(PlayRuntime(Notes))
    assert attempt.metadata == {"trial": 1}
    assert attempt.flags.context_full


async def test_what_a_grader_notes_is_kept() -> None:
    class Notes(Play):
        async def grade(self, *, timed_out: bool) -> object:
            self.metadata["exact"] = True
            return 1

    assert (await attempt_of(PlayRuntime(Notes))).metadata == {"exact": True}


async def test_each_call_of_each_try_has_a_seed_of_its_own() -> None:
    runtime = PlayRuntime(Raises)
    await attempt_of(runtime)
    seeds = [play.place.call_seed(call) for play in runtime.plays for call in range(3)]
    assert len(set(seeds)) == 9


async def test_a_close_that_raises_costs_no_reward(caplog: pytest.LogCaptureFixture) -> None:
    class Rude(Play):
        async def close(self) -> None:
            raise OSError("already gone")

    attempt = await attempt_of(PlayRuntime(Rude))
    assert attempt.reward == 1.0
    assert "already gone" in caplog.text


async def test_a_close_that_never_ends_is_cut_and_costs_no_reward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hangs(Play):
        async def close(self) -> None:
            await anyio.sleep_forever()

    attempt = await attempt_of(PlayRuntime(Hangs))
    assert attempt.reward == 1.0
    assert "release outlasted its clock of 30 s" in caplog.text


async def test_waiting_for_a_slot_costs_a_try_no_time() -> None:
    class Works(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            await anyio.sleep(90)

    ended: list[Finished] = []
    async with (
        world(PlayRuntime(Works), limits=Limits(1, 1, 0)) as w,
        anyio.create_task_group() as group,
    ):
        for index in range(9):  # the last waits for longer than its hard deadline
            group.start_soon(run_it, w, index, ended)
    assert [finished.attempt.reward for finished in ended] == [1.0] * 9
    assert ended[-1].attempt.timing.waiting == 90 * 8


async def run_it(w: World, index: int, ended: list[Finished]) -> None:
    await run_attempt(w.context, start(), index, on_end=ended.append)


async def test_the_waits_of_all_tries_are_told() -> None:
    class FailsOnce(Raises):
        faulty = 1

    async def occupy(w: World, seconds: float) -> None:
        timer = Timer(99)
        await w.limits.starting.take(timer, anyio.current_time())
        await anyio.sleep(seconds)
        w.limits.starting.give_back(timer)

    ended: list[Finished] = []
    async with (
        world(PlayRuntime(FailsOnce), limits=Limits(1, 1)) as w,
        anyio.create_task_group() as group,
    ):
        group.start_soon(occupy, w, 5)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(run_it, w, 0, ended)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(occupy, w, 7)
    assert [(each.attempt.tries, each.attempt.timing.waiting) for each in ended] == [(2, 12)]


async def test_a_try_that_takes_all_of_its_clocks_is_not_left_behind() -> None:
    class Slow(Play):
        async def setup(self) -> None:
            await anyio.sleep(19)

        async def run(self, slot: Slot) -> None:
            self.say()
            await anyio.sleep(99)

        async def grade(self, *, timed_out: bool) -> object:
            await anyio.sleep(49)
            return 1.0 if self.log.count("grade") == 3 else None

        async def close(self) -> None:
            await anyio.sleep(29)

    attempt = await attempt_of(PlayRuntime(Slow, grading_retries=2))
    assert (attempt.reward, attempt.tries) == (1.0, 1)


async def test_a_grader_that_ignores_cancellation_is_left_behind_and_its_word_ignored() -> None:
    until = anyio.Event()

    class Stubborn(Play):
        async def grade(self, *, timed_out: bool) -> object:
            await ignore_cancellation(until)
            return 1.0

    async with world(PlayRuntime(Stubborn)) as w:
        began = anyio.current_time()
        attempt = (await run_attempt(w.context, start(), 0)).attempt
        took = anyio.current_time() - began
        until.set()
    assert (attempt.reward, fate_of(attempt)) == (None, Fate.UNGRADED)
    assert took == 20 + 100 + 50 + 30 + 10


async def test_an_agent_that_ignores_cancellation_fails_and_its_slot_goes_to_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    until = anyio.Event()

    class Stubborn(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            if self.place.attempt == 0:
                await ignore_cancellation(until)

    runtime, ended = PlayRuntime(Stubborn), list[Finished]()
    async with world(runtime, limits=Limits(1, 1, 0)) as w:
        async with anyio.create_task_group() as group:
            group.start_soon(run_it, w, 0, ended)
            await anyio.sleep(1)
            group.start_soon(run_it, w, 1, ended)
        until.set()
    first, second = sorted((each.attempt for each in ended), key=lambda a: a.index)
    assert (fate_of(first), first.tries) == (Fate.FAILED, 1)
    assert (second.reward, second.timing.waiting) == (1.0, 20 + 100 + 50 + 30 + 10 - 1)
    assert "is left behind: its run ignored cancellation at " in caplog.text
    assert "doubles.py" in caplog.text
    assert runtime.plays[0].log == ["setup", "run", "close", "closed"]
    assert [limit.held for limit in w.limits.statistics()] == [0, 0, 0]


async def test_a_close_that_ignores_cancellation_costs_no_known_reward() -> None:
    until = anyio.Event()

    class Stubborn(Play):
        async def close(self) -> None:
            await ignore_cancellation(until)

    async with world(PlayRuntime(Stubborn)) as w:
        finished = await run_attempt(w.context, start(), 0)
        until.set()
    assert finished.attempt.reward == 1.0


async def test_a_cancelled_attempt_is_released_and_reported_as_cancelled() -> None:
    class Waits(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            await anyio.sleep_forever()

        async def close(self) -> None:
            await anyio.sleep(5)

    runtime, ended = PlayRuntime(Waits), list[Finished]()
    async with world(runtime) as w:
        with anyio.move_on_after(10):
            await run_it(w, 0, ended)
        assert runtime.plays[0].log == ["setup", "run", "close", "closed"]
    (attempt,) = (each.attempt for each in ended)
    assert fate_of(attempt) == Fate.CANCELLED
    assert attempt.discarded is not None
    # Not of its release, in which the record found it.
    assert attempt.discarded.detail == "the run stopped during run"
    assert attempt.trajectory.sampled_tokens == 2


async def test_a_release_under_way_when_the_run_ends_is_still_under_its_clock() -> None:
    class Stuck(Play):
        async def close(self) -> None:
            await anyio.sleep_forever()

    async with world(PlayRuntime(Stuck)) as w, anyio.create_task_group() as group:
        began = anyio.current_time()
        group.start_soon(run_it, w, 0, list[Finished]())
        await anyio.sleep(5)
        w.context.keeper.group.cancel_scope.cancel()  # as its end does
        group.cancel_scope.cancel()
    assert anyio.current_time() - began == CLOCKS.release_seconds


async def test_an_attempt_cancelled_while_it_waits_for_room_is_reported() -> None:
    ended: list[Finished] = []
    async with world(limits=Limits(1, 1, 0)) as w:
        job = Job("", seconds=1, release_seconds=1)
        await w.limits.starting.take(job.timer, anyio.current_time())
        with anyio.move_on_after(10):
            await run_it(w, 0, ended)
        w.limits.starting.give_back(job.timer)
    assert [fate_of(each.attempt) for each in ended] == [Fate.CANCELLED]


async def test_a_reward_that_is_known_when_the_run_stops_is_kept() -> None:
    class Lingers(Play):
        async def close(self) -> None:
            await anyio.sleep(5)

    ended: list[Finished] = []
    async with world(PlayRuntime(Lingers)) as w:
        with anyio.move_on_after(1):
            await run_it(w, 0, ended)
    assert [each.attempt.reward for each in ended] == [1.0]


async def test_a_try_that_failed_and_might_be_made_again_is_cancelled_with_the_run() -> None:
    class FailsAndLingers(Raises):
        async def close(self) -> None:
            await anyio.sleep(5)

    ended: list[Finished] = []
    async with world(PlayRuntime(FailsAndLingers)) as w:
        with anyio.move_on_after(1):
            await run_it(w, 0, ended)
    assert [fate_of(each.attempt) for each in ended] == [Fate.CANCELLED]


@pytest.mark.parametrize("where", ["swallowed", "run", "grade"])
async def test_the_death_of_the_engine_ends_more_than_the_attempt(where: str) -> None:
    dead = EngineDied("the engine ended")

    class Unlucky(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            if where == "swallowed":
                self.failure = dead
            elif where == "run":
                raise dead

        async def grade(self, *, timed_out: bool) -> object:
            raise dead

    runtime, ended = PlayRuntime(Unlucky, grading_retries=3), list[Finished]()
    async with world(runtime) as w:
        with pytest.raises(EngineDied):
            await run_it(w, 0, ended)
    expected = Fate.UNGRADED if where == "grade" else Fate.FAILED
    assert [fate_of(each.attempt) for each in ended] == [expected]
    assert len(runtime.plays) == 1
    assert runtime.plays[0].log[-1] == "closed"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_future_in_user_code_is_a_fault_and_not_the_end_of_the_run() -> None:
    """A CancelledError out of a child task ended its whole task group, without any message."""

    class Awaits(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    attempt = await attempt_of(PlayRuntime(Awaits))
    assert attempt.discarded is not None
    assert (attempt.discarded.exception, attempt.tries) == ("StrayCancellation", 3)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_cancelling_the_task_that_runs_an_attempt_passes() -> None:
    class Waits(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            running.set()
            await anyio.sleep_forever()

    running = anyio.Event()
    runtime, ended = PlayRuntime(Waits), list[Finished]()
    async with world(runtime) as w:
        task = asyncio.ensure_future(run_it(w, 0, ended))
        await running.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [fate_of(each.attempt) for each in ended] == [Fate.CANCELLED]
    assert runtime.plays[0].log[-1] == "closed"


async def test_a_person_who_interrupts_is_heeded() -> None:
    class Interrupted(Play):
        async def run(self, slot: Slot) -> None:
            raise KeyboardInterrupt

    runtime = PlayRuntime(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        await attempt_of(runtime)
    assert runtime.plays[0].log[-1] == "closed"


class Panic(BaseException):
    """As of a library written in Rust."""


@pytest.mark.parametrize("phase", ["open", "setup", "run", "grade", "close"])
@pytest.mark.parametrize(
    "error", [SystemExit(0), GeneratorExit(), Panic("index out of bounds")], ids=repr
)
async def test_what_is_meant_to_end_a_process_ends_a_try(phase: str, error: BaseException) -> None:
    """A `sys.exit(0)` in a grader ended the run: exit status 0, with nothing trained.

    And `GeneratorExit` ended it as a bug of this package.
    """

    class Exits(Play):
        def __init__(self, task: Task[BaseModel], place: Place) -> None:
            super().__init__(task, place)
            self.raise_in("open")

        def raise_in(self, here: str) -> None:
            if here == phase and self.place.trial == 0:
                raise error

        async def setup(self) -> None:
            self.raise_in("setup")

        async def run(self, slot: Slot) -> None:
            self.say()
            self.raise_in("run")

        async def grade(self, *, timed_out: bool) -> object:
            self.raise_in("grade")
            return 1.0

        async def close(self) -> None:
            self.raise_in("close")

    attempt = await attempt_of(PlayRuntime(Exits))
    if phase == "grade":
        assert attempt.discarded is not None
        assert (attempt.discarded.fate, attempt.discarded.exception) == (Fate.UNGRADED, "StrayExit")
    else:
        assert (attempt.reward, attempt.tries) == (1.0, 1 if phase == "close" else 2)


@pytest.mark.parametrize("error", [KeyError("turns"), SystemExit(0)], ids=repr)
async def test_a_runtime_that_cannot_say_what_it_recorded_fails_a_try_and_not_the_run(
    error: BaseException,
) -> None:
    """It ended the run, as a bug of this package."""

    class Forgets(PlayLease):
        def recorded(self) -> Recorded:
            raise error

    class Forgetful(PlayRuntime):
        @asynccontextmanager
        async def open(self, task: Task[BaseModel], place: Place) -> AsyncIterator[PlayLease]:
            async with super().open(task, place) as lease:
                yield Forgets(lease.play, acquires=True) if place.trial == 0 else lease

    attempt = await attempt_of(Forgetful())
    assert (attempt.reward, attempt.tries) == (1.0, 2)


async def test_what_a_setup_gives_is_no_fault() -> None:
    """A runtime whose setup returned True failed every try, by `setup: bool: True`."""

    class Ready(Play):
        async def setup(self) -> object:  # type: ignore[override]
            return True

    class Gives(PlayLease):
        async def setup(self) -> object:  # type: ignore[override]
            return await self.play.setup()

    class Giving(PlayRuntime):
        @asynccontextmanager
        async def open(self, task: Task[BaseModel], place: Place) -> AsyncIterator[PlayLease]:
            async with super().open(task, place) as lease:
                yield Gives(lease.play, acquires=False)

    assert (await attempt_of(Giving(Ready))).reward == 1.0


async def test_a_lease_that_holds_a_task_group_open_is_left_in_order() -> None:
    """A clock around a part of the lease's life would close scopes in the wrong order."""

    class Holds(PlayRuntime):
        @asynccontextmanager
        async def open(self, task: Task[BaseModel], place: Place) -> AsyncIterator[PlayLease]:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
                async with super().open(task, place) as lease:
                    yield lease
                group.cancel_scope.cancel()

    class Slow(Play):
        async def setup(self) -> None:
            if self.place.trial == 0:
                await anyio.sleep_forever()

    attempt = await attempt_of(Holds(Slow))
    assert (attempt.reward, attempt.tries) == (1.0, 2)
