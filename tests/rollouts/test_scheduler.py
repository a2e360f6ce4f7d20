import gc
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.abc import ObjectReceiveStream
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollouts.doubles import Play, PlayRuntime, World, ignore_cancellation, task, world
from trio.testing import MockClock

from loops_cookbook.attempts import Attempt, Fate, Group, Rejection
from loops_cookbook.errors import Discard, EngineDied, ServiceUnavailable
from loops_cookbook.learning.advantages import judge
from loops_cookbook.rollouts.limits import Limits
from loops_cookbook.rollouts.order import draw
from loops_cookbook.rollouts.scheduler import Scheduler, ScheduleRules, run_set
from loops_cookbook.rollouts.staleness import Gate
from loops_cookbook.runtimes.base import Slot

TASKS = [task(index) for index in range(5)]

virtual = pytest.mark.anyio


def scheduler(w: World, gate: Gate, **rules: Any) -> Scheduler:
    return Scheduler(w.context, TASKS, ScheduleRules(**{"group_size": 2, **rules}, gate=gate))


@virtual
async def test_groups_that_were_cut_start_again_before_any_other() -> None:
    told: list[int] = []
    async with world() as w:
        rules = ScheduleRules(2, Gate(9), epochs=2, first_serial=8, again=(3, 6))
        it = Scheduler(w.context, TASKS, rules, on_start=lambda start: told.append(start.serial))
        async with it.running() as groups:
            taken = {group.serial: group async for group in groups}
    assert told == [3, 6, 8, 9]
    drawn = {each.serial: each for each in draw(len(TASKS), 0, epochs=2)}
    assert {s: group.task_index for s, group in taken.items()} == {
        serial: drawn[serial].index for serial in told
    }


class Slow(Play):
    async def run(self, slot: Slot) -> None:
        self.say()
        await anyio.sleep(10)


@virtual
async def test_epochs_end_the_stream_when_every_group_was_taken() -> None:
    async with world() as w:
        it = scheduler(w, Gate(2), epochs=2)
        async with it.running() as groups:
            taken: list[Group] = []
            async for group in groups:
                taken.append(group)
                it.published(len(taken), 1)
    taken.sort(key=lambda group: group.serial)
    assert [group.serial for group in taken] == list(range(10))
    assert sorted(group.task_index for group in taken[:5]) == list(range(5))
    assert {group.epoch for group in taken[5:]} == {1}
    assert it.leftovers == ()


@virtual
async def test_updates_end_the_stream_and_no_group_is_started_for_nothing() -> None:
    async with world(PlayRuntime(Slow)) as w:
        it = scheduler(w, Gate(2, max_staleness=3, updates=2))
        async with it.running() as groups:
            taken = [await groups.receive() for _ in range(4)]
            assert it.counts.started == 4
            it.published(1, 2)
            it.published(2, 2)
            with pytest.raises(anyio.EndOfStream):
                await groups.receive()
    assert len(taken) == 4


@virtual
async def test_the_first_group_samples_while_the_others_are_still_made() -> None:
    """All groups of an update were made at once, so nothing was sampled until the last was."""
    started: list[int] = []

    class Noting(Play):
        async def run(self, slot: Slot) -> None:
            started.append(it.counts.started)
            self.say()

    async with world(PlayRuntime(Noting)) as w:
        it = scheduler(w, Gate(100), epochs=None)
        async with it.running() as groups:
            await groups.receive()
            await anyio.sleep(1)
    assert started[0] < 20
    assert started[-1] == 100


@virtual
async def test_a_sync_group_starts_only_under_the_policy_that_trains_it() -> None:
    async with world(PlayRuntime(Slow)) as w:
        it = scheduler(w, Gate(2))
        async with it.running() as groups:
            first = [await groups.receive(), await groups.receive()]
            await anyio.sleep(100)
            assert it.counts.started == 2
            it.published(7, 2)
            second = await groups.receive()
    assert {group.policy_version for group in first} == {0}
    assert second.policy_version == 7


@virtual
async def test_a_rejected_group_is_replaced_by_the_next_task_under_the_same_policy() -> None:
    async with world() as w:
        it = scheduler(w, Gate(1), shuffle=False)
        async with it.running() as groups:
            first = await groups.receive()
            it.rejected(first.serial)
            second = await groups.receive()
    assert [first.task_index, second.task_index] == [0, 1]
    assert second.policy_version == 0


