"""Doubles of a sampler, a trainer and a service: what they say is scripted, what they get is kept.

They implement `services.base`, so a whole run or one Episode can be tried without a model. A
script is a list with one entry for each call, or a function of the prompt's text and the call's
number. An entry is the text of a reply, a `Line` for more than its text, or an exception, which
is raised.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import anyio
import numpy as np

from loops_cookbook.errors import EpisodeError, ServiceRefused
from loops_cookbook.learning.datums import Datum
from loops_cookbook.problems import found
from loops_cookbook.rollouts.grading import returned
from loops_cookbook.services.base import AdamParams, LossSpec, SampleParams, StepResult
from loops_cookbook.testing.given import require_seconds
from loops_cookbook.testing.tokenizer import ByteTokenizer
from loops_cookbook.tokens import Ids, Logprobs, SampledTokens, ids_of, logprobs_of


@dataclass(frozen=True, slots=True)
class Line:
    """One reply of a script, in full."""

    text: str = ""
    """Its tokens are the tokenizer's, then the stop token."""
    ids: Sequence[int] | None = None
    """The exact tokens, in place of the text's; a stop token is not added."""
    logprobs: Sequence[float] | None = None
    """One for each token; by default some that differ from token to token."""
    seconds: float | None = None
    """How long it takes, in place of the sampler's own time."""
    policy_version: int | None = None
    """In place of the version that the sampler serves."""

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.text), str):
            raise EpisodeError(f"Line(): text is {returned(self.text)}: use a string")
        if self.seconds is not None:
            require_seconds("Line()", self.seconds)


Step: TypeAlias = str | Line | Exception
"""What one call comes to."""
Script: TypeAlias = Sequence[Step] | Callable[[str, int], Step]
"""A step for each call, in the order in which they arrive; or a function of the prompt's text
and the number of the call, from 0."""


def require_script(script: object, *steps: type) -> None:
    """Refuse what is no script before it is played.

    Args:
        script: what somebody gave for one.
        steps: the types of its steps.

    Raises:
        EpisodeError: it is a text, whose letters would be the replies, or has steps that are none.
    """
    if callable(script):
        return
    if isinstance(script, str) or not isinstance(script, Sequence):
        raise EpisodeError(
            f"a script of replies is {found(script)}: pass a list with a step for each model call, "
            'such as ["yes"], or a function'
        )
    for index, step in enumerate(cast(Sequence[object], script)):
        require_step(step, index, *steps)


def require_step(step: object, index: int, *steps: type) -> None:
    """Refuse what is no step of a script, also where a function gave it.

    Raises:
        EpisodeError: it is none.
    """
    if not isinstance(step, steps):
        named = ", ".join(each.__name__ for each in steps)
        raise EpisodeError(f"step {index} of a script is {returned(step)}: use one of {named}")


@dataclass(frozen=True, slots=True, eq=False)
class SampleCall:
    """One completion that was asked for."""

    prompt_ids: Ids
    prompt: str
    """The prompt's text, marks included."""
    params: SampleParams
    min_policy_version: int
    affinity_key: str | None


class ScriptedSampler:
    """Answers from a script; implements `services.base.Sampler`.

    Limits, stop tokens and stop strings are kept as a real sampler keeps them.

    Args:
        script: what it answers.
        tokenizer: how prompts are read and replies are spelt.
        seconds: how long each call takes.
        policy_version: the version that it serves; a trainer may raise it.
    """

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: ByteTokenizer | None = None,
        seconds: float = 0.0,
        policy_version: int = 0,
    ) -> None:
        require_script(script, str, Line, Exception)
        require_seconds("ScriptedSampler()", seconds)
        self.tokenizer = tokenizer or ByteTokenizer()
        self.policy_version = policy_version
        self.calls: list[SampleCall] = []
        """Every completion that was asked for, in order."""
        self.under_way = 0
        """Requests that wait for their answer now."""
        self.most_under_way = 0
        """The most that ever waited at once."""
        self._script = script
        self._seconds = seconds

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        """The next `n` steps of the script.

        Raises:
            ServiceRefused: the script has ended, or the version asked for is not served.
            Exception: a step that is one.
        """
        if min_policy_version > self.policy_version:
            raise ServiceRefused(
                f"policy version {min_policy_version} was asked for, and {self.policy_version} "
                "is served: publish before sampling"
            )
        prompt = self.tokenizer.decode(prompt_ids.tolist())
        first = len(self.calls)
        call = SampleCall(prompt_ids, prompt, params, min_policy_version, affinity_key)
        self.calls += [call] * n
        steps = [self._step(prompt, first + index) for index in range(n)]
        await self._wait(steps)
        for step in steps:
            if isinstance(step, Exception):
                raise step
        return tuple(self._sampled(s, params) for s in steps if not isinstance(s, Exception))

    def _step(self, prompt: str, index: int) -> Line | Exception:
        if callable(self._script):
            step = self._script(prompt, index)
            require_step(step, index, str, Line, Exception)
        elif index < len(self._script):
            step = self._script[index]
        else:
            step = ServiceRefused(
                f"call {index + 1} came to a script of {len(self._script)}: write a reply for it"
            )
        return Line(step) if isinstance(step, str) else step

    async def _wait(self, steps: Sequence[Line | Exception]) -> None:
        own = [step.seconds if isinstance(step, Line) else None for step in steps]
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await anyio.sleep(max(self._seconds if s is None else s for s in own))
        finally:
            self.under_way -= 1

    def _sampled(self, line: Line, params: SampleParams) -> SampledTokens:
        ids, stop = self._cut(self._spelt(line), params)
        logprobs = [-(1 + i % 8) / 8 for i in ids] if line.logprobs is None else line.logprobs
        version = self.policy_version if line.policy_version is None else line.policy_version
        return SampledTokens(ids_of(ids), logprobs_of(logprobs[: len(ids)]), stop, version)

    def _spelt(self, line: Line) -> list[int]:
        if line.ids is not None:
            return list(line.ids)
        return [*self.tokenizer.encode(line.text), self.tokenizer.end_id]

    def _cut(
        self, ids: list[int], params: SampleParams
    ) -> tuple[list[int], Literal["stop", "length"]]:
        """The ids up to what ends them first."""
        for count, token in enumerate(ids[: params.max_tokens], start=1):
            if token in params.stop_token_ids:
                return ids[:count], "stop"
            if params.stop and any(s in self.tokenizer.decode(ids[:count]) for s in params.stop):
                return ids[:count], "stop"
        return ids[: params.max_tokens], "length"


