"""The embedded engine: one model, both trained and sampled, in one thread.

It trains the live weights and samples the published ones, which are the same until a step is
applied and again once it is published. Calls run to their end, one at a time. `check_rows`,
`check_job` and the plain attributes touch nothing that changes, so another thread may use them
while a call runs. Which requests wait for which, and how they arrive, is not known here.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import transformers

from loops_cookbook.errors import ModelError
from loops_cookbook.local.checkpoints import put_trained, read_moments, read_trained, save
from loops_cookbook.local.errors import BadRequest, NotFinite
from loops_cookbook.local.model import DTYPES, copies, load_policy
from loops_cookbook.local.places import Place, State, read_state
from loops_cookbook.local.probe import probe
from loops_cookbook.local.requests import (
    AdamW,
    Completion,
    Limits,
    LossOutput,
    Row,
    SampleJob,
    Weights,
    check_job,
    check_rows,
)
from loops_cookbook.local.sampling.sampler import Sampler
from loops_cookbook.local.sampling.tickets import Outcome, Ticket
from loops_cookbook.local.serving import Serving
from loops_cookbook.local.text import load_decode
from loops_cookbook.local.train import Trainer
from loops_cookbook.services.command import STAGES

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

stages = logging.getLogger(STAGES)

LEAST_BOUND_OF_RANK = 256
"""An adapter may have a rank as large as the model is wide; on a narrow model, up to this."""
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
    """Of fresh adapters and random weights, and of sampling where a job brings no seed."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random`: new weights in the shape of config.json; the folder needs none."""
    device: str | None = None
    """As torch names it; None: cuda where there is one, else cpu."""
    dtype: str | None = None
    """float32, bfloat16 or float16; None: bfloat16 for an adapter on cuda, else float32. The
    tensors of an adapter are float32 always. Rank 0 needs float32, also in `init_trainer`."""
    checkpoints: Path | None = None
    """Where checkpoints are kept, made when the first is; None: none can be saved or loaded."""
    threads: int | None = None
    """None: 1 for a model of fewer than 5 million parameters, else one for each processor."""
    deterministic: bool = False
    """Sample each job alone, so that what it comes to depends on nothing else to the last bit."""


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
            settings.model_dir,
            device=device,
            dtype=dtype,
            max_seq_len=settings.max_seq_len,
            random_seed=settings.seed if settings.init == "random" else None,
        )
        text = self._policy.module.config.get_text_config()
        self._most_rank = max(LEAST_BOUND_OF_RANK, int(text.hidden_size))
        if not 0 <= settings.lora_rank <= self._most_rank:
            raise ModelError(self._rank_fault(settings.lora_rank))
        small = self._policy.parameters < ONE_THREAD_BELOW
        torch.set_num_threads(settings.threads or (1 if small else os.cpu_count() or 1))
        self._serving = Serving(self._policy, settings.checkpoints)
        stages.info("trying out what the model allows")
        self._sampler = Sampler(
            self._policy,
            load_decode(settings.model_dir),
            max_seq_len=settings.max_seq_len,
            seed=settings.seed,
            serving=self._serving.put,
            is_alone=settings.deterministic,
        )
        # On the loaded weights, which every run begins with.
        self._packing = probe(self._policy)
        self._limits = Limits(
            self._policy.vocab_size,
            settings.max_seq_len,
            most_tokens=self._sampler.room.most_tokens,
            most_scored=self._sampler.most_scored,
        )
        self.model_name = settings.model_name
        self.max_seq_len = settings.max_seq_len
        self.vocab_size = self._policy.vocab_size
        self._begin(settings.lora_rank)

    def init_trainer(self, lora_rank: int, *, seed: int | None = None) -> None:
        """Begin again from the loaded weights: step 0, no gradients, version 0.

        Args:
            lora_rank: of a fresh adapter; 0 trains every weight.
            seed: of the adapter; None: the engine's own.

        Raises:
            BadRequest: a rank that `check_rank` refuses.
            ModelError: the model can't be trained so; the run is one of the rank before.
        """
        self.check_rank(lora_rank)
        try:
            self._begin(lora_rank, seed=seed)
        except ModelError:
            self._begin(self.lora_rank)
            raise

    def _begin(self, lora_rank: int, *, seed: int | None = None) -> None:
        self._sampler.forget_all()
        self._policy.reset(
            lora_rank,
            lora_alpha=self._settings.lora_alpha,
            seed=self._settings.seed if seed is None else seed,
        )
        self._trainer = Trainer(self._policy, packing=self._packing)
        self._serving.begin()
        self.lora_rank = lora_rank
        self.step = 0
        """Optimizer steps applied."""
        self.policy_version = 0
        """The step that was last published."""

    def check_rank(self, lora_rank: int) -> None:
        """Refuse a rank that no adapter may have; computes nothing.

        Raises:
            BadRequest: with one line that says why.
        """
        if not 0 <= lora_rank <= self._most_rank:
            raise BadRequest(self._rank_fault(lora_rank))

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
        if before is not None:
            self._serving.hold(before)
        self.step += 1
        return metrics

    def publish(self) -> int:
        """Let `sample` serve the live weights from now on; their version, which is the step."""
        if self.policy_version != self.step:
            self._sampler.forget("live")
            self._serving.publish()
        self.policy_version = self.step
        return self.policy_version

    def check_place(self, place: Place) -> None:
        """Refuse checkpoints where there is no folder for them; computes nothing.

        Raises:
            BadRequest: this engine keeps none.
        """
        place.folder(self._serving.root)

    def save(self, place: Place) -> None:
        """Write what is trained now as a checkpoint; one for training has the optimizer too.

        Raises:
            BadRequest: this engine keeps none.
            OSError: it cannot be written.
        """
        state = State(
            base_model=self.model_name,
            step=self.step,
            lora_rank=self.lora_rank,
            saved_at=time.time(),
        )
        moments = self._trainer.moments() if place.kind == "weights" else None
        save(place.folder(self._serving.root), self._policy, state, optimizer=moments)

    def load(self, place: Place, *, with_optimizer: bool) -> int:
        """Train on from a checkpoint of this model and rank; the step that training is at now.

        Gradients are dropped. The loaded weights are served from now on, under that step as their
        version. Without the optimizer training begins at step 0, and version 0 is the loaded
        weights.

        Raises:
            BadRequest: there is none, or it does not fit; all is as before.
        """
        folder = place.folder(self._serving.root)
        state = read_state(folder)
        tensors = read_trained(folder, self._policy)
        moments = read_moments(folder, self._policy) if with_optimizer else {}
        self._trainer.restore(moments)
        self._sampler.forget_all()
        put_trained(self._policy, tensors)
        self._serving.start_here()
        self.step = self.policy_version = state.step if with_optimizer else 0
        return self.step

    def pin(self, place: Place) -> Weights:
        """A name for a checkpoint's weights as they are now, for jobs to be drawn from.

        Raises:
            BadRequest: there is none, or it is of another rank than what is trained here.
        """
        return self._serving.pin(place, self.lora_rank)

    def ask(self, job: SampleJob) -> Ticket:
        """Queue a job; `draw` tells its outcome by this ticket.

        It is drawn from the weights that are published now; none others may be published, and no
        run begun, before it has ended.

        Raises:
            BadRequest: the job is refused.
        """
        check_job(job, self._limits)
        self._serving.make_room(self._sampler.forget_idle)
        is_untouched = self.policy_version == 0
        weights = self._serving.named(job.weights, is_untouched=is_untouched)
        return self._sampler.add(replace(job, weights=weights))

    def draw(self) -> list[tuple[Ticket, Outcome]]:
        """Draw one more token for all jobs that fit, and tell what ended."""
        return self._sampler.step()

    @property
    def is_sampling(self) -> bool:
        """Whether jobs are waiting or under way."""
        return not self._sampler.is_idle

    def sample(self, jobs: Sequence[SampleJob]) -> list[list[Completion]]:
        """Every job's completions, in the jobs' order; nothing else may be under way.

        Raises:
            BadRequest: a job is refused; nothing is sampled.
            NotFinite: the weights hold numbers that are not finite.
        """
        for job in jobs:
            check_job(job, self._limits)
        return [sampled.completions for sampled in self._sampler.sample(jobs)]

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

    def _rank_fault(self, lora_rank: int) -> str:
        return (
            f"lora_rank is {lora_rank}: give 0 (every weight) to {self._most_rank}; an adapter of "
            "more is larger than the layers it is on"
        )


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
