"""One queue in front of the engine: trainer operations and samples, first come, first served.

The engine runs in one thread, one call at a time, so training and sampling never meet. Sampling
is a call for each step, and samples that arrive meanwhile join at the next one. Between two steps
at most one operation runs, and between two operations at least one step, so that neither keeps
the other waiting for long. To whoever asks it is as if everything ran in the order of arrival:

- `forward`, `forward_backward` and `optim_step` leave the published weights as they are. They run
  between the steps of samples that were there before them.
- Any other operation may put other weights in their place. It waits until the samples before it
  have ended, and all that came after it waits with it. So no completion is drawn from two versions.

What a call raises ends that operation or that sample and nothing else. But when a
forward_backward fails, its update is spoilt: every forward_backward of it fails that is sent
later, and so does the optim_step that ends it. A step is never taken on a part of what was sent.

Of a fault of its own the worker dies, and says so to whoever waits or comes later.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread

from loops_cookbook.errors import OUR_BUG, LoopsError
from loops_cookbook.local.operations import Operation, Operations
from loops_cookbook.local.places import Place
from loops_cookbook.local.requests import LossOutput, Row, Sampled, SampleJob, Weights
from loops_cookbook.problems import said
from loops_cookbook.services.gather import another

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSING = {"forward", "forward_backward", "optim_step", "save_state"}
"""Operations that samples are merely paused for."""
OF_AN_UPDATE = {"forward_backward", "optim_step"}
"""Operations that are not run once one of the same update has failed."""
ENDING_AN_UPDATE = {"optim_step", "init_trainer_server"}
"""Operations behind which another update begins, however they end."""


class Ticket(Protocol):
    """A job that the engine has taken."""

    def leave(self) -> None:
        """Nobody waits for it any more: nothing will be told of it."""
        ...


class Engine(Protocol):
    """What the server asks of the engine (`loops_cookbook.local.engine.Engine`)."""

    model_name: str
    max_seq_len: int
    vocab_size: int
    lora_rank: int
    step: int
    policy_version: int

    def init_trainer(self, lora_rank: int, *, seed: int | None = None) -> None:
        """Begin again from the loaded weights."""
        ...

    def check_rank(self, lora_rank: int) -> None:
        """Refuse, in any thread, a rank that the engine would refuse."""
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

    @property
    def is_sampling(self) -> bool:
        """Whether jobs are waiting or under way."""
        ...

    def check_place(self, place: Place) -> None:
        """Refuse, in any thread, a checkpoint where none can be kept."""
        ...

    def save(self, place: Place) -> None:
        """Write a checkpoint."""
        ...

    def load(self, place: Place, *, with_optimizer: bool) -> int:
        """Train on from a checkpoint; the step that training is at."""
        ...

    def pin(self, place: Place) -> Weights:
        """A name for a checkpoint's weights, for jobs; in any thread."""
        ...

    def ask(self, job: SampleJob) -> Ticket:
        """Queue a job."""
        ...

    def draw(self) -> Sequence[tuple[Ticket, Sampled | Exception]]:
        """Draw one more token for all jobs that fit, and tell what ended."""
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
    """What one job came to, and the version that all of it was drawn from."""

    sampled: Sampled
    policy_version: int | None
    """None: of a checkpoint, which has no version."""


class NotServed(LoopsError):
    """The version that a sample asks for at least is not there (any more)."""


class UpdateSpoilt(LoopsError):
    """An operation was not run, because one before it in the same update failed."""


