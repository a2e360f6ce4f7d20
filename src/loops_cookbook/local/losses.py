"""Each loss of `loops_cookbook.learning.losses`, in torch, one value for each scored position.

The trainer sums what these return and differentiates it. Values and gradients equal the numpy
reference, where each formula and its source are written down. Sampler logprobs, advantages and
weights are constants.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch

Options: TypeAlias = Mapping[str, float | bool]
PolicyLoss: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Options], torch.Tensor]
"""(logprobs, sampler logprobs, advantages, options) -> losses, all float32[M]."""


def cross_entropy(logprobs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """-weight * logprob, float32[...]."""
    return -(weights * logprobs)


def importance_sampling(
    logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, advantages: torch.Tensor, _: Options
) -> torch.Tensor:
    """-ratio * advantage."""
    return -(logprobs - sampler_logprobs).exp() * advantages


def ppo(
    logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """-min(ratio * advantage, clip(ratio) * advantage)."""
    ratio = (logprobs - sampler_logprobs).exp()
    return -torch.minimum(ratio * advantages, _clip(ratio, options) * advantages)


def cispo(
    logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """-clip(ratio) * advantage * logprob, the clipped ratio held constant."""
    ratio = (logprobs.detach() - sampler_logprobs).exp()
    return -_clip(ratio, options) * advantages * logprobs


def dro(
    logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """-(advantage * logprob - beta / 2 * (logprob - sampler's)^2); 0 where the advantage is."""
    pull = options["beta"] / 2 * (logprobs - sampler_logprobs).square()
    return pull * (advantages != 0) - advantages * logprobs


def dppo(
    logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    options: Options,
) -> torch.Tensor:
    """-(kept * adv_tau * advantage * ratio - kl_tau * (logprob - sampler's)^2), or 0 likewise."""
    moved = logprobs - sampler_logprobs
    rise = logprobs.detach().exp() - sampler_logprobs.exp()
    is_masked = ((rise > options["dppo_mask_high"]) & (advantages > 0)) | (
        (rise < -options["dppo_mask_low"]) & (advantages < 0)
    )
    kept = (options["adv_tau"] * advantages).masked_fill(is_masked, 0.0)
    # The ratio of a token that rose from nothing may be infinite, and 0 times that no number.
    ratio = moved.masked_fill(is_masked, 0.0).exp()
    pull = options["kl_tau"] * moved.square()
    return pull * (advantages != 0) - kept * ratio


def _clip(ratio: torch.Tensor, options: Options) -> torch.Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {
        "importance_sampling": importance_sampling,
        "ppo": ppo,
        "cispo": cispo,
        "dro": dro,
        "dppo": dppo,
    }
)
"""Every policy loss by its name on the wire."""
