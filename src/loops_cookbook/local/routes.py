"""The routes of a trainer, over one worker.

Each handler checks a request, hands it to the worker and writes the answer. Large bodies are read
and written in threads, a few at a time. What is refused is raised as `BadRequest` or `WireError`;
the app makes 422 of both.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeAlias, TypeVar
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loops_cookbook.local.answers import (
    Parsing,
    json_answer,
    read_body,
    refusal,
)
from loops_cookbook.local.decode import rows_of
from loops_cookbook.local.errors import BadRequest
from loops_cookbook.local.metrics import Tally
from loops_cookbook.local.operations import Operation, Operations
from loops_cookbook.local.places import Place
from loops_cookbook.local.requests import AdamW, LossOutput
from loops_cookbook.local.worker import Worker
from loops_cookbook.services.bodies import (
    Accepted,
    ForwardBackward,
    InitTrainer,
    InitTrainerResult,
    LoadState,
    LoadStateResult,
    OptimStep,
    OptimStepResult,
    SaveForSampler,
    SaveForSamplerResult,
    SaveState,
    SaveStateResult,
    read,
    write,
)
from loops_cookbook.services.wire import output_json

logger = logging.getLogger(__name__)

MAX_KEY_CHARACTERS = 128
CHANGING = frozenset(
    {
        "init_trainer_server",
        "forward_backward",
        "optim_step",
        "load_state",
        "load_state_with_optimizer",
    }
)
"""Operations on what is trained: its weights, its gradients, its optimizer."""

MOST_ANNOUNCED = 256
"""Runs, beside the one that is trained, whose seeds are remembered."""

TrainerBodyT = TypeVar(
    "TrainerBodyT", InitTrainer, ForwardBackward, OptimStep, SaveForSampler, SaveState, LoadState
)
Work: TypeAlias = Callable[[], bytes]
"""What the engine's thread runs for an operation; returns the result's JSON."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server bounds."""

    hold_seconds: float = 30.0
    """How long a poll, or a sample that waits for a version, is held before it is told 408."""
    max_body_bytes: int = 32 * 1024 * 1024
    """A client's chunks have 24 MiB and a little."""


