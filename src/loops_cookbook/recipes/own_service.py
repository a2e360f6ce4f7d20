"""A service of the user's own, held open for a run: what it raises is told as its fault, not ours.

`[compute] scope = "module:factory"` names the factory. It is called with a `ServiceContext` and
gives an async context manager of a `services.base.Service`. An error of ours (`ServiceError`
among them) passes as it is; anything else that opening, training or publishing raises becomes a
`ServiceError` with the place where it was raised, and so does what they return and should not.
Faults of its sampler end attempts, as those of any sampler do.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
from pydantic import BaseModel

from loops_cookbook.errors import EpisodeError, ServiceError
from loops_cookbook.learning.datums import Datum
from loops_cookbook.problems import found
from loops_cookbook.recipes.blame import close, done
from loops_cookbook.services.base import (
    AdamParams,
    Checkpointer,
    LossSpec,
    Sampler,
    Scorer,
    Service,
    ServiceContext,
    StepResult,
    Trainer,
)
from loops_cookbook.services.gather import GatheringSampler, loop_settled
from loops_cookbook.tokens import Logprobs

T = TypeVar("T")

OpenService = Callable[[ServiceContext], AbstractAsyncContextManager[Service]]

_DOORS = {
    "trainer": ("train", "publish"),
    "sampler": ("sample",),
    "temperature_in_loss": (),
    "description": (),
}
"""What a service has, and the methods of each."""


@dataclass(frozen=True, slots=True)
class OwnService:
    """What `[compute] scope` names."""

    spec: str
    """`module:factory`."""
    open: OpenService
    options: BaseModel | None


@asynccontextmanager
async def open_own_service(
    own: OwnService,
    context: ServiceContext,
    *,
    settle: Callable[[], Awaitable[None]] = loop_settled,
) -> AsyncGenerator[Service]:
    """The service, open as long as the `with` block.

    Args:
        own: what the config names.
        context: what its factory is given.
        settle: when equal samples leave as one request; see `GatheringSampler`.

    Raises:
        EpisodeError: what the factory gave is no service.
        ServiceError: opening or closing it failed.
    """

    async def entered() -> tuple[AbstractAsyncContextManager[Service], Service]:
        manager = own.open(context)
        if not isinstance(cast(object, manager), AbstractAsyncContextManager):
            raise EpisodeError(
                f"compute.scope: {own.spec!r} returned {found(manager)}; return an async context "
                "manager, as a function under @asynccontextmanager does"
            )
        return manager, await manager.__aenter__()

    manager, service = await _done(own.spec, "opening", entered)
    try:
        _require_service(own.spec, service)
        async with GatheringSampler(service.sampler, settle=settle) as sampler:
            yield _blamed_service(service.trainer)(own.spec, service, sampler)
    except BaseException as error:
        await close(manager, error, f"compute.scope: {own.spec}: closing", ServiceError)
        raise
    await close(manager, None, f"compute.scope: {own.spec}: closing", ServiceError)


def _require_service(spec: str, service: object) -> None:
    for name, methods in _DOORS.items():
        missing = [name] if not hasattr(service, name) else []
        missing += [f"{name}.{m}" for m in methods if not hasattr(getattr(service, name, None), m)]
        if missing:
            raise EpisodeError(
                f"compute.scope: what {spec!r} opened has no {missing[0]}; give it what "
                "loops_cookbook.services.Service asks for"
            )


class _Blamed:
    """A service whose trainer's faults are told as its own; implements `Service` and `Trainer`."""

    def __init__(self, spec: str, service: Service, sampler: Sampler) -> None:
        self._spec = spec
        self._trainer = service.trainer
        self.sampler = sampler
        self.temperature_in_loss = service.temperature_in_loss
        self.description: Mapping[str, str | int] = service.description

    @property
    def trainer(self) -> Trainer:
        """Itself."""
        return self

    async def train(
        self, batch: Sequence[Datum], loss: LossSpec, adam: AdamParams, *, key: str
    ) -> StepResult:
        """Take one optimizer step on a batch."""
        result = await _done(
            self._spec, "train", lambda: self._trainer.train(batch, loss, adam, key=key)
        )
        self._expect("train", result, StepResult)
        self._expect_rows("train", result.logprobs, batch)
        return result

    async def publish(self, *, key: str) -> int:
        """Hand the current weights to the sampler."""
        version = await _done(self._spec, "publish", lambda: self._trainer.publish(key=key))
        return self._expect("publish", version, int)

    def _expect(self, what: str, given: T, due: type[T]) -> T:
        if isinstance(cast(object, given), due):
            return given
        raise ServiceError(
            f"compute.scope: {self._spec}: {what} returned {found(given)}; return a value of type "
            f"{due.__name__}"
        )

    def _expect_rows(self, what: str, rows: object, batch: Sequence[Datum]) -> None:
        """Hold rows of logprobs against the datums that they are of."""
        given = cast(Sequence[object], rows if isinstance(rows, Sequence) else ())
        shapes = [cast(Logprobs, r).shape if isinstance(r, np.ndarray) else None for r in given]
        if shapes != [datum.input_ids.shape for datum in batch]:
            raise ServiceError(
                f"compute.scope: {self._spec}: {what} returned logprobs that do not fit the batch; "
                "return an array for each datum, as long as its input_ids"
            )


class _Scores(_Blamed):
    """The same of a trainer that scores rows too."""

    async def score(self, batch: Sequence[Datum], *, key: str) -> tuple[Logprobs, ...]:
        """The current weights' logprobs of a supervised batch's targets."""
        trainer = self._trainer
        assert isinstance(trainer, Scorer), "the class is chosen for it"
        rows = await _done(self._spec, "score", lambda: trainer.score(batch, key=key))
        self._expect_rows("score", rows, batch)
        return rows


class _Saves(_Blamed):
    """The same of a trainer that keeps its state too."""

    async def save(self, name: str) -> str:
        """Keep what is trained and its optimizer; where it is."""
        trainer = self._trainer
        assert isinstance(trainer, Checkpointer), "the class is chosen for it"
        path = await _done(self._spec, "save", lambda: trainer.save(name))
        return self._expect("save", path, str)

    async def load(self, path: str, *, with_optimizer: bool) -> int:
        """Train on from a checkpoint."""
        trainer = self._trainer
        assert isinstance(trainer, Checkpointer), "the class is chosen for it"
        step = await _done(
            self._spec, "load", lambda: trainer.load(path, with_optimizer=with_optimizer)
        )
        return self._expect("load", step, int)


class _ScoresAndSaves(_Scores, _Saves):
    """The same of a trainer that does both."""


def _blamed_service(trainer: Trainer) -> type[_Blamed]:
    """What can do as much as the trainer, so that no more is asked of it."""
    match isinstance(trainer, Scorer), isinstance(trainer, Checkpointer):
        case True, True:
            return _ScoresAndSaves
        case True, False:
            return _Scores
        case False, True:
            return _Saves
        case _:
            return _Blamed


def _done(spec: str, what: str, step: Callable[[], Awaitable[T]]) -> Awaitable[T]:
    return done(step, f"compute.scope: {spec}: {what}", ServiceError)
