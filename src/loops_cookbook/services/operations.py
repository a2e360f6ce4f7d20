"""Operations of the Loops wire: asked for under a key, accepted at once, ended some time later.

Trainers and samplers share what is here. Their results are waited for by long polls, for as long as
the caller's cancel scope lets them: one of which the server says that it still runs is waited for.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar
from urllib.parse import quote

import anyio
from pydantic import BaseModel

from loops_cookbook.errors import ServiceRefused
from loops_cookbook.services.answers import Answer, detail
from loops_cookbook.services.bodies import Accepted, Poll, WireError, checked, read
from loops_cookbook.services.transport import Transport

PENDING_SECONDS = 1.0
"""A server holds a poll until there is a result, or for some 30 s. One that says sooner that there
is none is asked again after this time and not at once."""

_QUOTED = 200
"""Characters of what is not as the protocol has it."""

ResultT = TypeVar("ResultT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Operation:
    """What a server accepted, and tells the result of later."""

    name: str
    """For people."""
    id: str

    @property
    def path(self) -> str:
        """Where it is asked about."""
        return f"/operations/{quote(self.id, safe='')}"


def of_run(run_id: str | None) -> dict[str, str]:
    """The headers of every call of a run; none where its service knows no runs."""
    return {} if run_id is None else {"X-Run-Id": run_id}


def with_body(headers: Mapping[str, str], key: str) -> dict[str, str]:
    """The headers of a call with a JSON body that is to be done once, however often it is sent."""
    return {**headers, "Idempotency-Key": key, "Content-Type": "application/json"}


async def accepted(
    transport: Transport,
    kind: Literal["submit", "queue"],
    path: str,
    body: bytes,
    headers: Mapping[str, str],
) -> str:
    """The id of the operation that a server makes of a call.

    Raises:
        ServiceRefused: it said no, or answered otherwise than the protocol has it.
        ServiceUnavailable: the server is gone.
    """
    answer = await transport.call(kind, "POST", path, body=body, headers=headers)
    with understood(transport, f"POST {path}", answer):
        return read(answer.body, Accepted).operation_id


async def result_of(
    operation: Operation,
    model: type[ResultT],
    transport: Transport,
    kind: Literal["poll", "result"],
    headers: Mapping[str, str],
) -> ResultT:
    """Wait for what an operation comes to, by long polls.

    Raises:
        ServiceRefused: it failed, or its result is not as the protocol has it.
        ServiceUnavailable: the server is gone.
    """
    while True:
        asked = anyio.current_time()
        answer = await transport.call(kind, "GET", operation.path, headers=headers)
        with understood(transport, f"the result of {operation.name}", answer):
            poll = Poll() if answer.status == 408 else read(answer.body, Poll)
            if poll.status == "done":
                return checked(poll.result, model)
        if poll.status == "error":
            raise ServiceRefused(
                f"{operation.name} failed at {transport.base_url} "
                f"({poll.error_class or 'no class'}): {poll.error or 'unknown error'}"
            )
        await anyio.sleep(max(0.0, PENDING_SECONDS - (anyio.current_time() - asked)))


@contextmanager
def understood(transport: Transport, what: str, answer: Answer | None = None) -> Generator[None]:
    """Turn a body that breaks the protocol into the caller's error.

    Args:
        transport: to the server that the body came from.
        what: it is, for people.
        answer: what came, to be quoted: it may not be of such a server at all.
    """
    try:
        yield
    except WireError as error:
        quoted = "" if answer is None else transport.without_key(detail(answer))[:_QUOTED]
        raise ServiceRefused(
            f"{transport.base_url}: {what} breaks the Loops protocol ({error})"
            f"{quoted and f' with {quoted!r}'}: see that a Loops server is there, and that it and "
            "this package are of versions that fit"
        ) from error
