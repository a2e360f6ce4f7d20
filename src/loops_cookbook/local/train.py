"""Gradients of the losses, and the optimizer step that applies them.

Gradients add up over calls, as raw sums over positions, until `optim_step` applies and clears
them. Those of cross_entropy are divided by their summed weights there, so that it doesn't matter
how rows were spread over calls, unless the request asks for raw sums; policy losses are raw
sums. Both kinds never meet in one step. A pass that fails leaves no gradients behind, its own or
older: a step is never taken on part of what was sent.

Rows are packed (`loops_cookbook.local.pack`) where `loops_cookbook.local.probe` finds that the
model allows it, else padded; how large micro-batches are and which keep their activations is
`loops_cookbook.local.budget`'s. None of it changes a result by more than rounding.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from loops_cookbook.learning.losses import LOSSES, clipped, masked
from loops_cookbook.local.budget import budget
from loops_cookbook.local.errors import BadRequest, NotFinite
from loops_cookbook.local.losses import POLICY_LOSSES, Options, cross_entropy
from loops_cookbook.local.model import Policy
from loops_cookbook.local.pack import pack
from loops_cookbook.local.pad import Flat, MicroBatch, flatten, micro_batches, split
from loops_cookbook.local.probe import Packing, probe
from loops_cookbook.local.requests import IGNORED_TARGET, AdamW, LossOutput, Row
from loops_cookbook.local.score import score

logger = logging.getLogger(__name__)


MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter."""


