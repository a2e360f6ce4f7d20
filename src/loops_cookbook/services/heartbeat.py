"""A server is asked whether it is there, again and again, while other work goes on.

Calls that matter find out by themselves that a server has gone. What they cannot tell is one that
hangs from one that works, and a service that reclaims what nobody uses cannot tell that a client
is there.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from loops_cookbook.errors import ServiceError
from loops_cookbook.services.transport import Transport


@dataclass(frozen=True, slots=True)
class Pulse:
    """What is asked, and how often."""

    path: str
    every_seconds: float
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@asynccontextmanager
async def beside(work: Callable[[], Coroutine[Any, Any, None]]) -> AsyncGenerator[None]:
    """Let work go on for the length of the block, whose own error passes as it is."""
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        try:
            yield
        except Exception as error:  # carried around the task group, which would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


@asynccontextmanager
async def beating(
    transport: Transport, pulse: Pulse, silent: Callable[[float], None]
) -> AsyncGenerator[None]:
    """Ask for the length of the block.

    Args:
        transport: to the server.
        pulse: what to ask.
        silent: told after each question without an answer for how many seconds there was none.
    """

    async def beat() -> None:
        heard = anyio.current_time()
        while True:
            await anyio.sleep(pulse.every_seconds)
            if await _is_heard(transport, pulse):
                heard = anyio.current_time()
            else:
                silent(anyio.current_time() - heard)

    async with beside(beat):
        yield


async def _is_heard(transport: Transport, pulse: Pulse) -> bool:
    try:
        answer = await transport.call("probe", "GET", pulse.path, headers=pulse.headers)
    except ServiceError:
        return False
    return answer.status < 500
