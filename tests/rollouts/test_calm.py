import anyio
import anyio.lowlevel
import pytest

from loops_cookbook.rollouts.calm import Calm

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_calmed_block_is_left_alone_by_the_scope_around_it() -> None:
    cancelled = 0
    until = anyio.Event()
    calm = Calm()

    async def swallow() -> None:
        nonlocal cancelled
        with anyio.CancelScope() as scope, calm:
            scope.cancel()
            while not until.is_set():
                try:
                    await until.wait()
                except anyio.get_cancelled_exc_class():
                    cancelled += 1

    async with anyio.create_task_group() as group:
        group.start_soon(swallow)
        await anyio.sleep(0.01)
        assert cancelled > 2
        group.start_soon(calm.remind)
        await anyio.sleep(0.01)
        before = cancelled
        await anyio.sleep(0.1)
        assert cancelled == before
        until.set()


async def test_a_calmed_block_that_heeds_a_reminder_ends() -> None:
    calm = Calm()
    scope = anyio.CancelScope()

    async def swallow_once() -> None:
        with scope, calm:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(swallow_once)
        await anyio.sleep(1)
        group.start_soon(calm.remind)
        await anyio.lowlevel.checkpoint()
        scope.cancel()
    assert scope.cancelled_caught


async def test_a_block_that_is_not_calmed_passes_what_it_raises() -> None:
    with pytest.raises(LookupError), Calm():
        raise LookupError("ours")