class Trainer:
    """Accumulates gradients of a policy's trainable tensors and steps on them.

    It begins without gradients, with a fresh optimizer; one lives as long as the policy isn't
    reset.

    Args:
        policy: reset, so that it has something to train.
        memory_bytes: what a micro-batch may take; None: what the device can lend.
        packing: whether rows may be packed; None: the policy is probed.
    """

    def __init__(
        self, policy: Policy, *, memory_bytes: int | None = None, packing: Packing | None = None
    ) -> None:
        self._policy = policy
        self._budget = budget(policy, lent_bytes=memory_bytes)
        self._packing = packing or probe(policy)
        logger.info("packed training: %s", self._packing)
        logger.info("activations: %s", self._budget)
        self._optimizer = torch.optim.AdamW(
            policy.trainable, lr=0.0, fused=policy.device.type in ("cpu", "cuda")
        )
        self._pending: Literal["raw", "normalised"] | None = None
        self._weight = 0.0

    def forward(self, rows: Sequence[Row], loss: str, options: Options) -> LossOutput:
        """Compute the loss and logprobs; gradients stay as they are.

        cross_entropy scores every target here, those of weight 0 too.

        Raises:
            NotFinite: the loss is not finite.
        """
        with torch.no_grad():
            return self._run(rows, loss, options, backward=False)

    def forward_backward(self, rows: Sequence[Row], loss: str, options: Options) -> LossOutput:
        """Compute the loss and logprobs, and add the gradients.

        Raises:
            BadRequest: gradients of the other kind were waiting for a step; they are dropped.
            NotFinite: the loss is not finite; all gradients are dropped.
        """
        is_raw = LOSSES[loss].kind == "policy" or _is_raw_supervised(options)
        kind = "raw" if is_raw else "normalised"
        if self._pending not in (None, kind):
            waiting = self._pending
            # A step that was already sent must not be taken on the half that came before.
            self.clear()
            raise BadRequest(
                f"{loss} would add {kind} gradients to {waiting} ones, and these are dropped: call "
                "optim_step first, or give every cross_entropy request the same "
                "skip_token_normalization"
            )
        self._pending = kind
        is_whole = False
        try:
            output = self._run(rows, loss, options, backward=True)
            is_whole = True
        finally:
            # Gradients of a part of the rows must not stay, whatever cut it short.
            if not is_whole:
                self.clear()
        return output

    def optim_step(self, settings: AdamW) -> dict[str, float]:
        """Apply the gradients and clear them.

        Returns:
            `grad_norm` before clipping and after normalisation, `grad_clipped` (1.0 or 0.0),
            `learning_rate`.

        Raises:
            BadRequest: there are no gradients.
            NotFinite: they are not finite; they are dropped and the weights are as before.
        """
        if self._pending is None:
            raise BadRequest("optim_step without gradients: call forward_backward before it")
        scale = 1.0 / self._weight if self._pending == "normalised" and self._weight > 0 else 1.0
        for parameter in self._policy.trainable:
            if parameter.grad is None:
                # Nothing was scored: the step is that of a zero gradient, momentum included.
                parameter.grad = torch.zeros_like(parameter)
            elif scale != 1.0:
                parameter.grad.mul_(scale)
        limit = settings.grad_clip_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self._policy.trainable, limit))
        if not math.isfinite(norm):
            self.clear()
            raise NotFinite(
                f"the gradient's norm is {norm}: this step was not taken, its gradients were "
                "dropped and the weights are as before"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate
            group["betas"] = (settings.beta1, settings.beta2)
            group["eps"] = settings.eps
            group["weight_decay"] = settings.weight_decay
        self._optimizer.step()
        self.clear()
        return {
            "grad_norm": norm,
            "grad_clipped": float(norm > limit),
            "learning_rate": settings.learning_rate,
        }

    def description(self) -> dict[str, str]:
        """What a run's record says of how rows are computed."""
        return {"packed_training": str(self._packing), "activations": str(self._budget)}

    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizer's state: `<field>.<name of the parameter>`; empty before the first step."""
        return {
            f"{key}.{name}": value
            for name, parameter in self._policy.named()
            for key, value in self._optimizer.state.get(parameter, {}).items()
        }

    def restore(self, moments: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `moments` gave; gradients are dropped.

        Raises:
            BadRequest: they are of other parameters; nothing is changed.
        """
        named = self._policy.named()
        state: dict[int, dict[str, torch.Tensor]] = {}
        for index, (name, parameter) in enumerate(named):
            held = {key: moments[f"{key}.{name}"] for key in MOMENTS if f"{key}.{name}" in moments}
            is_whole = len(held) == len(MOMENTS) and held["exp_avg"].shape == parameter.shape
            if held and not is_whole:
                raise BadRequest(f"the optimizer's state of {name} is of another shape")
            if held:
                state[index] = held
        if len(moments) != len(MOMENTS) * len(state):
            raise BadRequest("the optimizer's state is of other parameters than these")
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        self.clear()

    def clear(self) -> None:
        """Drop all gradients."""
        self._optimizer.zero_grad(set_to_none=True)
        self._pending = None
        self._weight = 0.0

    def _run(
        self, rows: Sequence[Row], loss: str, options: Options, *, backward: bool
    ) -> LossOutput:
        is_supervised = LOSSES[loss].kind == "supervised"
        metrics = {"skip_token_normalization": 1.0} if _is_raw_supervised(options) else {}
        if not rows:
            return LossOutput(0.0, [], metrics)
        every_target = is_supervised and not backward
        flat = flatten(rows, is_supervised=is_supervised, every_target=every_target)
        temperature = options.get("temperature", 1.0)
        unscored = np.float32(np.nan if is_supervised else 0.0)
        logprobs_TK = np.full(flat.targets_TK.shape, unscored)
        total = 0.0
        for batch in self._micro_batches(flat):
            is_recomputed = backward and self._budget.recomputes(batch)
            with self._policy.recomputing() if is_recomputed else nullcontext():
                logprobs = score(self._policy, batch, flat, temperature=temperature)
            summed = self._losses(batch, flat, logprobs, loss, options).sum()
            if backward:
                summed.backward()
            total += summed.item()
            logprobs_TK[batch.places] = logprobs.detach().cpu().numpy()
        if not math.isfinite(total):
            raise NotFinite(
                f"{loss} came to {total} over {len(rows)} datums: the weights have run away, or "
                "the datums' logprobs are not this model's; look at both before training on"
            )
        if is_supervised:
            logprobs_TK[flat.targets_TK == IGNORED_TARGET] = np.nan
            self._weight += float(flat.factors_TK.sum(dtype=np.float64)) if backward else 0.0
        else:
            metrics |= _ratio_metrics(flat, logprobs_TK, loss, options)
        return LossOutput(total / len(rows), split(logprobs_TK, rows), metrics)

    def _micro_batches(self, flat: Flat) -> Iterable[MicroBatch]:
        bounds = self._budget.bounds
        if not self._packing.is_on:
            return micro_batches(flat, max_tokens=bounds.max_tokens, max_scored=bounds.max_scored)
        plans = [list(pack(flat, choice)) for choice in self._budget.choices]
        return min(plans, key=self._budget.cost)

    def _losses(
        self, batch: MicroBatch, flat: Flat, logprobs: torch.Tensor, loss: str, options: Options
    ) -> torch.Tensor:
        """float32[M, K]"""
        factors = self._tensor(flat.factors_TK[batch.places])
        if flat.sampler_logprobs_TK is None:
            return cross_entropy(logprobs, factors)
        sampler_logprobs = self._tensor(flat.sampler_logprobs_TK[batch.places])
        return POLICY_LOSSES[loss](logprobs, sampler_logprobs, factors, options)

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._policy.device)


def _is_raw_supervised(options: Options) -> bool:
    return bool(options.get("skip_token_normalization", False))


def _ratio_metrics(
    flat: Flat, logprobs_TK: npt.NDArray[np.float32], loss: str, options: Options
) -> dict[str, float]:
    """`ratio_mean`, and `clip_fraction` where the loss clips or masks; none for nothing scored."""
    is_scored = flat.is_scored_T
    if flat.sampler_logprobs_TK is None or not is_scored.any():
        return {}
    logprobs, factors = logprobs_TK[is_scored].astype(np.float64), flat.factors_TK[is_scored]
    sampler_logprobs = flat.sampler_logprobs_TK[is_scored]
    # A metric must be finite even where a clipped loss bears a ratio that is not.
    ratio = np.exp((logprobs - sampler_logprobs).clip(max=700))
    metrics = {"ratio_mean": float(ratio.mean())}
    if "clip_low_threshold" in options:
        low, high = options["clip_low_threshold"], options["clip_high_threshold"]
        metrics["clip_fraction"] = float(clipped(loss, ratio, factors, low, high).mean())
    elif "dppo_mask_low" in options:
        low, high = options["dppo_mask_low"], options["dppo_mask_high"]
        is_masked = masked(logprobs, sampler_logprobs, factors, high, low)
        metrics["clip_fraction"] = float(is_masked.mean())
    return metrics
