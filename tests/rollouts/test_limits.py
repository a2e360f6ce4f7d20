import contextlib
import math
import time
from collections.abc import Callable
from itertools import pairwise

import anyio
import pytest
import trio
from anyio.lowlevel import checkpoint
from trio.testing import MockClock

from loops_cookbook.errors import Discard
from loops_cookbook.rollouts.blocks import Block
from loops_cookbook.rollouts.jobs import Timer
from loops_cookbook.rollouts.limits import Limit, Limits, LimitStatistics, PhaseSlot, Room, Turns
from loops_cookbook.runtimes.base import Slot

pytestmark = pytest.mark.anyio


SlotOf = Callable[..., PhaseSlot]


@pytest.fixture
def slot_of(new_timer: Callable[[], Timer]) -> SlotOf:
    def make(limit: Limit, seconds: float = 10, around: Block | None = None) -> PhaseSlot:
        return PhaseSlot(limit, seconds, new_timer(), around)

    return make


async def test_a_slot_is_a_slot_of_the_runtime_contract(slot_of: SlotOf) -> None:
    slot: Slot = slot_of(Limit("sampling", 1))
    async with slot as entered:
        assert entered is slot


async def test_a_clock_starts_when_there_is_room_and_cuts_quietly(slot_of: SlotOf) -> None:
    limit = Limit("sampling", 1)
    first, second = slot_of(limit, 30), slot_of(limit, 10)

    async def hold(slot: PhaseSlot) -> None:
        async with slot:
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(hold, first)
        await anyio.sleep(1)
        group.start_soon(hold, second)
    assert (first.timed_out, first.waited, first.used) == (True, 0, 30)
    assert (second.timed_out, second.waited, second.used) == (True, 29, 10)
    assert limit.statistics() == LimitStatistics("sampling", 0, 1, 0)


async def test_a_block_that_ends_in_time_is_not_cut(slot_of: SlotOf) -> None:
    slot = slot_of(Limit("sampling", 1))
    async with slot:
        await anyio.sleep(9)
        assert slot.seconds_left() == 1
    assert not slot.timed_out
    assert slot.used == 9


async def test_seconds_left_is_the_whole_clock_before_the_block_and_never_negative(
    slot_of: SlotOf,
) -> None:
    slot = slot_of(Limit("sampling", 1))
    assert slot.seconds_left() == 10
    async with slot:
        pass
    await anyio.sleep(20)
    assert slot.seconds_left() == 0


async def test_a_slot_is_entered_once(slot_of: SlotOf) -> None:
    slot = slot_of(Limit("sampling", 1))
    async with slot:
        pass
    with pytest.raises(RuntimeError, match="once"):
        async with slot:
            pass


async def test_what_a_block_raises_in_time_passes_and_makes_room(slot_of: SlotOf) -> None:
    limit = Limit("sampling", 1)
    with pytest.raises(ValueError, match="mine"):
        async with slot_of(limit):
            raise ValueError("mine")
    assert limit.statistics().held == 0


@pytest.mark.parametrize(("raised", "passes"), [(ValueError, False), (Discard, True)])
async def test_of_what_a_cut_block_raises_discard_alone_passes(
    slot_of: SlotOf, raised: type[Exception], passes: bool
) -> None:
    slot = slot_of(Limit("sampling", 1))
    seen: Exception | None = None
    try:
        async with slot:
            try:
                await anyio.sleep_forever()
            finally:
                raise raised("at the cut")
    except Exception as error:
        seen = error
    assert slot.timed_out
    assert (seen is not None) == passes


async def test_a_block_that_keeps_the_cut_to_itself_was_cut_all_the_same(slot_of: SlotOf) -> None:
    slot = slot_of(Limit("sampling", 1))
    async with slot:
        with contextlib.suppress(anyio.get_cancelled_exc_class()):
            await anyio.sleep_forever()
    assert slot.timed_out