@dataclass(frozen=True, slots=True, eq=False)
class TrainedBatch:
    """One batch that a trainer was sent."""

    batch: tuple[Datum, ...]
    loss: LossSpec
    adam: AdamParams
    key: str


class RecordingTrainer:
    """Keeps what it is sent and learns nothing; implements `services.base.Trainer`.

    Its logprobs are the sampler's own, so that a batch looks perfectly on-policy.

    Args:
        sampler: whose version is raised by each `publish`.
        failures: what the train call of a number, from 0, raises in place of training.
        seconds: how long each call takes.
    """

    def __init__(
        self,
        sampler: ScriptedSampler | None = None,
        *,
        failures: Mapping[int, Exception] | None = None,
        seconds: float = 0.0,
    ) -> None:
        self.batches: list[TrainedBatch] = []
        """Each batch that was applied, in order."""
        self.published: list[int] = []
        """Each version that was published, in order."""
        self.scored: list[str] = []
        """The key of each batch that was scored, in order."""
        require_seconds("RecordingTrainer()", seconds)
        self._sampler = sampler
        self._failures = failures or {}
        self._seconds = seconds
        self._calls = 0
        self._version = 0 if sampler is None else sampler.policy_version
        self._results: dict[str, StepResult] = {}
        self._versions: dict[str, int] = {}

    async def train(
        self, batch: Sequence[Datum], loss: LossSpec, adam: AdamParams, *, key: str
    ) -> StepResult:
        """Keep a batch; a key that was sent before is answered as it was then.

        Raises:
            Exception: what the script has for this call.
        """
        self._calls += 1
        await anyio.sleep(self._seconds)
        if failure := self._failures.get(self._calls - 1):
            raise failure
        if key not in self._results:
            self.batches.append(TrainedBatch(tuple(batch), loss, adam, key))
            self._results[key] = _on_policy(batch, adam)
        return self._results[key]

    async def score(self, batch: Sequence[Datum], *, key: str) -> tuple[Logprobs, ...]:
        """Every target has the same logprob, which rises with each batch that was applied."""
        await anyio.sleep(self._seconds)
        self.scored.append(key)
        value = -1.0 / (1 + len(self.batches))
        return tuple(np.full(len(d.input_ids), value, np.float32) for d in batch)

    async def publish(self, *, key: str) -> int:
        """The next version, or the one that this key already gave."""
        await anyio.sleep(self._seconds)
        if key not in self._versions:
            self._version += 1
            self._versions[key] = self._version
            self.published.append(self._version)
            if self._sampler is not None:
                self._sampler.policy_version = self._version
        return self._versions[key]


class ScriptedService:
    """A scripted sampler and the trainer that publishes to it; implements `services.base.Service`.

    Calling it opens it, so it serves as a `ServiceFactory` too.
    """

    temperature_in_loss = False

    def __init__(
        self, script: Script | ScriptedSampler, trainer: RecordingTrainer | None = None
    ) -> None:
        self.sampler = script if isinstance(script, ScriptedSampler) else ScriptedSampler(script)
        self.trainer = trainer or RecordingTrainer(self.sampler)
        self.is_open = False

    @property
    def description(self) -> Mapping[str, str | int]:
        """What run.json records of it."""
        return {"service": "scripted"}

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator["ScriptedService"]:
        """Open it for the length of a `with` block."""
        self.is_open = True
        try:
            yield self
        finally:
            self.is_open = False


def _on_policy(batch: Sequence[Datum], adam: AdamParams) -> StepResult:
    streams = [d.advantages if d.weights is None else d.weights for d in batch]
    moving = [stream for stream in streams if stream is not None]
    return StepResult(
        loss=-float(np.concatenate(moving).sum(dtype=np.float64)) if moving else 0.0,
        logprobs=tuple(
            np.zeros(len(d.input_ids), np.float32) if d.logprobs is None else d.logprobs
            for d in batch
        ),
        metrics={"grad_norm": 1.0, "learning_rate": adam.learning_rate},
    )
