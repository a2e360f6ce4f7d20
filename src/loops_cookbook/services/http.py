"""A trainer over the Loops wire, whoever serves it.

`HttpTrainer` submits operations one at a time, in the order of their sequence numbers, and then
waits for their results; so an update's forward_backward and optim_step are both under way before
the first of them ends. An operation's name on the wire follows from the beginning (which has a name
that no other has), the caller's key, the operation and the chunk alone: the same key sent again, by
a later process too that goes on from that beginning, is the same operation and is not applied
again.
"""

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import anyio
import anyio.lowlevel
from pydantic import BaseModel

from loops_cookbook.errors import ServiceRefused
from loops_cookbook.learning.datums import Datum
from loops_cookbook.services.base import AdamParams, Held, Left, LossSpec, StepResult
from loops_cookbook.services.bodies import (
    ForwardBackwardResult,
    InitTrainer,
    InitTrainerResult,
    LoadState,
    LoadStateResult,
    OptimStep,
    OptimStepResult,
    PolicyVersion,
    SaveForSampler,
    SaveForSamplerResult,
    SaveState,
    SaveStateResult,
    WireError,
    checked,
    read,
    write,
)
from loops_cookbook.services.operations import (
    Operation,
    ResultT,
    accepted,
    of_run,
    result_of,
    understood,
    with_body,
)
from loops_cookbook.services.transport import Transport
from loops_cookbook.services.wire import (
    MAX_CHUNK_BYTES,
    chunks,
    datum_json,
    forward_backward_json,
    output_logprobs,
)
from loops_cookbook.tokens import Logprobs

LONG_ROW_BYTES = 16 * 1024
"""Other tasks get a turn after a row of this size was encoded."""
_INIT = "init_trainer_server"


def idempotency_key(beginning: str, key: str, operation: str, chunk: int = 0) -> str:
    """The name of one operation: 32 hex digits that follow from the arguments alone."""
    named = "\0".join((beginning, key, operation, str(chunk)))
    return hashlib.sha256(named.encode()).hexdigest()[:32]


@dataclass(slots=True)
class Published:
    """What a trainer handed to its sampler last."""

    version: int = 0
    path: str | None = None
    """The checkpoint to sample, where samples name one; None: the base model."""


