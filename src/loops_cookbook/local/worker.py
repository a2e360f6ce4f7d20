"""One queue in front of the engine: trainer operations and samples, first come, first served.

The engine runs in one thread, one call at a time, so training and sampling never meet. Samples
that stand next to each other in the queue go to the engine in one call. What a call raises ends
that operation or that sample and nothing else; a merged call that fails is done again one by one,
so that each sample has its own answer. When a forward_backward fails, the operations that were
sent after it and are waiting, up to the next optim_step, fail with it: a step is never taken on
a part of what was sent.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread

from loops_cookbook.errors import LoopsError
from loops_cookbook.local.operations import Operation, Operations
from loops_cookbook.local.requests import Completion, LossOutput, Row, SampleJob

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Engine(Protocol):
    """What the server asks of the engine (`loops_cookbook.local.engine.Engine`)."""

    model_name: str
    max_seq_len: int
    lora_rank: int
    step: int
    policy_version: int

    def init_trainer(self, lora_rank: int) -> None:
        """Begin again from the loaded weights."""
        ...

    def check_rows(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
    ) -> None:
        """Refuse, in any thread, rows that the engine would refuse."""
        ...

    def check_job(self, job: SampleJob) -> None:
        """Refuse, in any thread, a job that the engine would refuse."""
        ...

    def forward(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
    ) -> LossOutput:
        """The loss; gradients stay as they are."""
        ...

    def forward_backward(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
    ) -> LossOutput:
        """The loss; gradients are added."""
        ...

    def optim_step(
        self,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        grad_clip_norm: float,
    ) -> dict[str, float]:
        """Apply and clear the gradients."""
        ...

    def publish(self) -> int:
        """Sample from the trained weights from now on."""
        ...

    def sample(self, jobs: Sequence[SampleJob]) -> list[list[Completion]]:
        """The completions of every job."""
        ...


class OffLoad(Protocol):
    """Runs the engine's calls away from the event loop."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """What `work` returns or raises."""
        ...


async def in_thread(work: Callable[[], T]) -> T:
    """Run in a worker thread; one that is cancelled is left to run out by itself."""
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The completions of one job, and the version that all of them were drawn from."""

    completions: list[Completion]
    policy_version: int


class NotServed(LoopsError):
    """The version that a sample asks for at least is not there (any more)."""


class UpdateSpoilt(LoopsError):
    """An operation was not run, because one of the same update failed."""


@dataclass(slots=True, eq=False)
class _Work:
    """A trainer operation and what does it."""

    operation: Operation
    run: Callable[[], bytes]


@dataclass(slots=True, eq=False)
class _Draw:
    """A sample that somebody waits for."""

    job: SampleJob
    floor: int
    ended: anyio.Event = field(default_factory=anyio.Event)
    outcome: Drawn | Exception | None = None
    is_abandoned: bool = False

    def end(self, outcome: Drawn | Exception) -> None:
        self.outcome = outcome
        self.ended.set()


class Worker:
    """Runs the engine for a server. `run` must be running somewhere.

    Args:
        engine: used by nobody else.
        operations: where results of trainer operations go.
        off_load: what keeps the event loop free; tests in virtual time call directly.
    """

    def __init__(
        self, engine: Engine, operations: Operations, *, off_load: OffLoad = in_thread
    ) -> None:
        self.engine = engine
        self._operations = operations
        self._off_load = off_load
        self._queue: deque[_Work | _Draw] = deque()
        self._arrived = anyio.Event()
        self._operated = anyio.Event()

    def submit(self, operation: Operation, run: Callable[[], bytes]) -> None:
        """Queue an operation; `run` is called in the engine's thread and returns its result."""
        self._put(_Work(operation, run))

    async def sample(self, job: SampleJob, floor: int) -> Drawn:
        """Draw a job's completions from a version of at least `floor`; 0: untrained weights.

        Leaving before the engine took the job takes it out of the queue.

        Raises:
            NotServed: the floor was reached, and left again by a new beginning.
        """
        draw = _Draw(job, floor)
        self._put(draw)
        try:
            await draw.ended.wait()
        finally:
            draw.is_abandoned = True
        if isinstance(draw.outcome, Exception):
            raise draw.outcome
        assert draw.outcome is not None
        return draw.outcome

    async def reach(self, floor: int) -> None:
        """Wait until the published version is at least `floor`."""
        while self.engine.policy_version < floor:
            await self._operated.wait()

    async def run(self) -> None:
        """Serve the queue until cancelled."""
        while True:
            while not self._queue:
                self._arrived = anyio.Event()
                await self._arrived.wait()
            head = self._queue.popleft()
            if isinstance(head, _Work):
                await self._operate(head)
            else:
                await self._draw([head, *self._draws_at_head()])

    def _put(self, item: _Work | _Draw) -> None:
        self._queue.append(item)
        self._arrived.set()

    async def _operate(self, work: _Work) -> None:
        try:
            result = await self._off_load(work.run)
        except Exception as error:  # whatever it is, it is the operation's and not the worker's
            self._fail(work.operation, error)
            if work.operation.name == "forward_backward":
                self._spoil_update(work.operation)
        else:
            self._operations.finish(work.operation, result)
        self._operated.set()
        self._operated = anyio.Event()

    def _fail(self, operation: Operation, error: Exception) -> None:
        is_ours = not isinstance(error, LoopsError)
        logger.warning("%s failed: %s", operation.name, error, exc_info=error if is_ours else None)
        message = str(error) or "no message"
        self._operations.fail(operation, message, type(error).__name__)

    def _spoil_update(self, failed: Operation) -> None:
        """Fail what waits of the update that a failed forward_backward belongs to."""
        spoilt = UpdateSpoilt(f"not run: {failed.name} {failed.id} of the same update failed")
        for item in list(self._queue):
            name = item.operation.name if isinstance(item, _Work) else ""
            if name == "init_trainer_server":
                return
            if isinstance(item, _Work) and name in ("forward_backward", "optim_step"):
                self._queue.remove(item)
                self._fail(item.operation, spoilt)
            if name == "optim_step":
                return

    def _draws_at_head(self) -> list[_Draw]:
        draws: list[_Draw] = []
        while self._queue and isinstance(head := self._queue[0], _Draw):
            self._queue.popleft()
            draws.append(head)
        return draws

    async def _draw(self, draws: Sequence[_Draw]) -> None:
        version = self.engine.policy_version
        served: list[_Draw] = []
        for draw in draws:
            if draw.floor > version:
                draw.end(NotServed(f"policy version {draw.floor} is not served, {version} is"))
            elif not draw.is_abandoned:
                served.append(draw)
        if not served:
            return
        jobs = [_routed(draw, version) for draw in served]
        try:
            answers = await self._off_load(lambda: self.engine.sample(jobs))
            answered = list(zip(served, answers, strict=True))
        except Exception as error:  # whatever it is, it is the samples' and not the worker's
            if len(served) == 1:
                logger.warning("a sample failed: %s", error, exc_info=error)
                served[0].end(error)
            else:
                for draw in served:
                    await self._draw([draw])
            return
        for draw, completions in answered:
            draw.end(Drawn(completions, version if draw.floor else 0))


def _routed(draw: _Draw, version: int) -> SampleJob:
    """A job without a floor asks for the untrained weights, which version 0 still is."""
    return replace(draw.job, weights="live" if draw.floor or version == 0 else "base")