@virtual
async def test_groups_that_nobody_takes_hold_sampling_back() -> None:
    async with world() as w:
        it = scheduler(w, Gate(2, max_staleness=1))
        async with it.running():
            await anyio.sleep(1000)
            assert (it.counts.started, it.counts.untaken) == (4, 4)


@virtual
async def test_what_was_started_and_not_taken_is_left_over_with_a_fate_for_each() -> None:
    class Mixed(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            await anyio.sleep(1 if self.place.group < 2 else 1000)

    async with world(PlayRuntime(Mixed)) as w:
        it = scheduler(w, Gate(3))
        async with it.running() as groups:
            taken = await groups.receive()
            await anyio.sleep(1)
    left = it.leftovers
    assert sorted([taken.serial, *(group.serial for group in left)]) == [0, 1, 2]
    assert [attempt.reward for attempt in left[0].attempts] == [1.0, 1.0]
    assert [a.discarded.fate for a in left[1].attempts if a.discarded] == [Fate.CANCELLED] * 2
    assert len(w.ended) == 6


@virtual
async def test_a_receiver_that_is_cancelled_loses_no_group() -> None:
    """A memory stream loses a group whose receiver is cancelled while it is handed over."""
    async with world(PlayRuntime(Slow)) as w:
        it = scheduler(w, Gate(1))
        async with it.running() as groups:
            with anyio.move_on_after(10):  # the moment in which the group settles
                await groups.receive()
            await anyio.sleep(1)
    assert [group.serial for group in it.leftovers] == [0]


@virtual
async def test_the_death_of_the_engine_comes_out_of_the_block_as_itself() -> None:
    class Unlucky(Play):
        async def run(self, slot: Slot) -> None:
            await anyio.sleep(5)
            raise EngineDied("the engine ended")

    async with world(PlayRuntime(Unlucky)) as w:
        it = scheduler(w, Gate(2))
        with pytest.raises(EngineDied, match="the engine ended"):
            async with it.running() as groups:
                await groups.receive()
    assert sum(len(group.attempts) for group in it.leftovers) == len(w.ended) == 4


@virtual
async def test_a_crash_of_our_own_ends_the_run_at_once() -> None:
    """A worker that dies in the background must not leave its consumer waiting for ever."""

    def crash(attempt: Attempt) -> None:
        raise ZeroDivisionError("a bug")

    async with world() as w:
        it = Scheduler(w.context_with(on_end=crash), TASKS, ScheduleRules(2, Gate(1)))
        with pytest.raises(ZeroDivisionError):
            async with it.running() as groups:
                await groups.receive()


@virtual
async def test_what_the_block_itself_raises_comes_out_as_itself() -> None:
    async def recipe(it: Scheduler) -> None:
        async with it.running():
            await anyio.sleep(1)
            raise LookupError("mine")

    async with world(PlayRuntime(Slow)) as w:
        with pytest.raises(LookupError, match="mine"):
            await recipe(scheduler(w, Gate(1)))
    assert [attempt.discarded is not None for attempt in w.ended] == [True, True]


@virtual
async def test_a_task_that_fails_in_every_group_never_stops_the_others() -> None:
    class SomeFail(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            if self.task.index == 2:
                raise OSError("bad task")

    async with world(PlayRuntime(SomeFail)) as w:
        it = scheduler(w, Gate(1), epochs=1)
        async with it.running() as groups:
            async for group in groups:
                it.rejected(group.serial)
    fates = [a.discarded.fate for a in w.ended if a.discarded]
    assert fates == [Fate.FAILED] * 2
    assert len(w.ended) == 10


@virtual
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_run_that_is_stopped_in_the_middle_accounts_for_every_attempt_on_asyncio() -> None:
    class Mixed(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            if self.place.attempt == 1:
                await anyio.sleep_forever()

    async with world(PlayRuntime(Mixed), limits=Limits(3, 1, 1)) as w:
        it = scheduler(w, Gate(3))
        with anyio.move_on_after(0.05) as stopped:
            async with it.running() as groups:
                await groups.receive()
    assert stopped.cancelled_caught
    fates = [a.reward if a.discarded is None else a.discarded.fate for a in w.ended]
    assert fates.count(Fate.CANCELLED) == 3
    assert [len(group.attempts) for group in it.leftovers] == [2, 2, 2]
    assert all(play.log[-1] == "closed" for play in w.runtime.plays)


@virtual
async def test_memory_stays_flat_over_many_groups() -> None:
    alive: weakref.WeakSet[Play] = weakref.WeakSet()
    groups_alive = 0
    gc.collect()  # what other tests left must not go while this one counts
    gc.collect()
    before = sum(type(each) is Group for each in gc.get_objects())

    class Tracked(Play):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.add(self)

    async with world(PlayRuntime(Tracked)) as w:
        it = Scheduler(
            w.context_with(on_end=lambda attempt: None), TASKS, ScheduleRules(1, Gate(4), epochs=60)
        )
        async with it.running() as groups:
            async for group in groups:
                w.runtime.plays.clear()
                it.rejected(group.serial)
                del group
        gc.collect()
        groups_alive = sum(type(each) is Group for each in gc.get_objects()) - before
    assert it.counts.started == 300
    assert len(alive) <= 1
    assert groups_alive == 0


@virtual
async def test_a_set_gives_a_group_for_each_task_in_their_order() -> None:
    async with world(PlayRuntime(Slow), limits=Limits(4, 4, 0)) as w:
        groups = await run_set(w.context, TASKS, attempts=3, policy_version=4)
    assert [group.serial for group in groups] == [0, 1, 2, 3, 4]
    assert {len(group.attempts) for group in groups} == {3}
    assert {group.policy_version for group in groups} == {4}


@virtual
async def test_a_set_ends_when_every_attempt_of_it_hangs() -> None:
    """A held-out evaluation that is in flight at the end must not hold the run for ever."""

    class Hangs(Play):
        async def run(self, slot: Slot) -> None:
            await anyio.sleep_forever()

    async with world(PlayRuntime(Hangs), limits=Limits(1, 1, 0)) as w:
        groups = await run_set(w.context, TASKS[:2], attempts=2)
    fates = {a.discarded.fate for group in groups for a in group.attempts if a.discarded}
    assert fates == {Fate.NO_REPLY}


@virtual
async def test_no_evaluation_attempt_is_too_long() -> None:
    async with world(max_seq_len=2) as w:
        groups = await run_set(w.context, TASKS[:1], attempts=1)
    assert groups[0].attempts[0].reward == 1.0


@virtual
async def test_a_set_shares_the_limits_with_training() -> None:
    busy = most = 0

    class Counts(Play):
        async def run(self, slot: Slot) -> None:
            nonlocal busy, most
            self.say()
            busy += 1
            most = max(most, busy)
            await anyio.sleep(1)
            busy -= 1

    async with world(PlayRuntime(Counts), limits=Limits(3, 3, 1)) as w:
        it = scheduler(w, Gate(2), epochs=1)
        async with it.running() as groups, anyio.create_task_group() as group:
            group.start_soon(take_all, it, groups)
            await run_set(w.context, TASKS, attempts=2)
    assert most == 3


async def take_all(it: Scheduler, groups: ObjectReceiveStream[Group]) -> None:
    async for group in groups:
        it.rejected(group.serial)


@virtual
async def test_while_all_slots_are_taken_only_so_many_tries_are_set_up_ahead() -> None:
    ready: set[int] = set()
    seen: list[int] = []

    class Ahead(Play):
        async def setup(self) -> None:
            ready.add(id(self))

        async def run(self, slot: Slot) -> None:
            self.say()
            ready.discard(id(self))
            await anyio.sleep(5)
            seen.append(len(ready))
            await anyio.sleep(5)

    async with world(PlayRuntime(Ahead), limits=Limits(2, 2, 3)) as w:
        await run_set(w.context, TASKS, attempts=4)
    assert seen[:16] == [3] * 16
    assert seen[16:] == [2, 2, 0, 0]  # the last ones


MISHAPS: dict[str, Callable[[Play], Any]] = {}


def mishap(function: Callable[[Play], Any]) -> Callable[[Play], Any]:
    MISHAPS[function.__name__] = function
    return function


@mishap
async def nothing(play: Play) -> None: ...


@mishap
async def raises(play: Play) -> None:
    raise OSError("boom")


@mishap
async def hangs(play: Play) -> None:
    await anyio.sleep_forever()


@mishap
async def drops(play: Play) -> None:
    raise Discard("not this one")


@mishap
async def swallows_a_failure(play: Play) -> None:
    play.failure = ServiceUnavailable("away")


@mishap
async def complains_when_cut(play: Play) -> None:
    try:
        await anyio.sleep_forever()
    finally:
        raise RuntimeError("rude")


@mishap
async def takes_a_while(play: Play) -> None:
    await anyio.sleep(7)


@mishap
async def ignores_cancellation_for_long(play: Play) -> None:
    until = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(ignore_cancellation, until, 100)
        with anyio.CancelScope(shield=True):
            await anyio.sleep(400)
        until.set()


scripts = st.fixed_dictionaries(
    {
        "setup": st.sampled_from(sorted(MISHAPS)),
        "run": st.sampled_from(sorted(MISHAPS)),
        "tokens": st.integers(0, 2),
        "grade": st.sampled_from(sorted(MISHAPS)),
        "reward": st.sampled_from([0, 1, 0.5, True, None, "1", float("nan"), float("inf")]),
        "close": st.sampled_from(sorted(MISHAPS)),
    }
)


class Scripted(Play):
    def __init__(self, script: dict[str, Any], *args: Any) -> None:
        super().__init__(*args)
        self.script = script

    async def setup(self) -> None:
        await MISHAPS[self.script["setup"]](self)

    async def run(self, slot: Slot) -> None:
        self.say(self.script["tokens"])
        await MISHAPS[self.script["run"]](self)

    async def grade(self, *, timed_out: bool) -> object:
        await MISHAPS[self.script["grade"]](self)
        return self.script["reward"]

    async def close(self) -> None:
        await MISHAPS[self.script["close"]](self)


@settings(max_examples=25, deadline=None)
@given(
    tries=st.lists(scripts, min_size=1, max_size=12),
    stop_after=st.none() | st.integers(0, 300),
    acquires=st.sampled_from([("sampling",), ()]),
    grades_groups=st.booleans(),
)
def test_every_started_attempt_ends_in_exactly_one_fate_and_no_failure_has_a_reward(
    tries: list[dict[str, Any]],
    stop_after: int | None,
    acquires: tuple[str, ...],
    grades_groups: bool,
) -> None:
    async def main() -> None:
        script = iter(range(10**9))
        runtime = PlayRuntime(
            lambda *args: Scripted(tries[next(script) % len(tries)], *args),
            (lambda attempts: [each.attempt.index for each in attempts]) if grades_groups else None,
            acquires=acquires,
        )
        async with world(runtime, limits=Limits(3, 2, 1), max_rollout_retries=1) as w:
            it = Scheduler(w.context, TASKS[:3], ScheduleRules(3, Gate(2), epochs=1))
            taken: list[Group] = []
            with anyio.move_on_after(10**6 if stop_after is None else stop_after):
                async with it.running() as groups:
                    async for group in groups:
                        taken.append(group)
                        if isinstance(judge(group), Rejection):
                            it.rejected(group.serial)
                        else:
                            it.published(1, 1)
        settled = [*taken, *it.leftovers]
        attempts = [attempt for group in settled for attempt in group.attempts]
        places = sorted((attempt.group, attempt.index) for attempt in attempts)
        assert places == [(s, i) for s in range(it.counts.started) for i in range(3)]
        reported = sorted(w.ended, key=lambda attempt: (attempt.group, attempt.index))
        assert reported == sorted(attempts, key=lambda attempt: (attempt.group, attempt.index))
        if stop_after is None:
            assert it.counts.started == 3
            assert not any(a.discarded and a.discarded.fate == Fate.CANCELLED for a in attempts)
        assert [limit.held for limit in w.limits.statistics()] == [0, 0, 0]
        assert all(play.log.count("close") == 1 for play in runtime.plays if "setup" in play.log)
        for attempt in attempts:
            assert (attempt.reward is None) != (attempt.discarded is None)
            assert attempt.reward is None or attempt.trajectory.sampled_tokens > 0

    clock = MockClock(autojump_threshold=0)
    anyio.run(main, backend="trio", backend_options={"clock": clock})
