import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from pydantic import BaseModel

from loops_cookbook.episodes import Episode, Grading, Sampling
from loops_cookbook.rollouts.faults import StrayCancellation, StrayExit, caught, told
from loops_cookbook.testing import attempt

pytestmark = pytest.mark.anyio


async def give() -> int:
    return 3


async def fail() -> int:
    raise LookupError("no such\nfile")


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def step() -> None:
        raise error

    return step


async def await_a_cancelled_future() -> int:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.cancel()
    return await future


async def test_what_a_step_gives_is_given() -> None:
    assert await caught(give) == 3


async def test_what_a_step_raises_is_given_too() -> None:
    assert isinstance(await caught(fail), LookupError)


async def test_an_exception_alone_in_groups_counts_as_itself() -> None:
    async def step() -> None:
        async with anyio.create_task_group(), anyio.create_task_group():
            raise LookupError("inside")

    assert isinstance(await caught(step), LookupError)


async def test_several_exceptions_at_once_stay_a_group() -> None:
    async def step() -> None:
        raise ExceptionGroup("two", [LookupError("a"), ValueError("b")])

    assert isinstance(await caught(step), ExceptionGroup)


async def test_cancellation_passes() -> None:
    with anyio.move_on_after(1) as scope:
        await caught(anyio.sleep_forever)
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), BaseExceptionGroup("x", [ValueError("a"), KeyboardInterrupt()])],
    ids=repr,
)
async def test_a_person_who_interrupts_is_heeded(error: BaseException) -> None:
    with pytest.raises(type(error)):
        await caught(raising(error))


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_what_comes_up_while_a_step_is_cancelled_goes_no_further() -> None:
    """What one branch of an agent raised while another was cut ended the run."""

    async def branch() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("rude")

    async def step() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(branch)
            group.start_soon(anyio.sleep_forever)

    with anyio.move_on_after(0.01) as scope:
        await caught(step)
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (SystemExit(0), r"SystemExit\(0\)"),
        (BaseExceptionGroup("two", [SystemExit(1), ValueError("a")]), r"BaseExceptionGroup\(two "),
    ],
    ids=repr,
)
async def test_what_is_meant_to_end_a_process_is_a_fault(error: BaseException, what: str) -> None:
    fault = await caught(raising(error))
    assert isinstance(fault, StrayExit)
    assert re.match(f"run: StrayExit: {what}.* was raised.*test_faults.py", told("run", fault))


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancellation_that_nobody_asked_for_is_a_fault() -> None:
    fault = await caught(await_a_cancelled_future)
    assert isinstance(fault, StrayCancellation)
    assert "test_faults.py" in told("run", fault)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancellation_that_nobody_asked_for_is_a_fault_also_in_a_group() -> None:
    """What `gather(return_exceptions=True)` kept, raised as a group, ended the run as our bug."""

    async def step() -> None:
        kept = await asyncio.gather(await_a_cancelled_future(), return_exceptions=True)
        raise BaseExceptionGroup("kept", [each for each in kept if isinstance(each, BaseException)])

    assert isinstance(await caught(step), StrayCancellation)


async def test_what_is_meant_to_end_a_process_is_told_as_itself_and_not_as_its_group() -> None:
    """`sys.exit()` in a branch of an agent was told as `BaseExceptionGroup(unhandled errors in a
    TaskGroup (1 sub-exception))`, at the line of the group."""

    async def leave() -> None:
        raise GeneratorExit

    async def step() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(leave)

    fault = await caught(step)
    assert isinstance(fault, StrayExit)
    assert told("run", fault).startswith("run: StrayExit: GeneratorExit() was raised")
    assert told("run", fault).endswith("in leave)")


async def test_what_is_meant_to_end_a_process_among_others_is_told_with_them() -> None:
    fault = await caught(raising(BaseExceptionGroup("two", [SystemExit(3), ValueError("a")])))
    assert isinstance(fault, StrayExit)
    assert "(two (2 sub-exceptions): SystemExit: 3; ValueError: a) was raised" in str(fault)


async def test_a_fault_is_told_in_one_line_with_its_place() -> None:
    fault = await caught(fail)
    assert isinstance(fault, LookupError)
    assert told("grading", fault).startswith("grading: LookupError: no such file (")
    assert told("grading", fault).endswith("in fail)")


async def test_what_went_wrong_in_a_group_is_told() -> None:
    """A group said `unhandled errors in a TaskGroup (2 sub-exceptions)`, and that was all."""
    errors = [LookupError("a\nb"), ValueError("c"), OSError("d"), OSError("e")]
    assert told("run", ExceptionGroup("two", errors)) == (
        "run: ExceptionGroup: two (4 sub-exceptions): LookupError: a b; ValueError: c; OSError: d; "
        "and 1 more"
    )


async def test_a_note_on_a_fault_is_told_by_its_first_line() -> None:
    """What `compute` raised was told by the line that had called it, and by no other."""
    error = KeyError("a")
    error.add_note("in the worker process of compute(f), at heavy.py:3 in f\nTraceback: ...")
    assert told("run", error) == (
        "run: KeyError: 'a'; in the worker process of compute(f), at heavy.py:3 in f"
    )


async def test_a_fault_that_python_retells_is_told_by_the_line_that_raised_it() -> None:
    """`next(it)` in a coroutine was told by a line of this package, which awaits it."""

    def first() -> int:
        return next(iter(()))

    async def step() -> None:
        first()

    fault = await caught(step)
    assert isinstance(fault, RuntimeError)
    assert told("run", fault).endswith("in first)")


class AnyTask(BaseModel):
    pass


class Lists(Episode[AnyTask, None]):
    async def run(self, sample: Sampling) -> Any:
        await sample.model.conversation().generate([{"role": "user", "content": "hello"}])
        return [1]

    async def grade(self, grading: Grading) -> float:
        return 1.0


async def test_our_own_word_on_what_a_run_returned_has_no_line_of_ours() -> None:
    """`Wild.run() returned [1]` was followed by a line of this package."""
    tried = await attempt(Lists, AnyTask(), replies=["hi"])
    assert tried.detail.startswith("run: EpisodeError: Lists.run() returned [1]: ")
    assert tried.detail.endswith(" or nothing")
