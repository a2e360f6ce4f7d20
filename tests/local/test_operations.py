"""An operation is opened once under its key, ends once, and is told as often as asked."""

import json

import anyio
import pytest
from trio.testing import MockClock

from loops_cookbook.local.operations import Operations

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


async def test_a_key_finds_its_operation_and_no_other() -> None:
    operations = Operations()
    operation = operations.open("k", "optim_step")
    assert operations.find("k") is operation
    assert operations.find("other") is None


async def test_a_result_is_told_again_and_again() -> None:
    operations = Operations()
    operation = operations.open("k", "optim_step")
    operations.finish(operation, b'{"metrics":{}}')
    for _ in range(2):
        answer = await operations.wait(operation, 30.0)
        assert answer == b'{"status":"done","result":{"metrics":{}}}'


async def test_an_error_tells_its_message_and_class() -> None:
    operations = Operations()
    operation = operations.open("k", "optim_step")
    operations.fail(operation, 'no "gradients"', "BadRequest")
    answer = await operations.wait(operation, 30.0)
    assert json.loads(answer or b"") == {
        "status": "error",
        "error": 'no "gradients"',
        "error_class": "BadRequest",
    }


async def test_a_wait_ends_with_the_operation() -> None:
    operations = Operations()
    operation = operations.open("k", "optim_step")

    async def work() -> None:
        await anyio.sleep(7)
        operations.finish(operation, b"{}")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        assert await operations.wait(operation, 30.0) is not None
    assert anyio.current_time() == 7.0


async def test_a_wait_is_bounded() -> None:
    operations = Operations()
    assert await operations.wait(operations.open("k", "optim_step"), 30.0) is None
    assert anyio.current_time() == 30.0


async def test_a_result_is_kept_for_an_hour_after_its_end_and_then_forgotten() -> None:
    operations = Operations()
    operation = operations.open("old", "optim_step")
    await anyio.sleep(7200)
    operations.finish(operation, b"{}")
    await anyio.sleep(3600)
    operations.open("at the hour", "optim_step")
    assert operations.find("old") is operation
    await anyio.sleep(1)
    operations.open("after it", "optim_step")
    assert operations.find("old") is None


async def test_an_operation_that_runs_is_never_forgotten() -> None:
    operations = Operations()
    running = operations.open("running", "optim_step")
    await anyio.sleep(10_000)
    operations.open("next", "optim_step")
    assert operations.find("running") is running


async def test_over_the_bound_the_oldest_results_lose_their_bodies_and_not_their_keys() -> None:
    operations = Operations(told_bytes=250, max_bytes=250)
    opened = [operations.open(key, "forward") for key in "abc"]
    for operation in opened:
        operations.finish(operation, b"{" + b" " * 80 + b"}")
    answers = [await operations.wait(operation, 0.0) for operation in opened]
    assert [answer is None for answer in answers] == [True, False, False]
    assert operations.find("a") is opened[0]
    assert opened[0].ended.is_set()


async def test_what_was_told_makes_room_first() -> None:
    """Half a gigabyte was held for an hour, nearly all of it read long ago."""
    operations = Operations(told_bytes=250, max_bytes=400)
    opened = [operations.open(key, "forward") for key in "abcdef"]
    for operation in opened[:3]:
        operations.finish(operation, b"{" + b" " * 80 + b"}")
    told = await operations.wait(opened[1], 0.0)
    assert told is not None
    operations.finish(opened[3], b"{" + b" " * 80 + b"}")
    assert [operation.answer is None for operation in opened[:4]] == [False, True, False, False]
    operations.finish(opened[4], b"{" + b" " * 80 + b"}")
    assert [operation.answer is None for operation in opened[:5]] == [
        True,
        True,
        False,
        False,
        False,
    ]


async def test_one_result_over_the_bound_is_kept_until_the_next() -> None:
    operations = Operations(told_bytes=10, max_bytes=10)
    first, second = operations.open("a", "forward"), operations.open("b", "forward")
    operations.finish(first, b"{" + b" " * 80 + b"}")
    assert await operations.wait(first, 0.0) is not None
    operations.finish(second, b"{" + b" " * 80 + b"}")
    assert await operations.wait(first, 0.0) is None
    assert await operations.wait(second, 0.0) is not None


async def test_memory_of_forgotten_results_is_given_back() -> None:
    operations = Operations(told_bytes=250, max_bytes=250)
    for hour in range(5):
        operation = operations.open(str(hour), "forward")
        operations.finish(operation, b"{" + b" " * 150 + b"}")
        assert await operations.wait(operation, 0.0) is not None
        await anyio.sleep(3601)
