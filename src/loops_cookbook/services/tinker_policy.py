"""One adapter over the Tinker API: trained, published, and sampled as it was published last.

An update is one forward_backward and one optim_step, sent one after the other before either is
answered. There are no floors: a sample is drawn from the weights that were published last. Versions
are counted here, for the service has none, and begin with the updates that the policy has.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import anyio.lowlevel
import numpy as np
import numpy.typing as npt

from loops_cookbook.errors import ServiceRefused
from loops_cookbook.learning.datums import Datum
from loops_cookbook.learning.losses import cispo, cross_entropy, importance_sampling, ppo
from loops_cookbook.services.base import AdamParams, LossSpec, SampleParams, StepResult
from loops_cookbook.services.tinker_sdk import (
    ForwardBackwardOutput,
    SampleResponse,
    SamplingClient,
    Sdk,
    ServiceClient,
    TrainingClient,
)
from loops_cookbook.services.tinker_server import TinkerServer
from loops_cookbook.tokens import Ids, Logprobs, SampledTokens, ids_of, logprobs_of

WEIGHTS_SECONDS = 7 * 24 * 3600
"""For which weights that were sampled are kept, where the service heeds it."""
SEEDS = 2**30
"""SkyRL adds a completion's index to the seed, and the sum must fit 32 bits."""

LOSSES = {"importance_sampling": importance_sampling, "ppo": ppo, "cispo": cispo}
"""What means the same there under the same name."""
CROSS_ENTROPY = "cross_entropy"
"""The loss of rows with weights. There it is a sum; see `_row`."""


@dataclass(frozen=True, slots=True)
class _Published:
    """Weights that can be sampled."""

    version: int
    client: SamplingClient


class TinkerTrainer:
    """A `Trainer` over the Tinker API; also a `Scorer` and a `Checkpointer`.

    Args:
        server: where it is.
        client: makes what samples the published weights.
        training: of the run's own adapter.
        first_version: of the weights that are published first.
    """

    def __init__(
        self,
        server: TinkerServer,
        client: ServiceClient,
        training: TrainingClient,
        first_version: int = 0,
    ) -> None:
        self._first_version = first_version
        self._server = server
        self._client = client
        self._training = training
        self._applied: tuple[str, StepResult] | None = None
        """The last update and its key."""
        self._published: _Published | None = None

    @property
    def published(self) -> _Published:
        """What was published last."""
        assert self._published is not None, "weights are published before any are sampled"
        return self._published

    async def train(
        self, batch: Sequence[Datum], loss: LossSpec, adam: AdamParams, *, key: str
    ) -> StepResult:
        """Take one optimizer step on a batch.

        The loss is computed here, from the trainer's log-probabilities: services tell it in units
        of their own, or not at all.
        """
        if loss.name not in (CROSS_ENTROPY, *LOSSES):
            sent = ", ".join((CROSS_ENTROPY, *LOSSES))
            raise ServiceRefused(f"loss {loss.name!r}: Tinker is sent {sent} only")
        if self._applied is not None and self._applied[0] == key:
            return self._applied[1]
        rows = await self._rows(batch, loss.name, divisor=_weight(batch))
        config = {name: float(value) for name, value in loss.config.items()}
        with self._server.told("an update"):
            forward = await self._training.forward_backward_async(rows, loss.name, config or None)
            step = await self._training.optim_step_async(
                self._server.sdk.AdamParams(**asdict(adam))
            )
            output = await forward.result_async()
            stepped = await step.result_async()
            logprobs = _logprobs(output, batch)
        metrics = {name.rpartition("/")[2]: v for name, v in (stepped.metrics or {}).items()}
        result = StepResult(_loss(loss, batch, logprobs), logprobs, metrics)
        self._applied = key, result
        return result

    async def score(self, batch: Sequence[Datum], *, key: str) -> tuple[Logprobs, ...]:
        """The current weights' logprobs of a supervised batch's targets."""
        rows = await self._rows(batch, CROSS_ENTROPY, divisor=1.0)
        with self._server.told("scoring rows"):
            forward = await self._training.forward_async(rows, CROSS_ENTROPY, None)
            return _logprobs(await forward.result_async(), batch)

    async def _rows(self, batch: Sequence[Datum], loss: str, *, divisor: float) -> list[object]:
        """The batch as it is sent; others get their turn between its rows."""
        rows: list[object] = []
        for datum in batch:
            rows.append(_row(self._server.sdk, datum, loss, divisor))
            await anyio.lowlevel.checkpoint()
        return rows

    async def publish(self, *, key: str) -> int:
        """Hand the current weights to the sampler; the version that it will serve.

        Also before any training: of the base model by its name, which would be the same, not every
        SkyRL can sample.
        """
        version = self._first_version
        if self._published is not None:
            version = self._published.version + 1
        with self._server.told("publishing the weights"):
            saving = await self._training.save_weights_for_sampler_async(
                f"{key}-v{version}", ttl_seconds=WEIGHTS_SECONDS
            )
            path = (await saving.result_async()).path
            client = await self._client.create_sampling_client_async(model_path=path)
        self._published = _Published(version, client)
        return version

    async def save(self, name: str) -> str:
        """Keep the adapter and its optimizer as a checkpoint; its `tinker://` path."""
        with self._server.told("saving a checkpoint"):
            saving = await self._training.save_state_async(name, ttl_seconds=None, overwrite=True)
            return (await saving.result_async()).path

    async def load(self, path: str, *, with_optimizer: bool) -> int:
        """Train on from a checkpoint; 0, since the service does not tell at which step it is.

        SkyRL 0.3.0 is told to leave the optimizer out and loads it all the same.
        """
        self._applied = None
        load = self._training.load_state_async
        if with_optimizer:
            load = self._training.load_state_with_optimizer_async
        with self._server.told(f"loading {path}"):
            await (await load(path)).result_async()
        return 0


