"""The trainer's losses: their names, their options, and what each computes, in numpy.

A loss is a sum over positions. At each position `logprob` is the trainer's log-probability of
the target and is what the gradient is taken of; the rest is data. A supervised loss carries a
weight for each position. A policy loss carries the sampler's log-probability and an advantage;
ratio = exp(logprob - sampler's), and a position whose advantage is 0 adds nothing: that is how
the wire tells what isn't trained, so losses that pull the policy back to the sampler (dro, dppo)
don't pull there either.

`LOSSES` is the one table that a config and a trainer are checked against. The functions are the
reference that a fast implementation must equal, values and gradients. They work in float64.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.floating]
"""float[...], one number for each position."""

EMBEDDED_OPTIONS: Mapping[str, float | bool] = MappingProxyType({"temperature": 1.0})
"""Options that the embedded trainer takes with every policy loss, and no other trainer does.

`temperature`: what the sampler divided its logits by. The trainer divides by it too, so that the
ratio on policy is 1.
"""

_CLIPS: Mapping[str, float | bool] = MappingProxyType(
    {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
)


@dataclass(frozen=True, slots=True)
class Loss:
    """One loss as the wire names it."""

    name: str
    kind: Literal["supervised", "policy"]
    """`supervised`: carries weights. `policy`: carries sampler logprobs and advantages."""
    options: Mapping[str, float | bool] = field(default_factory=dict[str, float | bool])
    """Every option's name and default."""


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            Loss("cross_entropy", "supervised", {"skip_token_normalization": False}),
            Loss("importance_sampling", "policy"),
            Loss("ppo", "policy", _CLIPS),
            Loss("cispo", "policy", _CLIPS),
            Loss("dro", "policy", {"beta": 0.05}),
            Loss(
                "dppo",
                "policy",
                {"dppo_mask_high": 0.2, "dppo_mask_low": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
            ),
        )
    }
)
"""Every loss that can be asked for, by its name on the wire."""

PULLING_LOSSES = ("dro", "dppo")
"""Losses with a term that no advantage scales: dividing advantages would change what they weigh
against it, and so what is learnt, not only how fast."""

_NOT_NEGATIVE = ("beta", "dppo_mask_high", "dppo_mask_low", "adv_tau", "kl_tau")