class HttpTrainer:
    """A `Trainer` over HTTP, of a server that keeps no checkpoints.

    Args:
        transport: to the trainer.
        model: the base model's id, as the service calls it.
        run_id: the service's name of this run; None where it has none.
        beginning: names the `init_trainer` that all comes after; None: one that is to come.
        chunk_bytes: a batch of more leaves as several forward_backward requests.
        is_pinned: whether samples name the checkpoint that they are drawn from, as they do where
            there are no floors; then what is published has a name that no other has.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        model: str,
        run_id: str | None,
        beginning: str | None = None,
        chunk_bytes: int = MAX_CHUNK_BYTES,
        is_pinned: bool = False,
    ) -> None:
        self.published = Published()
        self.beginning = beginning or uuid.uuid4().hex
        self._is_pinned = is_pinned
        self._has_loaded = False
        self._version = self._least_version = 0
        """Of what was published last, and of what is next, at least: a version counts the steps
        that were taken, from the one that a load has set."""
        self._transport = transport
        self._chunk_bytes = chunk_bytes
        self._model = model
        self._run_id = run_id
        self._seq_id = 0
        self._submitting = anyio.Lock()
        self._headers = of_run(run_id)

    async def init_trainer(self, lora_rank: int) -> int:
        """Begin with fresh weights to train, and no gradients; the step, which is 0.

        Args:
            lora_rank: of the adapter; 0 trains every weight, where the service can.
        """
        async with self._submitting:
            body = self._body(InitTrainer, lora_rank=lora_rank, base_model=self._model)
            operation = await self._submit(_INIT, "", body)
        return (await self._result(operation, InitTrainerResult)).step

    async def train(
        self, batch: Sequence[Datum], loss: LossSpec, adam: AdamParams, *, key: str
    ) -> StepResult:
        """Take one optimizer step on a batch.

        The wire tells a request's loss as the mean over its datums; here it is the batch's sum.
        """
        parts = await self._parts(batch)
        async with self._submitting:
            forwards = [
                await self._forward("forward_backward", part, loss, key, i)
                for i, part in enumerate(parts)
            ]
            step = await self._step(adam, key) if len(parts) == 1 else None
        results = [await self._result(forward, ForwardBackwardResult) for forward in forwards]
        if step is None:  # not sooner: were one part to fail, the others must not be stepped on
            async with self._submitting:
                step = await self._step(adam, key)
        stepped = await self._result(step, OptimStepResult)
        return StepResult(
            loss=sum(r.loss * len(part) for r, part in zip(results, parts, strict=True)),
            logprobs=self._logprobs(results, batch),
            metrics=stepped.metrics or {},
        )

    async def score(self, batch: Sequence[Datum], *, key: str) -> tuple[Logprobs, ...]:
        """The current weights' logprobs of a supervised batch's targets; nothing is trained."""
        loss = LossSpec("cross_entropy")
        parts = await self._parts(batch)
        async with self._submitting:
            forwards = [
                await self._forward("forward", part, loss, key, i) for i, part in enumerate(parts)
            ]
        results = [await self._result(forward, ForwardBackwardResult) for forward in forwards]
        return self._logprobs(results, batch)

    async def publish(self, *, key: str) -> int:
        """Hand the current weights to the sampler; the version that it will serve."""
        call = "save_weights_for_sampler"
        name = f"{key}-{self._name(key, call)}" if self._is_pinned else key
        async with self._submitting:
            body = self._body(SaveForSampler, name=name, bump_version=True)
            operation = await self._submit(call, key, body)
        told = await self._result(operation, SaveForSamplerResult)
        if told.version < self._least_version:  # samples of older weights would pass for new ones
            raise ServiceRefused(
                f"{self._transport.base_url}: {call} told version {told.version}, where at least "
                f"{self._least_version} is due after the update: another run may train there; let "
                "one run at a time train on it, then resume"
            )
        self.published.version = self._version = self._least_version = told.version
        if self._is_pinned or self._has_loaded:
            self.published.path = self._checkpoint(told, name)
        return told.version

    async def held(self, left: Left) -> Held | None:
        """What the server has of what this beginning left there; None where that is in doubt.

        It is not where the server tells the last operation on what it trains, and that one is of
        the updates that it should have come to. An update that is to be sent again must still be
        known there, or it would be applied twice.
        """
        answer = await self._transport.call(
            "probe", "GET", "/policy_version", headers=self._headers
        )
        if answer.status != 200:
            return None
        try:
            last = read(answer.body, PolicyVersion).last_operation
        except WireError:
            return None
        confirmed = {self._name(key, "optim_step") for key in left.confirmed}
        if last in (confirmed or {self._name("", _INIT)}):
            return Held()
        for key in left.sent:
            forward = self._name(key, "forward_backward")
            if last in (forward, self._name(key, "optim_step")) and await self._knows(forward):
                return Held(key)
        return None

    async def _knows(self, operation: str) -> bool:
        try:
            await self._transport.call(
                "poll", "GET", f"/operations/{operation}", headers=self._headers
            )
        except ServiceRefused:
            return False
        return True

    def _checkpoint(self, told: SaveForSamplerResult, name: str) -> str | None:
        """The path of what was published; None of the base model.

        Version 0 is that for a service, also of weights that were loaded and not trained since: by
        their path alone they are sampled.
        """
        here = f"bt://loops:{self._run_id}/sampler_weights/"
        if told.version == 0 and not self._has_loaded:
            return None
        return told.path if told.path.startswith(here) else f"{here}{name}"

    async def _parts(self, batch: Sequence[Datum]) -> list[Sequence[bytes]]:
        """A batch in rows as they are sent, in as many parts as requests are needed."""
        rows: list[bytes] = []
        for datum in batch:
            rows.append(datum_json(datum))
            if len(rows[-1]) > LONG_ROW_BYTES:
                await anyio.lowlevel.checkpoint()
        with understood(self._transport, "the batch does not fit the wire"):
            return chunks(rows, self._chunk_bytes)

    async def _forward(
        self, name: str, rows: Sequence[bytes], loss: LossSpec, key: str, chunk: int
    ) -> Operation:
        body = forward_backward_json(
            rows, loss, seq_id=self._next(), run_id=self._run_id, model=self._model
        )
        return await self._submit(name, key, body, chunk)

    async def _step(self, adam: AdamParams, key: str) -> Operation:
        self._least_version = self._version + 1
        return await self._submit(
            "optim_step", key, self._body(OptimStep, adam_params=asdict(adam))
        )

    def _body(self, model: type[BaseModel], **values: object) -> bytes:
        """A body with the next sequence number; only for who holds `_submitting`."""
        names = {"seq_id": self._next(), "run_id": self._run_id, "model": self._model}
        return write(checked({**values, **names}, model))

    def _next(self) -> int:
        self._seq_id += 1
        return self._seq_id

    def _name(self, key: str, operation: str, chunk: int = 0) -> str:
        return idempotency_key(self.beginning, key, operation, chunk)

    async def _submit(self, name: str, key: str, body: bytes, chunk: int = 0) -> Operation:
        headers = with_body(self._headers, self._name(key, name, chunk))
        told = await accepted(self._transport, "submit", f"/{name}", body, headers)
        return Operation(name, told)

    async def _result(self, operation: Operation, model: type[ResultT]) -> ResultT:
        return await result_of(operation, model, self._transport, "poll", self._headers)

    def _logprobs(
        self, results: Sequence[ForwardBackwardResult], batch: Sequence[Datum]
    ) -> tuple[Logprobs, ...]:
        with understood(self._transport, "the result of forward_backward"):
            told = [logprobs for result in results for logprobs in output_logprobs(result)]
            lengths = [len(logprobs) for logprobs in told]
            if lengths != [len(datum.input_ids) for datum in batch]:
                raise WireError("loss_fn_outputs: not one logprob for each position sent")
        return tuple(told)


class HttpCheckpointer(HttpTrainer):
    """A `Trainer` over HTTP that is a `Checkpointer` too."""

    async def save(self, name: str) -> str:
        """Keep what is trained and its optimizer as a checkpoint of this run; where it is."""
        async with self._submitting:
            body = self._body(SaveState, name=name, ttl_seconds=None)  # kept for good
            # A name may be saved again, so it does not name the operation.
            operation = await self._submit("save_state", uuid.uuid4().hex, body)
        return (await self._result(operation, SaveStateResult)).path

    async def load(self, path: str, *, with_optimizer: bool) -> int:
        """Train on from a checkpoint; the step that training is at, 0 without the optimizer."""
        call = "load_state_with_optimizer" if with_optimizer else "load_state"
        async with self._submitting:
            body = self._body(LoadState, path=path)
            operation = await self._submit(call, uuid.uuid4().hex, body)
        self._has_loaded, self._version, self._least_version = True, 0, 0
        return (await self._result(operation, LoadStateResult)).step
