"""The embedded engine: one model, both trained and sampled, in one thread.

It trains the live weights and samples the published ones, which are the same until a step is
applied and again once it is published. Calls run to their end, one at a time. `check_rows`,
`check_job` and the plain attributes touch nothing that changes, so another thread may use them
while a call runs. Which requests wait for which, and how they arrive, is not known here.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from loops_cookbook.errors import ModelError
from loops_cookbook.local.errors import BadRequest, NotFinite
from loops_cookbook.local.generate import Sampler
from loops_cookbook.local.model import DTYPES, copies, load_policy
from loops_cookbook.local.requests import (
    Completion,
    Limits,
    LossOutput,
    Row,
    SampleJob,
    check_job,
    check_rows,
)
from loops_cookbook.local.text import load_decode
from loops_cookbook.local.train import AdamW, Trainer

__all__ = [
    "BadRequest",
    "Completion",
    "Engine",
    "EngineSettings",
    "LossOutput",
    "NotFinite",
    "Row",
    "SampleJob",
]

ONE_THREAD_BELOW = 5_000_000
"""Parameters below which one thread is fastest: more of them spend their time meeting."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is made of."""

    model_dir: Path
    """Holds config.json, safetensors weights and a tokenizer."""
    model_name: str
    """What requests call it."""
    max_seq_len: int
    """The window: tokens of a row, and of a prompt with its completion."""
    lora_rank: int
    """0 trains every weight."""
    lora_alpha: float
    seed: int
    """Of fresh adapters, and of sampling where a job brings no seed."""
    device: str | None = None
    """As torch names it; None: cuda where there is one, else cpu."""
    dtype: str | None = None
    """float32, bfloat16 or float16; None: bfloat16 for an adapter on cuda, else float32. The
    tensors of an adapter are float32 always. Rank 0 needs float32, also in `init_trainer`."""
    threads: int | None = None
    """None: 1 for a model of fewer than 5 million parameters, else one for each processor."""


class Engine:
    """Trains and samples one model.

    Raises:
        ModelError: the model cannot be loaded, or not as the settings ask.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        device, dtype = _device(settings), _dtype(settings)
        if settings.threads is not None and settings.threads < 1:
            raise ModelError(f"threads is {settings.threads}: give 1 or more, or leave it out")
        self._policy = load_policy(
            settings.model_dir, device=device, dtype=dtype, max_seq_len=settings.max_seq_len
        )
        small = self._policy.parameters < ONE_THREAD_BELOW
        torch.set_num_threads(settings.threads or (1 if small else os.cpu_count() or 1))
        self._limits = Limits(self._policy.vocab_size, settings.max_seq_len)
        self._sampler = Sampler(
            self._policy,
            load_decode(settings.model_dir),
            max_seq_len=settings.max_seq_len,
            seed=settings.seed,
        )
        self.model_name = settings.model_name
        self.max_seq_len = settings.max_seq_len
        self.init_trainer(settings.lora_rank)

    def init_trainer(self, lora_rank: int) -> None:
        """Begin again from the loaded weights: step 0, no gradients, version 0.

        Args:
            lora_rank: of a fresh adapter; 0 trains every weight.
        """
        if lora_rank < 0:
            raise BadRequest(f"lora_rank is {lora_rank}: give 0 (every weight) or more")
        self._policy.reset(
            lora_rank, lora_alpha=self._settings.lora_alpha, seed=self._settings.seed
        )
        self._trainer = Trainer(self._policy)
        self._published: list[torch.Tensor] | None = None
        self.lora_rank = lora_rank
        self.step = 0
        """Optimizer steps applied."""
        self.policy_version = 0
        """The step that was last published."""

    def check_rows(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
    ) -> None:
        """Refuse rows that `forward` and `forward_backward` would refuse; computes nothing.

        Raises:
            BadRequest: with one line that says why.
        """
        check_rows(rows, loss, config, self._limits)

    def check_job(self, job: SampleJob) -> None:
        """Refuse a job that `sample` would refuse; computes nothing.

        Raises:
            BadRequest: with one line that says why.
        """
        check_job(job, self._limits)

    def forward(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
    ) -> LossOutput:
        """The loss and logprobs of rows; gradients stay as they are.

        Args:
            rows: may be none.
            loss: a name of `loops_cookbook.learning.losses.LOSSES`.
            config: its options; None: the defaults.
        """
        return self._trainer.forward(rows, loss, check_rows(rows, loss, config, self._limits))

    def forward_backward(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
    ) -> LossOutput:
        """The loss and logprobs of rows, whose gradients are added to those that wait.

        Raises:
            BadRequest: the rows are refused, or gradients of another kind wait.
            NotFinite: the loss is not finite; all gradients are dropped.
        """
        options = check_rows(rows, loss, config, self._limits)
        return self._trainer.forward_backward(rows, loss, options)

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
        """Apply the gradients that wait, clear them, and count the step.

        Returns:
            `grad_norm` before clipping, `grad_clipped` (1.0 or 0.0), `learning_rate`.

        Raises:
            BadRequest: no gradients wait, or a setting is out of its range.
            NotFinite: the gradients are not finite; they are dropped, the weights are as before.
        """
        settings = AdamW(learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm)
        before = copies(self._policy.trainable) if self.step == self.policy_version else None
        metrics = self._trainer.optim_step(settings)
        self._published = before or self._published
        self.step += 1
        return metrics

    def publish(self) -> int:
        """Let `sample` serve the live weights from now on; their version, which is the step."""
        self._published = None
        self.policy_version = self.step
        return self.policy_version

    def sample(self, jobs: Sequence[SampleJob]) -> list[list[Completion]]:
        """Every job's completions, in the jobs' order, decoded as one merged batch where they fit.

        Raises:
            BadRequest: a job is refused; nothing is sampled.
            NotFinite: the weights hold numbers that are not finite.
        """
        for job in jobs:
            check_job(job, self._limits)
        answers: dict[int, list[Completion]] = {}
        for weights, context in (("live", self._serving()), ("base", self._policy.untrained())):
            places = [place for place, job in enumerate(jobs) if job.weights == weights]
            if places:
                with context:
                    sampled = self._sampler.sample([jobs[place] for place in places])
                answers.update(zip(places, sampled, strict=True))
        return [answers[place] for place in range(len(jobs))]

    def description(self) -> dict[str, str | int | float]:
        """What a run's record says of the engine."""
        return {
            "device": str(self._policy.device),
            "dtype": str(self._policy.dtype).removeprefix("torch."),
            "parameters": self._policy.parameters,
            "trainable": sum(parameter.numel() for parameter in self._policy.trainable),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            **self._trainer.description(),
        }

    def _serving(self) -> AbstractContextManager[None]:
        """The published weights, for a `with` block."""
        if self._published is None:
            return nullcontext()
        return self._policy.holding(self._published)


def _device(settings: EngineSettings) -> torch.device:
    try:
        return torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ModelError(
            f"unknown device {settings.device!r}: use cpu, cuda, cuda:1 or another torch knows"
        ) from error


def _dtype(settings: EngineSettings) -> torch.dtype:
    if settings.dtype is None:
        is_half = _device(settings).type == "cuda" and settings.lora_rank > 0
        return torch.bfloat16 if is_half else torch.float32
    if settings.dtype not in DTYPES:
        raise ModelError(f"unknown dtype {settings.dtype!r}: use one of {', '.join(DTYPES)}")
    return DTYPES[settings.dtype]
