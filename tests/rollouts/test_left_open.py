import gc
import logging
from contextlib import suppress

import anyio
import pytest

from loops_cookbook.rollouts.blocks import Block
from loops_cookbook.rollouts.faults import StrayCancellation, told
from loops_cookbook.rollouts.left_open import LeftOpen, close_nurseries, explained, tell

pytestmark = pytest.mark.anyio

BOTH = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


async def die() -> None:
    raise ConnectionError("the server is gone")


@BOTH
async def test_what_a_group_died_of_that_is_left_open_is_known() -> None:
    """Nobody closed it, so nobody was told: the try failed of a CancelledError and that was all."""
    block = Block()

    async def hold() -> None:
        with block:
            group = anyio.create_task_group()
            await group.__aenter__()
            group.start_soon(die)
            await anyio.sleep(60)

    with pytest.raises(anyio.get_cancelled_exc_class()):
        await hold()
    await close_nurseries()
    [left] = block.left_open
    assert left.is_group
    assert isinstance(left.cause, ConnectionError)


@BOTH
async def test_a_group_whose_tasks_live_is_known_as_one() -> None:
    """Each task of a group is in a scope of its own, within the group's."""
    block, until = Block(), anyio.Event()

    async def live() -> None:
        until.set()
        await anyio.sleep_forever()

    with block:
        await (outer := anyio.create_task_group()).__aenter__()
        outer.start_soon(live)
        await until.wait()
    assert [left.is_group for left in block.left_open] == [True]
    await close_nurseries()


@BOTH
async def test_a_scope_that_is_left_open_is_no_group() -> None:
    with Block() as block:
        anyio.CancelScope().__enter__()
    assert [left.is_group for left in block.left_open] == [False]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_block_knows_within_what_it_was_entered() -> None:
    before, outer = Block(), Block()
    with outer:
        anyio.CancelScope().__enter__()
        with before:
            pass
        anyio.CancelScope().__enter__()
    first, second = outer.left_open
    assert before.was_entered_within(first.what)
    assert not before.was_entered_within(second.what)


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_task_of_trio_can_end_once_its_nurseries_are_closed() -> None:
    """Trio raised in place of what such a task came to, which ended the run as our bug."""

    async def task() -> None:
        with Block():
            await anyio.create_task_group().__aenter__()
        await close_nurseries()

    async with anyio.create_task_group() as group:
        group.start_soon(task)


async def test_outside_of_a_task_of_trio_there_are_no_nurseries_to_close() -> None:
    await close_nurseries()


def test_a_fault_that_is_no_cancellation_stays_what_it_is() -> None:
    fault = ValueError("mine")
    assert explained(fault, "run()", [LeftOpen(None, True, OSError("gone"))]) is fault


def test_what_ended_a_group_is_told_before_what_came_of_it() -> None:
    left = [LeftOpen(None, True, OSError("gone"))]
    explained(StrayCancellation("?"), "run()", left)  # several tries may hold one client
    why = explained(StrayCancellation("?"), "run()", left)
    assert told("run", why) == (
        "run: OSError: gone; this ended a task group that was held open, and with it run()"
    )


def test_a_cancellation_that_no_group_explains_stays_what_it_is() -> None:
    fault = StrayCancellation("?")
    assert explained(fault, "run()", [LeftOpen(None, False)]) is fault


def test_each_kind_of_what_is_left_open_is_told_once_with_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A scope was told as a group, without attempt or method, once for each that was left open."""
    group, scope = LeftOpen(None, True), LeftOpen(None, False)
    with caplog.at_level(logging.WARNING):
        tell("attempt 3 of group 1", "run()", [group, group, scope])
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("attempt 3 of group 1: run() opened a task group")
    assert first.endswith("or open it in setup() and close it in close()")
    assert second == (
        "attempt 3 of group 1: run() entered a cancel scope, its own or that of a group, and did "
        "not leave it: enter it by `with`"
    )


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_one_look_finds_the_groups_of_all_clients_of_a_server_that_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of hundreds of attempts went through all objects, and held the event loop for that."""
    looks: list[object] = []
    referrers = gc.get_referrers

    def look(*of: object) -> list[object]:
        looks.append(of)
        return referrers(*of)

    monkeypatch.setattr(gc, "get_referrers", look)
    gone, causes = anyio.Event(), list[object]()

    async def serve() -> None:
        await gone.wait()
        raise ConnectionError("the server is gone")

    async def hold() -> None:
        with suppress(anyio.get_cancelled_exc_class()), (block := Block()):
            await (group := anyio.create_task_group()).__aenter__()
            group.start_soon(serve)
            await anyio.sleep(60)
        causes.extend(type(left.cause) for left in block.left_open)

    async with anyio.create_task_group() as attempts:
        for _ in range(5):
            attempts.start_soon(hold)
        await anyio.wait_all_tasks_blocked()
        gone.set()
    assert causes == [ConnectionError] * 5
    assert len(looks) == 1