class WorkerDied(LoopsError):
    """The loop of the worker ended by a fault of its own."""

    exit_status = OUR_BUG


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
        self.off_load = off_load
        self._queue: deque[_Work | _Draw] = deque()
        self._work: _Work | None = None
        """The operation that the engine is at."""
        self._drawing: dict[Ticket, tuple[_Draw, int | None]] = {}
        """Samples that the engine has, with the version that they are drawn from, if it has one."""
        self.fault: str | None = None
        """Why nothing is served any more."""
        self._spoilt: str | None = None
        """Why the rest of the present update is not run."""
        self._arrived = anyio.Event()
        self._operated = anyio.Event()

    def submit(self, operation: Operation, run: Callable[[], bytes]) -> None:
        """Queue an operation; `run` is called in the engine's thread and returns its result."""
        self._put(_Work(operation, run))

    async def sample(self, job: SampleJob, floor: int) -> Drawn:
        """Draw a job's completions from a version of at least `floor`; 0: untrained weights.

        Leaving ends the job.

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
        """Wait until the published version is at least `floor`.

        Raises:
            WorkerDied: it will never be.
        """
        while self.engine.policy_version < floor:
            if self.fault is not None:
                raise WorkerDied(self.fault)
            await self._operated.wait()

    async def run(self) -> None:
        """Serve the queue until cancelled.

        Raises:
            WorkerDied: by a fault of its own; all that waits, or comes later, ends with the same.
        """
        try:
            await self._serve()
        except (anyio.get_cancelled_exc_class(), KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self.fault = (
                f"the engine's worker has died of {type(error).__name__}: {said(error)}: a fault "
                "of this server, which serves nothing any more; start it again"
            )
            waiting = [*self._queue, *(draw for draw, _ in self._drawing.values())]
            for item in waiting if self._work is None else [self._work, *waiting]:
                self._give_up(item, self.fault)
            self._operated.set()
            raise WorkerDied(self.fault) from error

    async def _serve(self) -> None:
        while True:
            while not (self._queue or self.engine.is_sampling):
                self._arrived = anyio.Event()
                await self._arrived.wait()
            self._take_samples()
            work = self._next_work()
            if work is not None:
                await self._operate(work)
                self._take_samples()
            self._let_go()
            if self.engine.is_sampling:
                await self._step()

    def _put(self, item: _Work | _Draw) -> None:
        if self.fault is not None:
            self._give_up(item, self.fault)
            return
        self._queue.append(item)
        self._arrived.set()

    def _give_up(self, item: _Work | _Draw, why: str) -> None:
        if isinstance(item, _Draw):
            item.end(WorkerDied(why))
        else:
            self._fail(item.operation, WorkerDied(why))

    async def _operate(self, work: _Work) -> None:
        operation, self._work = work.operation, work
        try:
            if self._spoilt is not None and operation.name in OF_AN_UPDATE:
                raise UpdateSpoilt(self._spoilt)
            result = await self.off_load(work.run)
        except Exception as error:  # whatever it is, it is the operation's and not the worker's
            self._fail(operation, error)
            if operation.name == "forward_backward" and self._spoilt is None:
                self._spoilt = (
                    f"not run: {operation.name} {operation.id} of this update failed, and the "
                    "gradients before it were dropped; end the update with optim_step, which "
                    "fails too, then send it again from its beginning"
                )
        else:
            self._operations.finish(operation, result)
        self._work = None
        if operation.name in ENDING_AN_UPDATE:
            self._spoilt = None
        self._operated.set()
        self._operated = anyio.Event()

    def _fail(self, operation: Operation, error: Exception) -> None:
        is_ours = not isinstance(error, LoopsError)
        logger.warning("%s failed: %s", operation.name, error, exc_info=error if is_ours else None)
        message = str(error) or "no message"
        self._operations.fail(operation, message, type(error).__name__)

    def _take_samples(self) -> None:
        """Hand the samples at the head of the queue to the engine."""
        while self._queue and isinstance(draw := self._queue[0], _Draw):
            self._queue.popleft()
            self._begin(draw)

    def _next_work(self) -> _Work | None:
        """Take the operation at the head of the queue, unless it has to wait for samples."""
        work = self._queue[0] if self._queue else None
        if not isinstance(work, _Work):
            return None
        if self.engine.is_sampling and work.operation.name not in PAUSING:
            return None
        self._queue.popleft()
        return work

    def _begin(self, draw: _Draw) -> None:
        version = self.engine.policy_version
        if draw.floor > version:
            draw.end(NotServed(f"policy version {draw.floor} is not served, {version} is"))
        elif not draw.is_abandoned:
            job = replace(draw.job, weights="live") if draw.floor else draw.job
            try:
                ticket = self.engine.ask(job)
            except Exception as error:  # whatever it is, it is the sample's
                draw.end(error)
            else:
                self._drawing[ticket] = draw, version if draw.floor else _unfloored(draw.job)

    def _let_go(self) -> None:
        """Let go of the samples that nobody waits for any more."""
        left = [ticket for ticket, (draw, _) in self._drawing.items() if draw.is_abandoned]
        for ticket in left:
            ticket.leave()
            del self._drawing[ticket]

    async def _step(self) -> None:
        try:
            ended = await self.off_load(self.engine.draw)
        except Exception as error:  # whatever it is, it is the samples' and not the worker's
            logger.warning("sampling failed: %s", error, exc_info=error)
            for ticket, (draw, _) in self._drawing.items():
                ticket.leave()
                draw.end(another(error))
            self._drawing.clear()
            return
        for ticket, outcome in ended:
            draw, version = self._drawing.pop(ticket)
            if isinstance(outcome, Exception):
                logger.warning("a sample failed: %s", outcome, exc_info=outcome)
            draw.end(outcome if isinstance(outcome, Exception) else Drawn(outcome, version))


def _unfloored(job: SampleJob) -> int | None:
    """The version of a job that asks for none: the untrained weights', or a checkpoint's, which has
    none."""
    return 0 if job.weights in ("start", "base", "live") else None