async def test_a_block_that_nothing_could_cut_in_time_was_late_all_the_same(
    slot_of: SlotOf,
) -> None:
    """A clock that ran out while the event loop was held was not seen to have run out."""
    slot = slot_of(Limit("sampling", 1), 5)
    async with slot:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, MockClock)
        clock.jump(6)  # as code does that computes and never awaits
    assert slot.timed_out


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_clock_that_passed_while_the_loop_was_held_was_late_on_asyncio_too(
    slot_of: SlotOf,
) -> None:
    slot = slot_of(Limit("sampling", 1), 0.001)
    async with slot:
        time.sleep(0.01)  # noqa: ASYNC251 - so that nothing can cut it
    assert slot.timed_out


async def test_while_graders_compute_everything_else_gets_its_turn(slot_of: SlotOf) -> None:
    """Graders of 10 ms for 512 attempts that were answered at once held the loop for 5 s."""
    limits = Limits(sampling=64, grading=64)
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, MockClock)
    turns: list[float] = []
    graded = 0

    async def grade() -> None:
        nonlocal graded
        async with slot_of(limits.grading):
            clock.jump(0.006)  # as code does that computes and never awaits
            graded += 1

    async def beat() -> None:
        while graded < 200:
            turns.append(anyio.current_time())
            await checkpoint()

    async with anyio.create_task_group() as group:
        for _ in range(200):
            group.start_soon(grade)
        group.start_soon(beat)
    assert graded == 200
    assert max(after - before for before, after in pairwise(turns)) < 0.05


async def test_graders_that_are_quick_need_not_wait_for_one_another(slot_of: SlotOf) -> None:
    limits = Limits(sampling=64, grading=64)
    slots = [slot_of(limits.grading) for _ in range(64)]
    async with contextlib.AsyncExitStack() as stack:
        for slot in slots:
            await stack.enter_async_context(slot)
    assert [slot.waited for slot in slots] == [0.0] * 64


async def test_what_is_computed_between_graders_makes_none_of_them_wait(slot_of: SlotOf) -> None:
    """Each of 1,024 that were answered at once waited for a turn of its own, because what else an
    attempt takes was counted as its grader's."""
    limits = Limits(sampling=64, grading=64)
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, MockClock)
    turned = anyio.Event()

    async def turn() -> None:
        turned.set()

    async with anyio.create_task_group() as group:
        group.start_soon(turn)
        for _ in range(50):
            async with slot_of(limits.grading):
                clock.jump(0.005)
            clock.jump(0.05)
        assert not turned.is_set()


async def test_what_one_computed_who_then_waits_counts_when_the_next_comes_in() -> None:
    turns = Turns()
    for now in (0.0, 0.02, 0.04):
        turns.came(now)
    assert turns.is_over(0.04)
    await turns.next()
    assert not turns.is_over(0.05)


async def test_a_cut_of_the_block_around_passes_through_the_slot_and_is_quiet_there(
    slot_of: SlotOf,
) -> None:
    limit, came_on = Limit("grading", 1), False
    with Block() as around:
        slot = slot_of(limit, 10, around)
        async with slot:
            await anyio.sleep_forever()
        came_on = True
    assert slot.timed_out
    assert around.was_cut
    assert not came_on
    assert limit.statistics().held == 0


async def test_a_slot_that_keeps_the_cut_of_the_block_around_to_itself_was_cut_all_the_same(
    slot_of: SlotOf,
) -> None:
    with Block() as around:
        slot = slot_of(Limit("grading", 1), 10, around)
        async with slot:
            try:
                await anyio.sleep_forever()
            finally:
                raise ValueError("at the cut")
        assert slot.timed_out  # the next wait is cut


async def test_cancellation_from_outside_passes_and_makes_room(slot_of: SlotOf) -> None:
    limit = Limit("sampling", 1)
    with anyio.move_on_after(1) as outside:
        async with slot_of(limit):
            await anyio.sleep_forever()
    assert outside.cancelled_caught
    assert limit.statistics().held == 0


