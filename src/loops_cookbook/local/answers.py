"""What every route shares: reading a bounded body, work off the event loop, answering in JSON."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import anyio
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from loops_cookbook.local.worker import OffLoad

T = TypeVar("T")

OFF_LOADED_BYTES = 256 * 1024
"""Of JSON: reading or writing less takes some milliseconds, which a thread is not worth."""
MOST_AT_ONCE = 2
"""Large bodies that are read or written at a time: as objects they are many times as large."""


class Parsing:
    """Work on JSON that never holds the event loop for long.

    Args:
        off_load: runs what takes longer.
    """

    def __init__(self, off_load: OffLoad) -> None:
        self._off_load = off_load
        self._limiter = anyio.CapacityLimiter(MOST_AT_ONCE)

    async def do(self, work: Callable[[], T], size: int) -> T:
        """What `work` on so many bytes of JSON returns or raises."""
        if size < OFF_LOADED_BYTES:
            return work()
        async with self._limiter:
            return await self._off_load(work)


def json_answer(body: object, status: int = 200) -> Response:
    """A JSON body with its status."""
    return Response(to_json(body), status, media_type="application/json")


def refusal(status: int, detail: str) -> Response:
    """An answer that says what is wrong, where clients of this protocol look for it."""
    return json_answer({"detail": detail}, status)


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body, of at most `limit` bytes.

    Raises:
        HTTPException: 413, it is longer.
    """
    parts: list[bytes] = []
    size = 0
    async with aclosing(request.stream()) as stream:
        async for part in stream:
            size += len(part)
            if size > limit:
                raise HTTPException(413, f"the body is over {limit} bytes: send fewer rows")
            parts.append(part)
    return b"".join(parts)


async def while_connected(request: Request, answer: Callable[[], Awaitable[Response]]) -> Response:
    """Answer, unless the client goes away before; then nobody is to be served."""
    response = refusal(408, "the client has gone")

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        response = await answer()
        tasks.cancel_scope.cancel()
    return response