class Trainer:
    """The trainer's routes, and which run it trains."""

    def __init__(
        self, worker: Worker, operations: Operations, limits: Limits, tally: Tally
    ) -> None:
        self._worker = worker
        self._engine = worker.engine
        self._operations = operations
        self._limits = limits
        self._tally = tally
        self._parsing = Parsing(worker.off_load)
        self._has_begun = False
        self._run_id: str | None = None
        self._last: str | None = None
        """The last operation of `CHANGING` that was accepted."""
        self._seeds: dict[str, int] = {}
        """Of runs that may begin, or begin again, the oldest first."""

    def routes(self) -> list[Route]:
        """Every route of a trainer that this server has."""
        return [
            Route("/health", self._health, methods=["GET"]),
            Route("/policy_version", self._policy_version, methods=["GET"]),
            Route("/operations/{operation_id:path}", self._poll, methods=["GET"]),
            self._operation(InitTrainer, self._init, "init_trainer_server"),
            self._operation(ForwardBackward, self._forward, "forward"),
            self._operation(ForwardBackward, self._forward_backward, "forward_backward"),
            self._operation(OptimStep, self._optim_step, "optim_step"),
            self._operation(SaveForSampler, self._publish, "save_weights_for_sampler"),
            self._operation(SaveState, self._save_state, "save_state"),
            self._operation(LoadState, self._load_state, "load_state"),
            self._operation(LoadState, self._load_all, "load_state_with_optimizer"),
        ]

    def check_run(self, run_id: str | None) -> None:
        """Refuse a request of a run that another one replaced, or that has not begun."""
        if not self._has_begun:
            raise BadRequest("no run has begun here: send init_trainer_server first")
        if run_id != self._run_id:
            raise BadRequest(
                f"run {run_id!r} is not trained here, {self._run_id!r} is: one engine serves one "
                "run at a time, so begin with init_trainer_server or use another engine"
            )

    def announce(self, run_id: str, seed: int) -> None:
        """Let a run begin with a seed of its own; `MOST_ANNOUNCED` others are remembered."""
        self._seeds[run_id] = seed
        waiting = [run for run in self._seeds if run != self._run_id]
        for run in waiting[:-MOST_ANNOUNCED]:
            del self._seeds[run]
            logger.warning(
                "the seed of run %s is forgotten, since %d others were announced after it: should "
                "it begin, it has the engine's own",
                run,
                MOST_ANNOUNCED,
            )

    @property
    def has_begun(self) -> bool:
        """Whether a run was ever begun."""
        return self._has_begun

    def check_model(self, model: str) -> None:
        """Refuse a request for another model."""
        if model != self._engine.model_name:
            raise BadRequest(
                f"model {model!r} is not served here: this engine holds {self._engine.model_name!r}"
            )

    async def _health(self, request: Request) -> Response:
        self.check_model(request.query_params.get("base_model", self._engine.model_name))
        if self._worker.fault is not None:
            return refusal(500, self._worker.fault)
        return json_answer({"status": "ok"})

    async def _policy_version(self, _: Request) -> Response:
        told = {"policy_version": self._engine.step, "last_operation": self._last}
        return json_answer(told)

    async def _poll(self, request: Request) -> Response:
        operation = self._operations.find(request.path_params["operation_id"])
        if operation is None:
            return refusal(404, "this operation is unknown, or ended too long ago")
        answer = await self._operations.wait(operation, self._limits.hold_seconds)
        if answer is not None:
            return Response(answer, media_type="application/json")
        if operation.ended.is_set():
            return refusal(404, f"the result of {operation.name} was dropped to make room")
        return refusal(408, f"{operation.name} has not ended yet: ask again")

    def _operation(
        self, model: type[TrainerBodyT], prepare: Callable[[TrainerBodyT], Work], name: str
    ) -> Route:
        """A route that accepts an operation, or the one that its key already names."""

        def parse(raw: bytes) -> tuple[TrainerBodyT, Work]:
            body = read(raw, model)
            self._check(body)
            return body, prepare(body)

        async def submit(request: Request) -> Response:
            key = _key(request)
            raw = await read_body(request, self._limits.max_body_bytes)
            if self._operations.find(key) is None:
                body, work = await self._parsing.do(partial(parse, raw), len(raw))
                # Nothing is awaited from here on: another request may have come before this one.
                if self._operations.find(key) is None:
                    self._check(body)
                    self._accept(self._operations.open(key, name), body, work)
            operation = self._operations.find(key)
            assert operation is not None
            if operation.name != name:
                raise BadRequest(f"Idempotency-Key: it names a {operation.name}, send another")
            return _accepted(operation)

        return Route(f"/{name}", submit, methods=["POST"])

    def _check(self, body: TrainerBodyT) -> None:
        self.check_model(body.model)
        if not isinstance(body, InitTrainer):
            self.check_run(body.run_id)

    def _accept(self, operation: Operation, body: TrainerBodyT, work: Work) -> None:
        if isinstance(body, InitTrainer):
            self._has_begun, self._run_id = True, body.run_id
        if operation.name in CHANGING:
            self._last = operation.id
        self._tally.accepted(operation)
        self._worker.submit(operation, work)

    def _init(self, body: InitTrainer) -> Work:
        self.check_model(body.base_model)
        self._engine.check_rank(body.lora_rank)

        seed = None if body.run_id is None else self._seeds.get(body.run_id)

        def work() -> bytes:
            self._engine.init_trainer(body.lora_rank, seed=seed)
            return write(
                InitTrainerResult(step=self._engine.step, lora_rank=self._engine.lora_rank)
            )

        return work

    def _forward(self, body: ForwardBackward) -> Work:
        return self._loss(body, self._engine.forward)

    def _forward_backward(self, body: ForwardBackward) -> Work:
        return self._loss(body, self._engine.forward_backward)

    def _loss(self, body: ForwardBackward, compute: Callable[..., LossOutput]) -> Work:
        rows, config = rows_of(body), body.loss_fn_config
        self._engine.check_rows(rows, body.loss_fn, config)

        def work() -> bytes:
            output = compute(rows, body.loss_fn, config)
            return output_json(body.loss_fn, output.loss, output.logprobs, output.metrics)

        return work

    def _optim_step(self, body: OptimStep) -> Work:
        settings = AdamW(**body.adam_params.model_dump())

        def work() -> bytes:
            metrics = self._engine.optim_step(**asdict(settings))
            return write(OptimStepResult(metrics=metrics))

        return work

    def _publish(self, body: SaveForSampler) -> Work:
        place = Place.of(body.run_id, "sampler_weights", body.name)
        if not body.bump_version:
            self._engine.check_place(place)

        def work() -> bytes:
            if body.bump_version:
                version = self._engine.publish()
            else:
                self._engine.save(place)
                version = self._engine.policy_version
            return write(SaveForSamplerResult(version=version, path=str(place)))

        return work

    def _save_state(self, body: SaveState) -> Work:
        place = Place.of(body.run_id, "weights", body.name)
        self._engine.check_place(place)

        def work() -> bytes:
            self._engine.save(place)
            return write(SaveStateResult(mode="full", path=str(place)))

        return work

    def _load_state(self, body: LoadState) -> Work:
        return self._load(body, with_optimizer=False)

    def _load_all(self, body: LoadState) -> Work:
        return self._load(body, with_optimizer=True)

    def _load(self, body: LoadState, *, with_optimizer: bool) -> Work:
        place = Place.parse(body.path)
        self._engine.check_place(place)

        def work() -> bytes:
            step = self._engine.load(place, with_optimizer=with_optimizer)
            return write(LoadStateResult(step=step))

        return work


def _key(request: Request) -> str:
    """The key that will name an operation, and be a part of its address.

    Raises:
        BadRequest: there is none, it is too long, or an address would lose it.
    """
    key = request.headers.get("idempotency-key", "")
    if not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise BadRequest(f"Idempotency-Key: send 1 to {MAX_KEY_CHARACTERS} characters")
    # Clients resolve `/operations/..` to something else before they send it.
    if any(part in ("", ".", "..") for part in key.split("/")) or not key.isprintable():
        raise BadRequest(
            f"Idempotency-Key is {key!r}: send one without the path segments '.' and '..', such as "
            "32 hexadecimal digits"
        )
    return key


def _accepted(operation: Operation) -> Response:
    return Response(
        write(Accepted(operation_id=operation.id, schema_version=1)),
        202,
        headers={"Location": f"/operations/{quote(operation.id, safe='')}"},
        media_type="application/json",
    )
