"""The JSON bodies of the Loops wire, trainer and sampler: their keys, in the order they leave.

Client and server import the same models, so a body is defined once. Unknown keys are ignored.
Requests are read strictly (a string is no number), answers leniently. Numbers outside tensors are
finite. A body that breaks these rules is a `WireError` that names the key.
"""

from typing import Annotated, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from pydantic_core import from_json

from loops_cookbook.errors import LoopsError

BodyT = TypeVar("BodyT", bound=BaseModel)


class WireError(LoopsError):
    """A body is not what the protocol says; the message names the key."""


class Request(BaseModel):
    """A body that a client sends; a field that was not set is not sent."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class InitTrainer(Request):
    """`POST /init_trainer_server`: fresh weights to train, step 0, no gradients."""

    lora_rank: int = Field(ge=0)
    base_model: str
    seq_id: int = 0
    run_id: str | None = None
    model: str


class Tensor(Request):
    """Numbers, flat in row-major order or nested; `shape` decides."""

    data: list[object]
    dtype: str
    shape: list[Annotated[int, Field(ge=0)]]


class Chunk(Request):
    """A part of a model input; only `encoded_text` carries tokens."""

    type: str
    tokens: list[int] = []


class ModelInput(Request):
    """The chunks of one row."""

    chunks: list[Chunk]


class WireDatum(Request):
    """One row as it stands on the wire."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, Tensor]
    routed_experts_ref: dict[str, object] | None = None


class ForwardBackward(Request):
    """`POST /forward_backward`, and `POST /forward`, which leaves gradients alone."""

    data: list[WireDatum]
    loss_fn: str
    loss_fn_config: dict[str, bool | FiniteFloat] | None = None
    seq_id: int = 0
    run_id: str | None = None
    top_k_logprobs: int = 0
    model: str


class WireAdam(Request):
    """`adam_params`; what is absent takes the wire's default. `grad_clip_norm` 0: no clipping."""

    learning_rate: FiniteFloat = Field(1e-4, ge=0)
    beta1: FiniteFloat = Field(0.9, ge=0, lt=1)
    beta2: FiniteFloat = Field(0.95, ge=0, lt=1)
    eps: FiniteFloat = Field(1e-12, ge=0)
    weight_decay: FiniteFloat = Field(0.0, ge=0)
    grad_clip_norm: FiniteFloat = Field(1.0, ge=0)


class OptimStep(Request):
    """`POST /optim_step`: apply and clear the gradients, count one step."""

    adam_params: WireAdam
    seq_id: int = 0
    run_id: str | None = None
    model: str


class SaveForSampler(Request):
    """`POST /save_weights_for_sampler`; `bump_version`: the paired sampler serves them."""

    name: str
    ttl_seconds: int | None = None
    run_id: str | None = None
    seq_id: int = 0
    bump_version: bool
    model: str


class SaveState(Request):
    """`POST /save_state`: a checkpoint that training can go on from."""

    name: str
    ttl_seconds: int | None = None
    run_id: str | None = None
    seq_id: int = 0
    model: str


class LoadState(Request):
    """`POST /load_state`, and `/load_state_with_optimizer`, which restores the step too."""

    path: str
    run_id: str | None = None
    seq_id: int = 0
    model: str


class Sample(Request):
    """`POST /sample`. `logprobs: 0` asks for the sampled token's own logprob, and
    `prompt_logprobs: 0` for those of the prompt's own tokens; k adds the k likeliest."""

    prompt: list[int]
    n: int = Field(1, ge=1, le=4096)
    temperature: FiniteFloat = Field(1.0, ge=0, le=1e4)
    top_p: FiniteFloat = Field(1.0, ge=1e-6, le=1)
    logprobs: int | None = 0
    return_tokens_as_token_ids: bool | None = True
    include_routed_experts: bool | None = None
    model_input_chunks: list[object] | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    stop_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    structured_outputs: dict[str, object] | None = None
    model: str | None = None
    lora: str | None = None


TokenId: TypeAlias = Annotated[int, Field(strict=True)]
"""Also in an answer: what is trained on is not guessed from a true, a 7.0 or a "7"."""


class Answer(BaseModel):
    """A body that a server answers with."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Accepted(Answer):
    """A submitted operation was taken; the result is fetched by its id."""

    operation_id: str = Field(min_length=1)
    schema_version: Literal[1] = 1


class Poll(Answer):
    """`GET /operations/{id}`: `done` with a result, `error`, or anything else: not yet."""

    status: str | None = None
    result: dict[str, object] | None = None
    error: str | None = None
    error_class: str | None = None


class PolicyVersion(Answer):
    """`GET /policy_version`: optimizer steps applied."""

    policy_version: int = 0
    last_operation: str | None = None
    """The name of the last operation on what is trained that was accepted; ours alone tell it."""


class InitTrainerResult(Answer):
    """Result of `init_trainer_server`."""

    step: int = 0
    lora_rank: int


class ForwardBackwardResult(Answer):
    """Result of `forward_backward` and `forward`."""

    loss: FiniteFloat = 0.0
    """Mean over the datums of the request."""
    loss_fn_output_type: str = ""
    loss_fn_outputs: list[dict[str, Tensor]] = []
    metrics: dict[str, FiniteFloat] = {}


class OptimStepResult(Answer):
    """Result of `optim_step`."""

    metrics: dict[str, FiniteFloat] | None = None


class SaveForSamplerResult(Answer):
    """Result of `save_weights_for_sampler`; version 0: nothing trained yet, the base model."""

    version: int = 0
    path: str = ""


class SaveStateResult(Answer):
    """Result of `save_state`."""

    mode: str = ""
    path: str = ""


class LoadStateResult(Answer):
    """Result of `load_state` and `load_state_with_optimizer`: the step that training is at."""

    step: int = 0


class ChoiceLogprobs(Answer):
    """Tokens as `token_id:<id>` (or ids) and their logprobs, position by position."""

    tokens: list[TokenId | str] = []
    token_logprobs: list[FiniteFloat]


class TokenLogprob(Answer):
    """How likely a token was in its place of a prompt; rank 1 is the likeliest."""

    logprob: FiniteFloat
    rank: int | None = None


class Choice(Answer):
    """One completion."""

    index: int = 0
    text: str | None = None
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: ChoiceLogprobs
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None
    """For each token of the prompt, itself first and then the likeliest; null for the first."""


class Samples(Answer):
    """The answer of `POST /sample`."""

    choices: list[Choice] = []


def read(body: bytes, model: type[BodyT]) -> BodyT:
    """A body as its model.

    Raises:
        WireError: it is no JSON object, or a key is missing or has a wrong value.
    """
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise WireError(f"the body is not JSON: {error}") from error
    return checked(value, model)


def checked(value: object, model: type[BodyT]) -> BodyT:
    """A parsed JSON value as its model; raises as `read` does."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise WireError(f"{where}: {first['msg']}") from error


def write(body: BaseModel) -> bytes:
    """A body as compact UTF-8 JSON, its keys in wire order."""
    return body.model_dump_json(exclude_unset=True).encode()