async def test_room_is_given_in_the_order_in_which_it_was_asked_for(slot_of: SlotOf) -> None:
    limit = Limit("grading", 1)
    order: list[int] = []

    async def take(number: int) -> None:
        async with slot_of(limit, 100):
            order.append(number)
            await anyio.sleep(1)

    async with anyio.create_task_group() as group:
        for number in range(5):
            group.start_soon(take, number)
            await anyio.sleep(0.1)
        late = slot_of(limit)
        async with late:  # comes when one is held and four wait
            order.append(5)
    assert order == [0, 1, 2, 3, 4, 5]


async def test_a_slot_that_was_given_back_by_another_is_not_given_back_twice(
    slot_of: SlotOf,
) -> None:
    limit = Limit("sampling", 1)
    slot, other = slot_of(limit), slot_of(limit)
    async with slot:
        slot.give_back()
        async with other:
            assert limit.statistics().held == 1
        slot.give_back()
    assert limit.statistics().held == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("is_cut_first", [True, False])
async def test_room_that_comes_as_its_waiter_is_cancelled_goes_to_the_next(
    is_cut_first: bool,
) -> None:
    limit = Limit("sampling", 1)
    held, cut, after = (Room(limit, Timer(99)) for _ in range(3))
    await held.take()

    async def pass_by(room: Room) -> None:
        try:
            await room.take()
        finally:
            room.give_back()

    async with anyio.create_task_group() as group:
        cancelled = group.start_soon(pass_by, cut)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(pass_by, after)
        await anyio.wait_all_tasks_blocked()
        assert limit.statistics() == LimitStatistics("sampling", 1, 1, 2)
        steps = [cancelled.cancel, held.give_back]
        for step in steps if is_cut_first else reversed(steps):
            step()
    assert limit.statistics() == LimitStatistics("sampling", 0, 1, 0)


async def test_a_hard_deadline_stands_still_while_room_is_waited_for(slot_of: SlotOf) -> None:
    limit, timer = Limit("sampling", 1), Timer(5)
    room = Room(limit, timer)
    expected: list[float] = []
    timer.expect = expected.append
    began = anyio.current_time()
    async with slot_of(limit, 100), anyio.create_task_group() as group:
        timer.start(anyio.current_time())
        await anyio.sleep(2)
        group.start_soon(room.take)
        await anyio.sleep(50)
        assert timer.hard_at == math.inf
        group.cancel_scope.cancel()
    assert timer.hard_at == began + 2 + 50 + (5 - 2)
    assert expected == [began + 5, timer.hard_at]


async def test_a_wait_for_room_within_a_block_is_not_on_its_clock(
    new_timer: Callable[[], Timer],
) -> None:
    timer = new_timer()
    slot = PhaseSlot(Limit("grading", 1), 10, timer)
    async with slot:
        await anyio.sleep(4)
        with timer.waiting():
            await anyio.sleep(20)
            assert slot.seconds_left() == 6
        await anyio.sleep(5)
        assert slot.seconds_left() == 1
    assert (slot.timed_out, slot.used, slot.waited) == (False, 9, 20)


async def test_what_waits_for_room_in_one_branch_and_has_some_in_another_is_cut(
    new_timer: Callable[[], Timer],
) -> None:
    timer = new_timer()
    slot = PhaseSlot(Limit("grading", 1), 10, timer)
    async with slot:
        with timer.served(), timer.waiting():
            await anyio.sleep_forever()
    assert (slot.timed_out, slot.used, slot.waited) == (True, 10, 0)


async def test_places_to_start_are_those_to_sample_and_those_ahead() -> None:
    totals = {each.name: each.total for each in Limits(16, 8, 2).statistics()}
    assert totals == {"starting": 18, "sampling": 16, "grading": 8}
