"""A runtime of the user's own: what is wrong with it is told as its fault, not ours.

`runtime = "module:factory"` names the factory. What it says of itself, and what it makes, is looked
at when a run is planned, so that `check` finds what is not as `loops_cookbook.runtimes` has it.
Opening and closing it are the run's own: what they raise ends the run with the place where it was
raised. Faults of its leases end attempts, as those of an Episode do.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self, cast

from pydantic import BaseModel

from loops_cookbook.errors import EpisodeError, RunStopped
from loops_cookbook.problems import found
from loops_cookbook.recipes.blame import blamed, close, done
from loops_cookbook.runtimes.base import Capabilities, Graded, Lease, Place, Runtime, RuntimeContext
from loops_cookbook.tasks import Task

_PROTOCOL = "give it what loops_cookbook.runtimes.Runtime asks for"
_METHODS = ("open", "grade_group", "__aenter__", "__aexit__")


class OwnRuntime:
    """A runtime whose opening and closing are told as its own; implements `Runtime`."""

    def __init__(self, spec: str, runtime: Runtime) -> None:
        self._spec = spec
        self._runtime = runtime
        self.capabilities = runtime.capabilities

    async def __aenter__(self) -> Self:
        await done(self._runtime.__aenter__, f"runtime: {self._spec}: opening", RunStopped)
        return self

    async def __aexit__(self, *exc: object) -> None:
        error = cast("BaseException | None", exc[1])
        await close(self._runtime, error, f"runtime: {self._spec}: closing", RunStopped)

    def open(self, task: Task[BaseModel], place: Place) -> AbstractAsyncContextManager[Lease]:
        """A lease of the runtime."""
        lease = cast(object, self._runtime.open(task, place))
        if not isinstance(lease, AbstractAsyncContextManager):
            raise EpisodeError(
                f"open() of {self._spec!r} gave {found(lease)}: give an async context manager of a "
                "lease"
            )
        return cast(AbstractAsyncContextManager[Lease], lease)

    async def grade_group(self, task: Task[BaseModel], attempts: Sequence[Graded]) -> object:
        """What the runtime says of a group."""
        return await self._runtime.grade_group(task, attempts)


def declared_model(factory: object, name: str, spec: str) -> type[BaseModel] | None:
    """The pydantic model that a factory has under a name; None without one.

    Raises:
        EpisodeError: it is something else.
    """
    model: Any = getattr(factory, name, None)
    if model is None or (isinstance(model, type) and issubclass(model, BaseModel)):
        return model
    what = found(cast(object, model))
    raise EpisodeError(f"runtime: {name} of {spec!r} is {what}; name a pydantic model")


def made_runtime(
    factory: Callable[[RuntimeContext], Runtime], context: RuntimeContext, spec: str
) -> OwnRuntime:
    """What a factory makes.

    Raises:
        EpisodeError: it raised, or what it made is no runtime.
    """
    with blamed(f"runtime: {spec!r}", EpisodeError):
        runtime = factory(context)
    for name in _METHODS:
        if not callable(getattr(runtime, name, None)):
            raise EpisodeError(f"runtime: what {spec!r} made has no {name}(); {_PROTOCOL}")
    capabilities: object = getattr(runtime, "capabilities", None)
    if not isinstance(capabilities, Capabilities):
        raise EpisodeError(
            f"runtime: what {spec!r} made has {found(capabilities)} for its capabilities; "
            f"{_PROTOCOL}"
        )
    return OwnRuntime(spec, runtime)
