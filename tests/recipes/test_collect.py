"""Batches come in the order to train them, and nothing usable is lost on the way."""

from collections.abc import Sequence

import anyio
import pytest
from tests.learning.builders import group
from trio.testing import MockClock

from loops_cookbook.attempts import Group
from loops_cookbook.errors import NoLearningSignal
from loops_cookbook.learning.batches import Batch, Batcher
from loops_cookbook.recipes.collect import Collector

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


def good(serial: int) -> Group:
    return group(0.0, 1.0, serial=serial)


def flat(serial: int) -> Group:
    return group(0.0, 0.0, serial=serial)


class Told:
    """A collector, and what it told."""

    def __init__(self, batcher: Batcher) -> None:
        self.rejected: list[int] = []
        self.placed: list[tuple[int, int]] = []
        self.collector = Collector(
            batcher,
            advantage="mean",
            rejected=lambda judged: self.rejected.append(judged.group.serial),
            placed=lambda judged, batch: self.placed.append((judged.group.serial, batch)),
        )


async def collect(told: Told, groups: Sequence[Group]) -> None:
    """Hand in these groups, and no more."""
    send, receive = anyio.create_memory_object_stream[Group](len(groups))
    with send:
        for each in groups:
            send.send_nowait(each)
    with receive:
        await told.collector.collect(receive)


def serials(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [each.group.serial for each in batch.groups]


async def test_whoever_waits_for_a_batch_has_it_when_it_is_full() -> None:
    told = Told(Batcher(2))
    send, groups = anyio.create_memory_object_stream[Group](9)
    async with send, groups, anyio.create_task_group() as tasks:
        tasks.start_soon(told.collector.collect, groups)
        with anyio.move_on_after(5) as waited:
            await told.collector.next()
        assert waited.cancelled_caught
        await send.send(good(1))
        await send.send(good(0))
        assert serials(await told.collector.next()) == [0, 1]
        tasks.cancel_scope.cancel()
    assert told.placed == [(0, 0), (1, 0)]


async def test_the_end_of_the_groups_leaves_a_short_batch_and_then_none() -> None:
    told = Told(Batcher(2))
    await collect(told, [good(0), good(1), flat(2), good(3)])
    assert serials(await told.collector.next()) == [0, 1]
    assert serials(await told.collector.next()) == [3]
    assert await told.collector.next() is None
    assert told.rejected == [2]
    assert told.placed == [(0, 0), (1, 0), (3, 1)]


async def test_a_rejected_group_is_told_of_before_those_that_started_earlier_settle() -> None:
    told = Told(Batcher(1))
    await collect(told, [flat(5)])
    assert told.rejected == [5]


async def test_a_stop_comes_after_the_batches_that_were_full_before_it() -> None:
    told = Told(Batcher(1, max_consecutive_unusable=2))
    await collect(told, [flat(2), good(0), flat(1), good(3)])
    assert serials(await told.collector.next()) == [0]
    with pytest.raises(NoLearningSignal):
        await told.collector.next()
    assert told.rejected == [2, 1]


async def test_what_was_not_handed_out_is_told_of_at_the_end() -> None:
    told = Told(Batcher(2))
    send, groups = anyio.create_memory_object_stream[Group](9)
    with send, groups, anyio.move_on_after(1):
        for serial in (0, 1, 2, 4):
            send.send_nowait(good(serial))
        await told.collector.collect(groups)
    assert [each.serial for each in told.collector.close()] == [0, 1, 2, 4]
    assert told.placed == [(0, 0), (1, 0), (2, 1), (4, 1)]
