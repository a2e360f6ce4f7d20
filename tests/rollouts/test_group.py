from collections.abc import Sequence
from dataclasses import replace

import anyio
import pytest
from tests.rollouts.doubles import Play, PlayLease, PlayRuntime, ignore_cancellation, start, world

from loops_cookbook.attempts import Attempt, Fate, Group
from loops_cookbook.clock import room_in
from loops_cookbook.errors import Discard, EngineDied
from loops_cookbook.rollouts.group import run_group
from loops_cookbook.runtimes.base import Graded, Slot

pytestmark = pytest.mark.anyio


async def group_of(runtime: PlayRuntime, size: int = 3) -> Group:
    """The group, having seen that each of its attempts was reported once."""
    async with world(runtime) as w:
        group = await run_group(w.context, start(7, policy_version=2), size=size)
    assert sorted(w.ended, key=lambda attempt: attempt.index) == list(group.attempts)
    return group


def fates_of(group: Group) -> list[Fate | float | None]:
    return [a.reward if a.discarded is None else a.discarded.fate for a in group.attempts]


class Indexed(Play):
    """Its reward is the index of its attempt."""

    async def grade(self, *, timed_out: bool) -> object:
        return self.place.attempt


async def test_a_group_holds_its_attempts_in_order_and_says_where_it_is_from() -> None:
    class Slower(Indexed):
        async def run(self, slot: Slot) -> None:
            self.say()
            await anyio.sleep(3 - self.place.attempt)

    group = await group_of(PlayRuntime(Slower))
    assert fates_of(group) == [0.0, 1.0, 2.0]
    assert (group.serial, group.task, group.source) == (7, "task-7", "tasks.jsonl:7")
    assert (group.policy_version, group.seconds) == (2, 3)


async def test_attempts_run_at_the_same_time() -> None:
    class Slow(Indexed):
        async def run(self, slot: Slot) -> None:
            self.say()
            await anyio.sleep(50)

    assert (await group_of(PlayRuntime(Slow), size=16)).seconds == 50


async def test_failures_of_some_attempts_leave_the_others_as_they_are() -> None:
    class SomeFail(Indexed):
        async def setup(self) -> None:
            if self.place.attempt == 1:
                raise OSError("no sandbox")

    assert fates_of(await group_of(PlayRuntime(SomeFail))) == [0.0, Fate.FAILED, 2.0]


async def test_a_group_grader_replaces_all_rewards() -> None:
    given: list[tuple[float | None, list[str]]] = []

    def rank(attempts: Sequence[Graded]) -> object:
        for each in attempts:
            assert isinstance(each.lease, PlayLease)
            given.append((each.attempt.reward, list(each.lease.play.log)))
        return [10 * (each.attempt.reward or 0) for each in attempts]

    group = await group_of(PlayRuntime(Indexed, rank))
    assert fates_of(group) == [0.0, 10.0, 20.0]
    assert [reward for reward, _ in given] == [0.0, 1.0, 2.0]
    assert all(log[-1] == "closed" for _, log in given)


async def test_a_group_grader_sees_only_attempts_that_can_be_graded() -> None:
    class SomeFail(Indexed):
        async def run(self, slot: Slot) -> None:
            if self.place.attempt != 1:
                self.say()

    def rank(attempts: Sequence[Graded]) -> object:
        return [each.attempt.index for each in attempts]

    assert fates_of(await group_of(PlayRuntime(SomeFail, rank))) == [0.0, Fate.NO_REPLY, 2.0]


async def test_a_group_grader_alone_is_the_only_one_asked() -> None:
    runtime = PlayRuntime(Play, lambda attempts: [5] * len(attempts), grades_attempts=False)
    assert fates_of(await group_of(runtime)) == [5.0, 5.0, 5.0]
    assert not any("grade" in play.log for play in runtime.plays)


