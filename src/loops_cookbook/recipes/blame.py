"""User code that a whole run rests on: what it raises, opened or closed, is told as its fault."""

import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import TypeVar

from loops_cookbook.errors import LoopsError
from loops_cookbook.problems import USERS
from loops_cookbook.rollouts.faults import caught, told

logger = logging.getLogger(__name__)

T = TypeVar("T")


@contextmanager
def blamed(what: str, kind: type[LoopsError]) -> Generator[None]:
    """Tell what user code raises as its fault; an error of ours passes as it is.

    Args:
        what: it was at, as in `runtime: mine:create: opening`.
        kind: of the error that is raised in its place.
    """
    try:
        yield
    except LoopsError:
        raise
    except USERS as error:
        raise kind(f"{told(what, error)}; mend it") from error


async def done(step: Callable[[], Awaitable[T]], what: str, kind: type[LoopsError]) -> T:
    """What a step of user code gives, under `blamed`; see `caught` for what counts as its fault."""
    outcome = await caught(step)
    if isinstance(outcome, Exception):
        with blamed(what, kind):
            raise outcome
    return outcome


async def close(
    manager: AbstractAsyncContextManager[object],
    error: BaseException | None,
    what: str,
    kind: type[LoopsError],
) -> None:
    """Close a context manager of user code, which cannot swallow what ended its block.

    Args:
        manager: was entered.
        error: what its block raised, which the caller raises again; a fault of closing is only
            logged beside it. A cancellation may be the manager's own, so there the fault counts.
        what, kind: see `blamed`.
    """
    raised = (None, None, None) if error is None else (type(error), error, error.__traceback__)
    fault = await caught(partial(manager.__aexit__, *raised))
    if not isinstance(fault, Exception) or fault is error:
        return
    if isinstance(error, Exception):
        logger.warning("%s; the run had failed before", told(what, fault))
        return
    with blamed(what, kind):
        raise fault