def find_loss(name: str) -> Loss:
    """The loss of that name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}: use one of {', '.join(LOSSES)}")
    return LOSSES[name]


def resolve_options(
    name: str, given: Mapping[str, object] | None, *, embedded: bool = False
) -> dict[str, float | bool]:
    """All options of a loss: those given, checked, and the defaults of the rest.

    Args:
        name: the loss.
        given: options by name, as a config or a request holds them.
        embedded: take `EMBEDDED_OPTIONS` too, with a policy loss.

    Raises:
        ValueError: an unknown loss or option, or a value that the option cannot have.
    """
    loss = find_loss(name)
    known = dict(loss.options)
    if embedded and loss.kind == "policy":
        known |= EMBEDDED_OPTIONS
    resolved = dict(known)
    for option, value in (given or {}).items():
        if option not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"unknown option {option!r} of loss {name!r}: {takes}")
        resolved[option] = _checked(name, option, value, default=known[option])
    low, high = resolved.get("clip_low_threshold", 0.0), resolved.get("clip_high_threshold", np.inf)
    if not 0.0 <= low <= high:
        raise ValueError(
            f"loss {name!r} has clip_low_threshold {low!r} and clip_high_threshold {high!r}: they "
            "bound the ratio itself, so give 0 <= low <= high, such as 0.8 and 1.2"
        )
    if resolved.get("temperature", 1.0) <= 0.0:
        raise ValueError(
            f"loss {name!r} has temperature {resolved['temperature']!r}: give the sampler's, above "
            "0 (greedy completions are not trained)"
        )
    for option in _NOT_NEGATIVE:
        if resolved.get(option, 0.0) < 0.0:
            raise ValueError(
                f"option {option!r} of loss {name!r} is {resolved[option]!r}: give 0 or more"
            )
    return resolved


def _checked(name: str, option: str, value: object, *, default: float | bool) -> float | bool:
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise ValueError(f"option {option!r} of loss {name!r} is {value!r}: give true or false")
    if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value):
        return float(value)
    raise ValueError(f"option {option!r} of loss {name!r} is {value!r}: give a finite number")


@dataclass(frozen=True, slots=True, eq=False)
class LossValue:
    """A loss and its gradient."""

    total: float
    """The sum over all positions."""
    gradient: npt.NDArray[np.float64]
    """float64[...], the derivative of `total` by each logprob."""


def cross_entropy(logprobs: FloatArray, weights: FloatArray) -> LossValue:
    """-sum(weight * logprob).

    Source: the negative log-likelihood; weights as in the Loops protocol.
    """
    logprobs, weights = _float64(logprobs), _float64(weights)
    return LossValue(float(-(weights * logprobs).sum()), -weights)


def importance_sampling(
    logprobs: FloatArray, sampler_logprobs: FloatArray, advantages: FloatArray
) -> LossValue:
    """-sum(ratio * advantage).

    Source: the policy gradient of REINFORCE, Williams 1992, with importance weights; the
    surrogate L^CPI of Schulman et al. 2017 (arXiv:1707.06347), equation 6.
    """
    advantages = _float64(advantages)
    ratio = _ratio(logprobs, sampler_logprobs)
    return LossValue(float(-(ratio * advantages).sum()), -ratio * advantages)


def ppo(
    logprobs: FloatArray,
    sampler_logprobs: FloatArray,
    advantages: FloatArray,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> LossValue:
    """-sum(min(ratio * advantage, clip(ratio) * advantage)); no gradient where clipping wins.

    Source: Schulman et al. 2017 (arXiv:1707.06347), equation 7, with the two bounds given as
    ratios instead of one epsilon.
    """
    advantages = _float64(advantages)
    ratio = _ratio(logprobs, sampler_logprobs)
    bounded = ratio.clip(clip_low_threshold, clip_high_threshold)
    total = -np.minimum(ratio * advantages, bounded * advantages).sum()
    is_clipped = clipped("ppo", ratio, advantages, clip_low_threshold, clip_high_threshold)
    return LossValue(float(total), np.where(is_clipped, 0.0, -ratio * advantages))


def cispo(
    logprobs: FloatArray,
    sampler_logprobs: FloatArray,
    advantages: FloatArray,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> LossValue:
    """-sum(clip(ratio) * advantage * logprob), the clipped ratio held constant.

    Every position keeps a gradient, also where its ratio is clipped.

    Source: MiniMax-M1, 2025 (arXiv:2506.13585), equations 4 and 5, summed instead of averaged.
    """
    logprobs, advantages = _float64(logprobs), _float64(advantages)
    ratio = _ratio(logprobs, sampler_logprobs)
    factor = ratio.clip(clip_low_threshold, clip_high_threshold) * advantages
    return LossValue(float(-(factor * logprobs).sum()), -factor)


def dro(
    logprobs: FloatArray,
    sampler_logprobs: FloatArray,
    advantages: FloatArray,
    *,
    beta: float = 0.05,
) -> LossValue:
    """-sum(advantage * logprob - beta / 2 * (logprob - sampler's)^2).

    The ratio weighs nothing here, so it is meant for data of an older policy.

    Source: the policy's part of DRO, Richemond et al. 2024 (arXiv:2405.19107), at each token, with
    the sampler as the reference; scaled as in the Loops protocol.
    """
    logprobs, advantages = _float64(logprobs), _float64(advantages)
    moved = logprobs - _float64(sampler_logprobs)
    gained = advantages * logprobs - beta / 2 * moved**2
    is_trained = advantages != 0
    return LossValue(
        float(-gained[is_trained].sum()), np.where(is_trained, beta * moved - advantages, 0.0)
    )


def dppo(
    logprobs: FloatArray,
    sampler_logprobs: FloatArray,
    advantages: FloatArray,
    *,
    dppo_mask_high: float = 0.2,
    dppo_mask_low: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> LossValue:
    """-sum(kept * adv_tau * advantage * ratio - kl_tau * (logprob - sampler's)^2).

    Not kept is a token whose probability (not its ratio) rose by more than `dppo_mask_high` with an
    advantage above 0, or fell by more than `dppo_mask_low` with one below. The pull back to the
    sampler holds for every token.

    Source: the mask is DPPO's for binary total variation, 2026 (arXiv:2602.04879); its sum with a
    squared log-ratio is the default loss of prime-rl, whose names and defaults these are.
    """
    logprobs, advantages = _float64(logprobs), _float64(advantages)
    moved = logprobs - _float64(sampler_logprobs)
    is_masked = masked(logprobs, sampler_logprobs, advantages, dppo_mask_high, dppo_mask_low)
    gained = np.where(is_masked, 0.0, adv_tau * advantages * np.exp(moved))
    pulled = np.where(advantages != 0, kl_tau * moved, 0.0)
    return LossValue(float((pulled * moved - gained).sum()), 2 * pulled - gained)


def masked(
    logprobs: FloatArray,
    sampler_logprobs: FloatArray,
    advantages: FloatArray,
    high: float,
    low: float,
) -> npt.NDArray[np.bool_]:
    """Where dppo drops the advantage: bool[...]."""
    rise = np.exp(_float64(logprobs)) - np.exp(_float64(sampler_logprobs))
    return ((rise > high) & (advantages > 0)) | ((rise < -low) & (advantages < 0))


def clipped(
    name: str, ratio: FloatArray, advantages: FloatArray, low: float, high: float
) -> npt.NDArray[np.bool_]:
    """Where clipping changes the gradient: bool[...].

    In cispo wherever the ratio is out of bounds. In ppo only where the advantage would drive it
    further out, since the minimum takes the other branch elsewhere.
    """
    above, below = ratio > high, ratio < low
    if name == "ppo":
        return (above & (advantages > 0)) | (below & (advantages < 0))
    return above | below


def _ratio(logprobs: FloatArray, sampler_logprobs: FloatArray) -> npt.NDArray[np.float64]:
    return np.exp(_float64(logprobs) - _float64(sampler_logprobs))


def _float64(values: FloatArray) -> npt.NDArray[np.float64]:
    return np.asarray(values, np.float64)