async def test_a_group_grader_with_nothing_to_grade_is_not_asked() -> None:
    class Silent(Play):
        async def run(self, slot: Slot) -> None: ...

    def rank(attempts: Sequence[Graded]) -> object:
        raise AssertionError("asked")

    assert fates_of(await group_of(PlayRuntime(Silent, rank))) == [Fate.NO_REPLY] * 3


@pytest.mark.parametrize("answer", [None, [1.0], [1, 2, float("nan")], "123"], ids=repr)
async def test_a_group_grader_without_a_number_for_each_leaves_no_reward(answer: object) -> None:
    runtime = PlayRuntime(Indexed, lambda attempts: answer, grading_retries=1)
    group = await group_of(runtime)
    assert fates_of(group) == [Fate.UNGRADED] * 3
    assert {a.discarded.exception for a in group.attempts if a.discarded} == {"GradeError"}


async def test_a_group_grader_is_asked_again_when_it_fails() -> None:
    calls = 0

    async def flaky(attempts: Sequence[Graded]) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            await anyio.sleep_forever()
        return [1, 2, 3]

    group = await group_of(PlayRuntime(Play, lambda attempts: flaky(attempts), grading_retries=1))
    assert fates_of(group) == [1.0, 2.0, 3.0]
    assert group.seconds == 50


async def test_graders_that_wait_for_one_worker_are_not_cut_for_it() -> None:
    """Of 8 graders that each computed for 30 s on one CPU, all but the first outlasted a clock of
    50 s: their attempts were lost, though none had had more than its turn."""
    worker = anyio.CapacityLimiter(1)

    class Computes(Indexed):
        async def grade(self, *, timed_out: bool) -> object:
            async with room_in(worker):
                await anyio.sleep(30)
            return self.place.attempt

    group = await group_of(PlayRuntime(Computes), size=8)
    assert fates_of(group) == [float(index) for index in range(8)]
    assert group.seconds == 8 * 30
    assert {attempt.timing.grading for attempt in group.attempts} == {30}
    assert sum(attempt.timing.waiting for attempt in group.attempts) == 30 * sum(range(8))


async def test_a_grader_with_two_calls_of_which_none_ends_is_cut() -> None:
    """A clock that stood still for every wait would have stood still for ever."""
    worker = anyio.CapacityLimiter(1)

    class Computes(Indexed):
        async def grade(self, *, timed_out: bool) -> object:
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(self.compute)
            return 1

        async def compute(self) -> None:
            async with room_in(worker):
                await anyio.sleep_forever()

    group = await group_of(PlayRuntime(Computes), size=2)
    assert fates_of(group) == [Fate.UNGRADED] * 2
    assert group.seconds == 50 + 50


async def test_a_group_grader_that_waits_for_a_worker_is_not_cut_for_it() -> None:
    worker = anyio.CapacityLimiter(1)

    async def rank(attempts: Sequence[Graded]) -> object:
        async with room_in(worker):
            await anyio.sleep(30)
        return [each.attempt.index for each in attempts]

    async def others() -> None:
        async with room_in(worker):
            await anyio.sleep(1000)

    async with anyio.create_task_group() as around:
        around.start_soon(others)
        await anyio.sleep(1)
        group = await group_of(PlayRuntime(Play, lambda attempts: rank(attempts)))
    assert fates_of(group) == [0.0, 1.0, 2.0]


async def test_discard_in_a_group_grader_drops_the_whole_group() -> None:
    def drop(attempts: Sequence[Graded]) -> object:
        raise Discard("the judge refused")

    group = await group_of(PlayRuntime(Play, drop, grading_retries=3))
    assert fates_of(group) == [Fate.DROPPED] * 3
    assert {a.discarded.detail for a in group.attempts if a.discarded} == {"the judge refused"}


async def test_a_group_grader_that_ignores_cancellation_is_left_behind() -> None:
    until = anyio.Event()

    async def stubborn(attempts: Sequence[Graded]) -> object:
        await ignore_cancellation(until)
        return [1, 2, 3]

    async with world(PlayRuntime(Play, lambda attempts: stubborn(attempts))) as w:
        group = await run_group(w.context, start(), size=3)
        held = w.limits.grading.statistics().held
        until.set()
    assert fates_of(group) == [Fate.UNGRADED] * 3
    assert held == 0
    assert group.seconds == 50 + 10


