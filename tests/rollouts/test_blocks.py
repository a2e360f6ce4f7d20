import anyio
import anyio.lowlevel
import pytest

from loops_cookbook.rollouts.blocks import REMINDER_SECONDS, Block
from loops_cookbook.rollouts.left_open import close_nurseries

pytestmark = pytest.mark.anyio

BOTH = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


@BOTH
@pytest.mark.parametrize("is_cut_itself", [True, False], ids=["itself", "around"])
async def test_a_block_that_ignores_a_cut_is_not_cancelled_in_every_turn_of_the_loop(
    is_cut_itself: bool,
) -> None:
    cancelled = 0
    until = anyio.Event()
    block, around = Block(), anyio.CancelScope()

    async def swallow() -> None:
        nonlocal cancelled
        with around, block:
            block.cut() if is_cut_itself else around.cancel()
            while not until.is_set():
                try:
                    await until.wait()
                except anyio.get_cancelled_exc_class():
                    cancelled += 1

    async with anyio.create_task_group() as group:
        group.start_soon(swallow)
        await anyio.sleep(0.01)
        assert cancelled > 2
        group.start_soon(block.remind)
        await anyio.sleep(0.01)
        before = cancelled
        await anyio.sleep(0.1)
        assert cancelled == before
        until.set()


async def test_a_block_that_heeds_a_reminder_ends() -> None:
    block, heard = Block(), 0

    async def swallow_once() -> None:
        nonlocal heard
        with block:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                heard += 1
                await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(swallow_once)
        await anyio.sleep(1)
        group.start_soon(block.remind)
        await anyio.lowlevel.checkpoint()
        block.cut()
        began = anyio.current_time()
    assert block.was_cut
    assert heard == 1
    assert anyio.current_time() - began <= 2 * REMINDER_SECONDS


@BOTH
async def test_a_block_passes_what_it_raises_and_is_quiet_about_its_cut() -> None:
    with pytest.raises(LookupError), Block():
        raise LookupError("ours")
    with Block() as block:
        block.cut()
        await anyio.sleep_forever()
    assert block.was_cut
    assert not block.release_was_cut


@BOTH
async def test_cancellation_from_around_passes_a_block() -> None:
    with anyio.CancelScope() as around, Block() as block:
        around.cancel()
        await anyio.sleep_forever()
    assert around.cancelled_caught
    assert not block.was_cut


@BOTH
async def test_the_release_of_a_block_is_of_no_earlier_cut_and_has_a_cut_of_its_own() -> None:
    released = False
    with anyio.CancelScope() as around, Block() as block:
        block.cut()
        around.cancel()
        try:
            await anyio.sleep_forever()
        finally:
            block.release()
            await anyio.lowlevel.checkpoint()
            released = True
            block.cut()
            await anyio.sleep_forever()
    assert released
    assert block.release_was_cut


@BOTH
async def test_a_release_is_not_reminded_of_anything() -> None:
    ended = False
    block = Block()
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as around, block:
            around.cancel()
            block.release()
            group.start_soon(block.remind)
            await anyio.sleep(0.05)
            ended = True
    assert ended


@BOTH
async def test_what_a_cut_release_raises_beside_its_cancellation_passes() -> None:
    """Both scopes are left then, or the next one of the task could not be."""

    async def released_with_an_error() -> None:
        with Block() as block:
            block.release()
            block.cut()
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
                try:
                    await anyio.sleep_forever()
                finally:
                    raise LookupError("in the release")

    with pytest.raises(ExceptionGroup) as raised:
        await released_with_an_error()
    assert raised.group_contains(LookupError)
    with anyio.move_on_after(0) as after:
        await anyio.sleep_forever()
    assert after.cancelled_caught


@BOTH
async def test_what_code_left_open_in_a_block_ends_with_it_and_nothing_around_it() -> None:
    """Leaving the block raised, and so did every scope around it, to the end of the run."""
    block, group = Block(), anyio.create_task_group()
    with anyio.CancelScope() as around:
        with block:
            await group.__aenter__()
            group.start_soon(anyio.sleep_forever)
            anyio.CancelScope().__enter__()
        await anyio.lowlevel.checkpoint()
    assert group.cancel_scope.cancel_called
    assert not around.cancel_called
    assert True in {left.is_group for left in block.left_open}
    await close_nurseries()


@BOTH
async def test_a_block_that_was_cut_is_quiet_also_where_code_left_something_open() -> None:
    with Block() as block:
        anyio.CancelScope().__enter__()
        block.cut()
        await anyio.sleep_forever()
    assert [left.is_group for left in block.left_open] == [False]


@BOTH
async def test_cancellation_from_around_passes_a_block_in_which_something_was_left_open() -> None:
    with anyio.CancelScope() as around, Block():
        anyio.CancelScope().__enter__()
        around.cancel()
        await anyio.sleep_forever()
    assert around.cancelled_caught
