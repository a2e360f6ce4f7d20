"""What code of a user opened within a block and left open: cancel scopes, and task groups.

Scopes close in the order in which they were opened, so what is left open cannot stay:
`close_within` cancels it and leaves it. On trio a nursery can be left by its task alone, which has
to wait for it: `close_nurseries` does that, before such a task ends. What a task in such a group
died of is kept for whoever closes the group; where nobody does, it is read here, for it tells why
the code that held the group was cancelled.

Neither anyio nor trio has a word for any of it. What is read of their own is read with care, for
without it leaving the block raises, and with it the whole run.
"""

import asyncio
import gc
import logging
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import anyio
import anyio.abc

from loops_cookbook.rollouts.faults import StrayCancellation, fault_of, place_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeftOpen:
    """Something that was left open."""

    what: object
    """The scope, or on trio the nursery; told apart by identity."""
    is_group: bool
    """A task group, or something that holds one."""
    cause: Exception | None = None
    """What ended it: what its tasks raised."""


def leaves_in_order() -> bool:
    """Whether a scope that has others open in it is not left at all, and raises: as on asyncio.

    On trio it raises as well, but is left, and the others are left with it.
    """
    return anyio.get_cancelled_exc_class() is asyncio.CancelledError


def close_within(outer: anyio.CancelScope) -> Sequence[LeftOpen]:
    """Leave each scope in this one that code opened and did not leave, with the tasks in it.

    Args:
        outer: raised when it was to be left.

    Returns:
        What there was, the first to be opened first; nothing where that cannot be known.
    """
    if not leaves_in_order():
        return _cancel_nurseries() or (LeftOpen(None, is_group=False),)
    scopes = _scopes_within(outer)
    found = [
        _left(scope, _group_of(scope), "_exceptions", has_tasks=_has_tasks(scope, scopes))
        for scope in reversed(scopes)
    ]
    for scope in scopes:
        scope.cancel()
        scope.__exit__(None, None, None)
    return found


async def close_nurseries() -> None:
    """On trio, leave the nurseries of this task that are still open; what they raise was told."""
    for nursery in reversed(_nurseries()):
        nursery.cancel_scope.cancel()
        manager: Any = sys.modules["trio"].open_nursery()
        manager._nursery, manager._scope = nursery, nursery.cancel_scope  # as the lost one had them
        with suppress(Exception):
            await manager.__aexit__(None, None, None)


FaultT = TypeVar("FaultT", bound=Exception | None)


def explained(fault: FaultT, method: str, left: Iterable[LeftOpen]) -> FaultT | Exception:
    """A fault; in the place of a stray cancellation, what ended the group that cancelled.

    Args:
        fault: what the method raised.
        method: the one that was cancelled, as in `run()`.
        left: what was left open.
    """
    if not isinstance(fault, StrayCancellation):
        return fault
    cause = next((each.cause for each in left if each.cause is not None), None)
    return fault if cause is None else blamed_on(cause, fault, method)


def blamed_on(cause: Exception, fault: Exception, method: str) -> Exception:
    """What ended a group that was held open, with a note on what was cancelled by that."""
    where = place_of(fault)
    note = f"this ended a task group that was held open, and with it {method}" + (
        f" at {where}" if where else ""
    )
    if note not in getattr(cause, "__notes__", ()):  # several tries may share it
        cause.add_note(note)
    return cause


def entered_within(scope: anyio.CancelScope, what: object) -> bool | None:
    """Whether a scope was entered while this was open; None where that cannot be known."""
    if not hasattr(scope, "_parent_scope"):
        return None
    around: object = scope
    while around is not None and around is not what:
        around = getattr(around, "_parent_scope", None)
    return around is what


def death_within(outer: anyio.CancelScope) -> Exception | None:
    """What ended a group that code holds open in this scope, if one has ended and that is known."""
    try:
        scopes = [scope for scope in _scopes_within(outer) if scope.cancel_called]
    except RuntimeError:  # it is a task of trio's
        found = [_left(nursery, nursery, "_pending_excs") for nursery in _nurseries()]
    else:
        found = [_left(scope, _group_of(scope), "_exceptions") for scope in scopes]
    return next((each.cause for each in found if each.cause is not None), None)


