"""A trainer and its sampler, whole, in numpy: what `[compute] scope = "module:factory"` asks for.

The policy is a softmax over the vocabulary whose logits are linear in how often each token occurs
in the context. Put your own engine in its place; what
has to stay is the shape of `Service`: a sampler that says exactly which ids it drew and how likely
each was, and a trainer that takes a batch, steps once and publishes. With `save` and `load` its
runs can be resumed.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from loops_cookbook.errors import ServiceRefused
from loops_cookbook.services import (
    AdamParams,
    Datum,
    LossSpec,
    SampleParams,
    ServiceContext,
    StepResult,
)
from loops_cookbook.tokens import SampledTokens, ids_of, logprobs_of

Floats = npt.NDArray[np.float64]

MOST = 4  # occurrences of a token that are told apart


class Options(BaseModel):
    """The table [compute.options]."""

    model_config = ConfigDict(extra="forbid")

    vocabulary: int  # one more than the highest token id


class LinearPolicy:
    """Weights, and what they make of a context."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.vocabulary = vocabulary
        self.weights: Floats = np.random.default_rng(seed).normal(
            0, 0.01, (MOST * vocabulary, vocabulary)
        )

    def features(self, context: Sequence[int]) -> Floats:
        """float64[F]: of each token, whether it occurs once or more, twice or more, ..."""
        counts = np.bincount(context, minlength=self.vocabulary)
        return np.concatenate([counts >= most for most in range(1, MOST + 1)]).astype(np.float64)

    def logprobs(self, features: Floats) -> Floats:
        """float64[..., V]"""
        logits = features @ self.weights
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@dataclass
class NumpySampler:
    """Draws from the weights that were published last."""

    policy: LinearPolicy
    version: int = 0

    async def sample(
        self,
        prompt_ids: npt.NDArray[np.int32],
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        if params.top_p < 1 or params.top_k > 0 or params.stop:
            raise ServiceRefused("numpy_service knows no top_p, top_k or stop strings: unset them")
        if min_policy_version > self.version:
            raise ServiceRefused(f"version {min_policy_version} was not published yet")
        # Equal calls of a group come as one, with `n`.
        rng, prompt = np.random.default_rng(params.seed), prompt_ids.tolist()
        return tuple(self._completion(prompt, params, rng) for _ in range(n))

    def _completion(
        self, prompt: list[int], params: SampleParams, rng: np.random.Generator
    ) -> SampledTokens:
        ids: list[int] = []
        logprobs: list[float] = []
        while len(ids) < params.max_tokens:
            scores = self.policy.logprobs(self.policy.features([*prompt, *ids]))
            # 0 is greedy; the logprob that is told is that of the distribution at 1, as the
            # trainer knows no other.
            if params.temperature == 0:
                token = int(scores.argmax())
            else:
                chances = np.exp(scores / params.temperature)
                token = int(rng.choice(len(chances), p=chances / chances.sum()))
            ids.append(token)
            logprobs.append(float(scores[token]))
            if token in params.stop_token_ids:
                return SampledTokens(ids_of(ids), logprobs_of(logprobs), "stop", self.version)
        return SampledTokens(ids_of(ids), logprobs_of(logprobs), "length", self.version)


@dataclass
class NumpyTrainer:
    """One step of Adam for each batch, on the policy gradient."""

    sampler: NumpySampler
    policy: LinearPolicy
    folder: Path  # of checkpoints
    taken: int = 0  # steps
    results: dict[str, StepResult] = field(default_factory=dict[str, StepResult])

    def __post_init__(self) -> None:
        self.mean = np.zeros_like(self.policy.weights)
        self.square = np.zeros_like(self.policy.weights)

    async def train(
        self, batch: Sequence[Datum], loss: LossSpec, adam: AdamParams, *, key: str
    ) -> StepResult:
        if loss.name != "importance_sampling":
            raise ServiceRefused(f"numpy_service trains importance_sampling, not {loss.name}")
        if key not in self.results:  # the same key sent again is not applied again
            # In a thread: attempts and clocks go on meanwhile.
            self.results[key] = await anyio.to_thread.run_sync(self._step, batch, adam)
        return self.results[key]

    async def publish(self, *, key: str) -> int:
        self.sampler.policy.weights = self.policy.weights.copy()
        self.sampler.version = self.taken
        return self.sampler.version

    async def save(self, name: str) -> str:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"{name}.npz"
        weights, mean, square = self.policy.weights, self.mean, self.square
        np.savez(path, weights=weights, mean=mean, square=square, taken=self.taken)
        return str(path)

    async def load(self, path: str, *, with_optimizer: bool) -> int:
        with np.load(path) as kept:
            self.policy.weights = kept["weights"]
            if with_optimizer:
                self.mean, self.square, self.taken = (
                    kept["mean"],
                    kept["square"],
                    int(kept["taken"]),
                )
        return self.taken

    def _step(self, batch: Sequence[Datum], adam: AdamParams) -> StepResult:
        gradient = np.zeros_like(self.policy.weights)
        logprobs: list[npt.NDArray[np.float32]] = []
        loss = 0.0
        for datum in batch:
            assert datum.advantages is not None
            assert datum.logprobs is not None
            ids = datum.input_ids.tolist()
            features = np.stack([self.policy.features(ids[: k + 1]) for k in range(len(ids))])
            scores = self.policy.logprobs(features)
            said = np.take_along_axis(scores, datum.target_ids[:, None], axis=1)[:, 0]
            # Minus the advantage times the ratio of the two policies; 0 where nothing was sampled.
            pushed = -datum.advantages * np.exp(said - datum.logprobs)
            loss += float(pushed.sum())
            chosen = np.eye(self.policy.vocabulary)[datum.target_ids]
            gradient += features.T @ (pushed[:, None] * (chosen - np.exp(scores)))
            logprobs.append(said.astype(np.float32))
        norm = float(np.linalg.norm(gradient))
        if 0 < adam.grad_clip_norm < norm:
            gradient *= adam.grad_clip_norm / norm
        self._apply(gradient, adam)
        metrics = {"grad_norm": norm, "learning_rate": adam.learning_rate}
        return StepResult(loss, tuple(logprobs), metrics)

    def _apply(self, gradient: Floats, adam: AdamParams) -> None:
        self.taken += 1
        self.mean += (1 - adam.beta1) * (gradient - self.mean)
        self.square += (1 - adam.beta2) * (gradient**2 - self.square)
        mean = self.mean / (1 - adam.beta1**self.taken)
        square = self.square / (1 - adam.beta2**self.taken)
        self.policy.weights -= adam.learning_rate * mean / (np.sqrt(square) + adam.eps)


@dataclass
class NumpyService:
    """What the run is handed."""

    trainer: NumpyTrainer
    sampler: NumpySampler
    description: dict[str, str | int]
    temperature_in_loss: bool = False  # the trainer takes no temperature


class Create:
    """The factory; `options_model` validates [compute.options]."""

    options_model = Options

    @asynccontextmanager
    async def __call__(self, context: ServiceContext) -> AsyncGenerator[NumpyService]:
        options: Any = context.options
        trained = LinearPolicy(options.vocabulary, context.seed)
        sampler = NumpySampler(LinearPolicy(options.vocabulary, context.seed))
        trainer = NumpyTrainer(sampler, trained, context.run_folder / "kept")
        yield NumpyService(trainer, sampler, {"service": "numpy"})


create = Create()