async def test_a_group_that_is_cancelled_reports_every_attempt() -> None:
    class Mixed(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            if self.place.attempt:
                await anyio.sleep_forever()

    cut: list[Group] = []
    async with world(PlayRuntime(Mixed)) as w:
        with anyio.move_on_after(1):
            await run_group(w.context, start(), size=3, on_cut=cut.append)
    assert [fates_of(group) for group in cut] == [[1.0, Fate.CANCELLED, Fate.CANCELLED]]
    assert len(w.ended) == 3


async def test_rewards_that_a_group_grader_has_not_confirmed_are_cancelled_with_the_run() -> None:
    async def slow(attempts: Sequence[Graded]) -> object:
        await anyio.sleep_forever()

    cut: list[Group] = []
    async with world(PlayRuntime(Play, lambda attempts: slow(attempts))) as w:
        with anyio.move_on_after(1):
            await run_group(w.context, start(), size=2, on_cut=cut.append)
    assert [fates_of(group) for group in cut] == [[Fate.CANCELLED] * 2]
    assert w.ended == list(cut[0].attempts)


async def test_the_death_of_the_engine_comes_out_as_itself_and_cuts_the_group() -> None:
    class Unlucky(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            await anyio.sleep(1 + self.place.attempt)
            raise EngineDied("the engine ended")

    cut: list[Group] = []
    async with world(PlayRuntime(Unlucky)) as w:
        with pytest.raises(EngineDied, match="the engine ended"):
            await run_group(w.context, start(), size=2, on_cut=cut.append)
    assert [fates_of(group) for group in cut] == [[Fate.FAILED, Fate.CANCELLED]]


async def test_a_group_grader_that_meets_the_death_of_the_engine_ends_the_run() -> None:
    def ask(attempts: Sequence[Graded]) -> object:
        raise EngineDied("the engine ended")

    cut: list[Group] = []
    async with world(PlayRuntime(Play, ask)) as w:
        with pytest.raises(EngineDied):
            await run_group(w.context, start(), size=2, on_cut=cut.append)
    assert [fates_of(group) for group in cut] == [[Fate.UNGRADED] * 2]
    assert len(w.ended) == 2


async def test_a_recorder_that_fails_ends_the_run() -> None:
    def fail(attempt: Attempt) -> None:
        raise OSError("disk full")

    async with world() as w:
        context = w.context_with(on_end=fail)
        with pytest.raises(OSError, match="disk full"):
            await run_group(context, start(), size=2)


async def test_a_person_who_interrupts_ends_the_run_and_cuts_the_others() -> None:
    class Interrupted(Play):
        async def run(self, slot: Slot) -> None:
            self.say()
            await anyio.sleep(1)
            if self.place.attempt == 0:
                raise KeyboardInterrupt
            await anyio.sleep_forever()

    runtime, cut = PlayRuntime(Interrupted), list[Group]()
    with pytest.raises(KeyboardInterrupt):
        async with world(runtime) as w:
            await run_group(w.context, start(), size=3, on_cut=cut.append)
    assert [fates_of(group) for group in cut] == [[Fate.CANCELLED] * 3]
    assert all(play.log[-1] == "closed" for play in runtime.plays)


async def test_attempts_of_an_evaluation_are_told_from_those_of_training() -> None:
    async with world(PlayRuntime(Raises)) as w:
        terms = replace(w.context.terms, purpose="held_out")
        group = await run_group(w.context_with(terms=terms), start(4), size=1)
    detail = group.attempts[0].discarded
    assert detail is not None
    assert "attempt 0 of group 4 of held_out (task 'task-4')" in detail.detail


class Raises(Play):
    async def grade(self, *, timed_out: bool) -> object:
        return None