def tell(whose: str, method: str, left: Iterable[LeftOpen]) -> None:
    """Warn of what a method of a user left open, each kind once.

    Args:
        whose: the attempt, for people.
        method: the one that opened it, as in `run()`.
        left: what it left.
    """
    kinds = {each.is_group for each in left}
    if True in kinds:
        logger.warning(
            "%s: %s opened a task group, or a client that holds one, and did not close it; what "
            "ran in it is cancelled: close it in the method that opens it, by `async with`, or "
            "open it in setup() and close it in close()",
            whose,
            method,
        )
    if False in kinds:
        logger.warning(
            "%s: %s entered a cancel scope, its own or that of a group, and did not leave it: "
            "enter it by `with`",
            whose,
            method,
        )


def _has_tasks(scope: object, own: Iterable[object]) -> bool:
    """Whether there are tasks in it beside the one that asks, or scopes of theirs, as in a group.

    Args:
        scope: that of a group, perhaps.
        own: the scopes that the one that asks is in.
    """
    tasks = set(getattr(scope, "_tasks", ())) - {asyncio.current_task()}
    return bool(tasks or set(getattr(scope, "_child_scopes", ())) - set(own))


def _left(what: object, group: object, kept_in: str, *, has_tasks: bool = True) -> LeftOpen:
    raised = cast(Sequence[BaseException], getattr(group, kept_in, None) or ())
    kept = [each for each in raised if not isinstance(each, anyio.get_cancelled_exc_class())]
    cause = fault_of(BaseExceptionGroup("unhandled errors in a TaskGroup", kept)) if kept else None
    return LeftOpen(what, group is not None or has_tasks, cause)


def _cancel_nurseries() -> Sequence[LeftOpen]:
    """Cancel those of this task that were open in a scope which was left."""
    abandoned = [nursery for nursery in _nurseries() if _is_abandoned(nursery.cancel_scope)]
    for nursery in abandoned:
        nursery.cancel_scope.cancel()
    return [_left(nursery, nursery, "_pending_excs") for nursery in abandoned]


def _is_abandoned(scope: object) -> bool:
    return getattr(getattr(scope, "_cancel_status", None), "abandoned_by_misnesting", True)


def _scopes_within(outer: anyio.CancelScope) -> list[anyio.CancelScope]:
    """The cancel scopes that the code is in, up to one of them, from the inside out."""
    within: list[anyio.CancelScope] = []
    scope: Any = getattr(_task_states().get(asyncio.current_task()), "cancel_scope", None)
    while scope is not outer:
        if scope is None:  # it is none of those that the code is in
            return []
        within.append(scope)
        scope = getattr(scope, "_parent_scope", None)
    return within


def _task_states() -> Any:
    """What anyio knows of each task of asyncio's."""
    return getattr(sys.modules.get("anyio._backends._asyncio"), "_task_states", {})


def _nurseries() -> Sequence[Any]:
    """Those that the current task of trio has open, the first to be opened first."""
    trio: Any = sys.modules.get("trio")
    if trio is None:
        return ()
    with suppress(RuntimeError):  # it runs no task, asyncio does
        return cast(Sequence[Any], trio.lowlevel.current_task().child_nurseries)
    return ()


_groups: "WeakKeyDictionary[anyio.CancelScope, ref[anyio.abc.TaskGroup] | None]"
_groups = WeakKeyDictionary()
"""Scopes, and the groups that they are of, as far as they were looked for; None for no group."""


def _group_of(scope: anyio.CancelScope) -> object:
    """The group that a cancelled scope is of, if it is of one.

    To look for it takes tens of milliseconds where a thousand attempts are alive; so it is done
    only where there is a cause to be found, and then for every group there is: where a server
    dies, so do all clients that it has.
    """
    if not scope.cancel_called:
        return None
    if scope not in _groups:
        kinds = _kinds(anyio.abc.TaskGroup)
        for each in gc.get_referrers(*kinds):  # an object refers to its class
            if type(each) in kinds:
                own = cast(dict[str, object], getattr(each, "__dict__", {})).values()
                for value in own:
                    if issubclass(type(value), anyio.CancelScope):
                        with suppress(TypeError):  # a class of somebody's without weak references
                            _groups[cast(anyio.CancelScope, value)] = ref(each)
        _groups.setdefault(scope, None)
    found = _groups[scope]
    return None if found is None else found()


def _kinds(kind: type) -> set[type]:
    """A class and all that are made of it."""
    return {kind}.union(*map(_kinds, type.__subclasses__(kind)))
