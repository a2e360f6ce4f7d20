from collections.abc import AsyncIterator, Callable

import pytest
from tests.rollouts.doubles import watched_timers
from trio.testing import MockClock

from loops_cookbook.rollouts.jobs import Timer


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    """Virtual time: a clock of minutes runs out at once."""
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture
async def new_timer(anyio_backend: object) -> AsyncIterator[Callable[[], Timer]]:
    """Timers that a Keeper watches."""
    async with watched_timers() as new_timer:
        yield new_timer
