"""A trainer and a sampler for `kill_resume.py`: a run of them starts in a second and has state.

The weights are a vector that every batch moves, by all that is in the batch and by what the weights
were; the optimizer is another, that the loss of neither would survive. So two runs whose weights
agree applied the same batches in the same order. Checkpoints are files, whole or not at all. What
is sampled follows from the weights and the seed alone.
"""

import hashlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
from tokenizers import Tokenizer

from loops_cookbook.learning.datums import Datum
from loops_cookbook.services import (
    AdamParams,
    LossSpec,
    SampleParams,
    ServiceContext,
    StepResult,
)
from loops_cookbook.tokens import Ids, SampledTokens, ids_of, logprobs_of

SIZE = 8


class Policy:
    """The weights, the optimizer, and what is published; a trainer and a sampler."""

    temperature_in_loss = False

    def __init__(self, context: ServiceContext) -> None:
        assert context.model_directory is not None
        self.description = {"kind": "numpy"}
        self._folder = context.run_folder / "kept"
        self._tokenizer = Tokenizer.from_file(str(context.model_directory / "tokenizer.json"))
        self._weights, self._moments, self._step = np.ones(SIZE), np.zeros(SIZE), 0
        self._served = self._weights
        self._version = 0

    @property
    def trainer(self) -> "Policy":
        """Itself."""
        return self

    @property
    def sampler(self) -> "Policy":
        """Itself."""
        return self

    async def train(
        self, batch: Sequence[Datum], loss: LossSpec, adam: AdamParams, *, key: str
    ) -> StepResult:
        """Move the weights by all that is in the batch."""
        await anyio.sleep(0.01)
        gradient = sum(_moves(datum) for datum in batch) * self._weights
        self._moments = 0.9 * self._moments + gradient
        self._weights = self._weights - adam.learning_rate * np.tanh(self._moments)
        self._step += 1
        await anyio.sleep(0.01)
        logprobs = tuple(d.logprobs for d in batch if d.logprobs is not None)
        return StepResult(float(self._weights.sum()), logprobs, {"grad_norm": 1.0})

    async def publish(self, *, key: str) -> int:
        """Serve the weights; their version is the step."""
        self._served, self._version = self._weights.copy(), self._step
        return self._version

    async def save(self, name: str) -> str:
        """Keep weights, optimizer and step in a file."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{name}.json"
        state = [self._weights.tolist(), self._moments.tolist(), self._step]
        path.with_suffix(".tmp").write_text(json.dumps(state))
        await anyio.sleep(0.01)
        os.replace(path.with_suffix(".tmp"), path)
        return str(path)

    async def load(self, path: str, *, with_optimizer: bool) -> int:
        """Go on from a file."""
        weights, moments, step = json.loads(await anyio.Path(path).read_text())
        self._weights = np.array(weights)
        self._moments = np.array(moments) if with_optimizer else np.zeros(SIZE)
        self._step = step if with_optimizer else 0
        await self.publish(key="load")
        return self._step

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        """A digit that follows from the prompt, the seed and the weights."""
        await anyio.sleep(0.02)
        told = json.dumps([prompt_ids.tolist(), params.seed, self._served.round(9).tolist()])
        random = np.random.default_rng(list(hashlib.sha256(told.encode()).digest()))
        return tuple(self._reply(random, params) for _ in range(n))

    def _reply(self, random: np.random.Generator, params: SampleParams) -> SampledTokens:
        said = self._tokenizer.encode(str(random.integers(0, 4)), add_special_tokens=False).ids
        ids = [*said, params.stop_token_ids[0]]
        logprobs = logprobs_of(-random.random(len(ids)))
        return SampledTokens(ids_of(ids), logprobs, "stop", self._version)


def _moves(datum: Datum) -> np.ndarray:
    """What a row does to the weights: another row does another thing."""
    assert datum.advantages is not None
    told = b"".join(each.tobytes() for each in (datum.input_ids, datum.logprobs, datum.advantages))
    return np.frombuffer(hashlib.sha256(told).digest(), np.uint32)[:SIZE] / 2**32 - 0.5


@asynccontextmanager
async def open_service(context: ServiceContext) -> AsyncIterator[Policy]:
    """What `[compute] scope` names."""
    yield Policy(context)