class TinkerSampler:
    """A `Sampler` over the Tinker API, of what a trainer published last."""

    def __init__(self, server: TinkerServer, trainer: TinkerTrainer) -> None:
        self._server = server
        self._trainer = trainer

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        """Draw `n` completions of one prompt from the weights that were published last."""
        published = self._trainer.published
        if published.version < min_policy_version:
            raise ServiceRefused(
                f"policy version {min_policy_version} was asked for and {published.version} is "
                "published"
            )
        sdk = self._server.sdk
        settings = sdk.SamplingParams(**_settings(params))
        with self._server.told("a sample"):
            response = await published.client.sample_async(
                sdk.ModelInput.from_ints(prompt_ids.tolist()), n, settings
            )
            return _completions(response, n, published.version)


def _settings(params: SampleParams) -> dict[str, object]:
    if params.stop and params.stop_token_ids:
        raise ServiceRefused(
            f"sampling.stop: a Tinker service ends a reply at strings or at token ids, not at both "
            f"({', '.join(map(repr, params.stop))} and the ids that the renderer needs); remove it"
        )
    return {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "stop": list(params.stop or params.stop_token_ids) or None,
        "seed": None if params.seed is None else params.seed % SEEDS,
    }


def _completions(response: SampleResponse, n: int, version: int) -> tuple[SampledTokens, ...]:
    if len(response.sequences) != n:
        raise ServiceRefused(f"a sample has {len(response.sequences)} of the {n} asked for")
    made: list[SampledTokens] = []
    for sequence in response.sequences:
        if sequence.logprobs is None:
            raise ServiceRefused("a sample has no logprobs, which training needs")
        ids, logprobs = ids_of(sequence.tokens), logprobs_of(sequence.logprobs)
        stop = "stop" if sequence.stop_reason == "stop" else "length"
        made.append(SampledTokens(ids, logprobs, stop, version))
    return tuple(made)


def _row(sdk: Sdk, datum: Datum, loss: str, divisor: float) -> object:
    """A datum as the SDK has it.

    Its weights are divided, since Tinker adds cross_entropy up and ours is a mean over the batch's
    weights: what clips a gradient has to mean the same for batches of any size.
    """
    streams: dict[str, npt.NDArray[np.generic]] = {
        "target_tokens": datum.target_ids.astype(np.int64)
    }
    if loss == CROSS_ENTROPY:
        if datum.weights is None:
            raise ServiceRefused("a row without weights is no row of cross_entropy")
        streams["weights"] = (datum.weights / divisor).astype(np.float32)
    else:
        if datum.logprobs is None or datum.advantages is None:
            raise ServiceRefused("a row without logprobs and advantages is no row of a policy loss")
        streams["logprobs"] = datum.logprobs.astype(np.float32)
        streams["advantages"] = datum.advantages.astype(np.float32)
    return sdk.Datum(
        model_input=sdk.ModelInput.from_ints(datum.input_ids.tolist()), loss_fn_inputs=streams
    )


def _weight(batch: Sequence[Datum]) -> float:
    """All weights of a batch; 1 where it has none, as the rows of a policy loss."""
    return sum(float(datum.weights.sum()) for datum in batch if datum.weights is not None) or 1.0


def _logprobs(output: ForwardBackwardOutput, batch: Sequence[Datum]) -> tuple[Logprobs, ...]:
    told = tuple(logprobs_of(row["logprobs"].data) for row in output.loss_fn_outputs)
    if [len(logprobs) for logprobs in told] != [len(datum.input_ids) for datum in batch]:
        raise ServiceRefused("the trainer's logprobs are not one for each position sent")
    return told


def _loss(loss: LossSpec, batch: Sequence[Datum], logprobs: Sequence[Logprobs]) -> float:
    return sum(_own_loss(loss, datum, own) for datum, own in zip(batch, logprobs, strict=True))


def _own_loss(loss: LossSpec, datum: Datum, own: Logprobs) -> float:
    if loss.name == CROSS_ENTROPY:
        assert datum.weights is not None, "they were sent"
        is_trained = datum.weights > 0  # elsewhere a logprob may be anything
        return cross_entropy(own[is_trained], datum.weights[is_trained]).total
    assert datum.logprobs is not None, "they were sent"
    assert datum.advantages is not None, "they were sent"
    return LOSSES[loss.name](own, datum.logprobs, datum.advantages, **loss.config).total
