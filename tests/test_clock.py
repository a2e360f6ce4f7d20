"""Code finds the clock that it runs under, and waits on nobody's time."""

import math
from collections.abc import Generator
from contextlib import contextmanager

import anyio
import pytest
from trio.testing import MockClock

from loops_cookbook.clock import Clock, cuts_at, room_in, run_under

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


class Noted:
    """A clock that cuts at a given moment, and notes what it is told."""

    def __init__(self, cuts_at: float = math.inf) -> None:
        self.cuts_at = cuts_at
        self.log: list[str] = []

    @contextmanager
    def waiting(self) -> Generator[None]:
        self.log.append("waits")
        yield
        self.log.append("waits no more")

    @contextmanager
    def served(self) -> Generator[None]:
        self.log.append("served")
        yield
        self.log.append("served no more")


async def test_a_clock_is_told_of_the_wait_and_of_the_stay() -> None:
    clock, limiter = Noted(), anyio.CapacityLimiter(1)
    as_clock: Clock = clock

    async def visit() -> None:
        run_under(as_clock)
        async with room_in(limiter):
            clock.log.append("in")

    async with room_in(limiter), anyio.create_task_group() as group:
        group.start_soon(visit)
        await anyio.sleep(1)
        assert clock.log == ["waits"]
        group.cancel_scope.cancel()
    clock.log.clear()
    async with anyio.create_task_group() as group:
        group.start_soon(visit)
    assert clock.log == ["waits", "waits no more", "served", "in", "served no more"]
    assert limiter.borrowed_tokens == 0


async def test_a_task_may_hold_room_twice() -> None:
    limiter = anyio.CapacityLimiter(2)
    async with room_in(limiter), room_in(limiter):
        assert limiter.borrowed_tokens == 2
    assert limiter.borrowed_tokens == 0


async def test_a_cut_is_that_of_the_clock_or_of_a_scope_whichever_comes_first() -> None:
    seen: list[float] = []

    async def look(clock: Clock | None) -> None:
        if clock is not None:
            run_under(clock)
        seen.append(cuts_at())
        with anyio.move_on_at(30):
            seen.append(cuts_at())

    async with anyio.create_task_group() as group:
        group.start_soon(look, None)
        await anyio.lowlevel.checkpoint()
        group.start_soon(look, Noted(20))
    assert seen == [math.inf, 30, 20, 20]


async def test_what_a_task_starts_is_under_its_clock_and_others_are_not() -> None:
    seen: dict[str, float] = {}

    async def look(name: str) -> None:
        seen[name] = cuts_at()

    async def parent() -> None:
        run_under(Noted(20))
        async with anyio.create_task_group() as group:
            group.start_soon(look, "child")

    async with anyio.create_task_group() as group:
        group.start_soon(parent)
        await anyio.sleep(1)
        group.start_soon(look, "other")
    assert seen == {"child": 20, "other": math.inf}
