"""What the rest of the package asks of whoever trains, samples or judges, as Protocols.

A `Sampler` turns prompt ids into sampled ids. A `Trainer` applies one batch and publishes the
new policy. A `Service` is the pair for the length of a run. A `Chat` is another model, which
speaks in messages and is never trained. Nobody inherits from them: the HTTP clients, the doubles
in `loops_cookbook.testing` and a user's own objects just have the methods. All methods may raise
a `ServiceError` (`EngineDied` ends the run), and nothing else on purpose.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from pydantic import BaseModel

from loops_cookbook.errors import ServiceRefused
from loops_cookbook.learning.datums import Datum
from loops_cookbook.messages import MalformedToolCall, Message, Tool, ToolCall
from loops_cookbook.tokens import Ids, Logprobs, SampledTokens
from loops_cookbook.values import value


@value
class SampleParams:
    """How to sample one completion. Equal parameters may share a request."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they stay part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion; the id that ended it stays part of it."""
    seed: int | None = None
    attempt: int = 0
    """Which attempt of its group asks. It never leaves this process: of calls that share a
    request, the lowest gives the seed."""


class Sampler(Protocol):
    """Draws completions from the policy."""

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        """Draw `n` completions of one prompt, all from a version of at least `min_policy_version`.

        Requests with one `affinity_key` are served where their common prefix is cached.
        """
        ...


@dataclass(frozen=True, slots=True)
class AdamParams:
    """One optimizer step's settings, as the wire names them."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 1.0
    """0: no clipping."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss by its name on the wire, and its options."""

    name: str
    config: Mapping[str, float | bool] = field(default_factory=dict[str, float | bool])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one update came to."""

    loss: float
    """Sum over the batch's datums, in the units of the loss."""
    logprobs: tuple[Logprobs, ...]
    """float32[L] a datum: the trainer's own, before the update."""
    metrics: Mapping[str, float]
    """The optimizer's, such as `grad_norm` (before clipping) and `learning_rate`."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.loss):
            raise ServiceRefused(
                f"a trainer came to a loss of {self.loss}: the weights are not to be trusted; mend "
                "the trainer, or lower training.learning_rate"
            )


class Trainer(Protocol):
    """Applies batches to the policy, one optimizer step each."""

    async def train(
        self, batch: Sequence[Datum], loss: LossSpec, adam: AdamParams, *, key: str
    ) -> StepResult:
        """Take one optimizer step on a batch.

        `key` names this update in the run: the same key sent again is not applied again.
        """
        ...

    async def publish(self, *, key: str) -> int:
        """Hand the current weights to the sampler; the version that it will serve."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """A trainer that can also score rows; a run of one that cannot looks at no held-out rows."""

    async def score(self, batch: Sequence[Datum], *, key: str) -> tuple[Logprobs, ...]:
        """The current weights' logprobs of a supervised batch's targets, float32[L] a datum.

        Nothing is trained. Where a weight is 0 a logprob may be NaN. `key` names this look in the
        run.
        """
        ...


@runtime_checkable
class Checkpointer(Protocol):
    """A trainer that can also keep its state; a run of one that cannot has no checkpoints."""

    async def save(self, name: str) -> str:
        """Keep what is trained and its optimizer as a checkpoint of this run; where it is.

        One of the same name is replaced.
        """
        ...

    async def load(self, path: str, *, with_optimizer: bool) -> int:
        """Train on from a checkpoint; the step that training is at, 0 without the optimizer."""
        ...


@dataclass(frozen=True, slots=True)
class Left:
    """What a run that was killed left at its trainer, by its records."""

    beginning: str
    """The trainer's own name of the weights that it began with."""
    confirmed: tuple[str, ...] = ()
    """Keys that the last update with a row may have been sent under; none: there is no update."""
    sent: tuple[str, ...] = ()
    """Keys that the update after it may have been sent under; none: it was not made."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a trainer still has of a run: every update that was confirmed, and nothing else."""

    sent: str | None = None
    """The key under which the update after those was sent, to be sent again under it alone; None:
    it has not come."""


@runtime_checkable
class Surviving(Protocol):
    """A service whose trainer may have lived on while its run was killed."""

    @property
    def held(self) -> Held | None:
        """What it still has; None: it began with fresh weights."""
        ...


class Service(Protocol):
    """A trainer and its sampler."""

    @property
    def trainer(self) -> Trainer:
        """Applies batches."""
        ...

    @property
    def sampler(self) -> Sampler:
        """Draws completions from what the trainer published."""
        ...

    @property
    def temperature_in_loss(self) -> bool:
        """Whether the trainer takes the sampling temperature in `loss_fn_config`."""
        ...

    @property
    def description(self) -> Mapping[str, str | int]:
        """What run.json records of it: addresses, device, dtype, the service's own run id."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """What the factory of a service of one's own is given: `[compute] scope = "module:factory"`."""

    run_id: str
    """Name of the run's folder."""
    run_folder: Path
    """A place for logs."""
    model: str
    """`model.name`."""
    model_directory: Path | None
    """Where it lies, if that is on this machine."""
    max_seq_len: int
    lora_rank: int
    lora_alpha: float
    seed: int
    """`model.seed`, of the first weights."""
    options: BaseModel | None
    """`[compute.options]`, validated by the factory's `options_model`; None without one."""


class ServiceFactory(Protocol):
    """Opens a service for the length of a `with` block."""

    def __call__(self) -> AbstractAsyncContextManager[Service]:
        """Start it; leaving the block ends it."""
        ...


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call of a model that speaks in messages."""

    messages: tuple[Message, ...]
    """In OpenAI form."""
    tools: tuple[Tool, ...] = ()
    tool_choice: object = None
    """In OpenAI form; None leaves it to the service."""
    max_tokens: int | None = None
    """None: as the producer's settings have it."""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """What a model said."""

    content: str | None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_tool_calls: tuple[MalformedToolCall, ...] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"


class Chat(Protocol):
    """A model that speaks in messages."""

    async def complete(self, request: ChatRequest) -> ChatAnswer:
        """The next assistant message."""
        ...
