from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loops_cookbook.learning.losses import (
    LOSSES,
    PULLING_LOSSES,
    cispo,
    clipped,
    cross_entropy,
    dppo,
    dro,
    find_loss,
    importance_sampling,
    masked,
    ppo,
    resolve_options,
)

Floats = npt.NDArray[np.float64]
LOW, HIGH = 0.8, 1.2


def numbers(low: float, high: float) -> st.SearchStrategy[Floats]:
    return arrays(np.float64, 4, elements=st.floats(low, high))


def slope(function: Callable[[Floats], float], at: Floats, step: float = 1e-6) -> Floats:
    """The gradient by central differences."""
    moves = np.eye(len(at)) * step
    return np.array([(function(at + m) - function(at - m)) / (2 * step) for m in moves])


def test_cross_entropy_weighs_each_position() -> None:
    value = cross_entropy(np.log([0.5, 0.25]), np.array([1.0, 2.0]))
    assert value.total == pytest.approx(np.log(2) + 2 * np.log(4))
    assert value.gradient.tolist() == [-1.0, -2.0]


def test_importance_sampling_is_the_advantage_on_policy() -> None:
    logprobs = np.log([0.5, 0.25])
    value = importance_sampling(logprobs, logprobs, np.array([1.0, -3.0]))
    assert value.total == pytest.approx(2.0)
    assert value.gradient == pytest.approx([-1.0, 3.0])


def test_ppo_takes_the_lower_branch_and_stops_the_gradient_there() -> None:
    ratio = np.array([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = np.array([1.0, -1.0, 1.0, -1.0, 2.0])
    value = ppo(np.log(ratio), np.zeros(5), advantages)
    assert value.total == pytest.approx(-(1.2 - 1.5 + 0.5 - 0.8 + 2.2))
    assert value.gradient == pytest.approx([0.0, 1.5, -0.5, 0.0, -2.2])


def test_cispo_bounds_the_factor_and_keeps_every_gradient() -> None:
    ratio = np.array([1.5, 0.5, 1.1])
    value = cispo(np.log(ratio), np.zeros(3), np.array([1.0, -1.0, 2.0]))
    assert value.total == pytest.approx(
        -(1.2 * np.log(1.5) - 0.8 * np.log(0.5) + 2.2 * np.log(1.1))
    )
    assert value.gradient == pytest.approx([-1.2, 0.8, -2.2])


def test_dro_is_the_weighted_log_likelihood_less_a_squared_distance() -> None:
    value = dro(np.array([-1.0, -1.0]), np.array([-1.0, -3.0]), np.array([2.0, -1.0]), beta=0.5)
    assert value.total == pytest.approx(2.0 - (1.0 - 0.25 * 4))
    assert value.gradient == pytest.approx([-2.0, 1.0 + 0.5 * 2])


def test_dppo_drops_tokens_whose_probability_moved_too_far_with_their_advantage() -> None:
    new, old = np.array([0.9, 0.9, 0.1, 0.1, 0.6]), np.array([0.5, 0.5, 0.5, 0.5, 0.5])
    advantages = np.array([1.0, -1.0, 1.0, -1.0, 2.0])
    value = dppo(np.log(new), np.log(old), advantages, kl_tau=0.0)
    assert value.gradient == pytest.approx([0.0, 1.8, -0.2, 0.0, -2.4])
    assert value.total == pytest.approx(1.8 - 0.2 - 2.4)
    assert masked(np.log(new), np.log(old), advantages, 0.2, 0.2).tolist() == [
        *(True, False, False, True, False)
    ]


def test_dppo_scales_advantages_and_pulls_every_trained_token_back() -> None:
    ratio, advantages = np.array([1.1, 3.0]), np.array([1.0, 1.0])
    old = np.log([0.5, 0.3])
    value = dppo(old + np.log(ratio), old, advantages, adv_tau=2.0, kl_tau=0.1)
    moved = np.log(ratio)
    assert value.total == pytest.approx(-2.2 + 0.1 * (moved**2).sum())
    assert value.gradient == pytest.approx([-2.2 + 0.2 * moved[0], 0.2 * moved[1]])


@settings(deadline=None)
@given(numbers(-3, 0), numbers(-3, 0), numbers(-2, 2))
def test_gradients_are_the_slopes_of_the_losses(
    logprobs: Floats, sampler: Floats, factors: Floats
) -> None:
    ratio = np.exp(logprobs - sampler)
    held = ratio.clip(LOW, HIGH)
    # cispo holds its factor constant, so its gradient is the slope of that loss.
    smooth = (
        (cross_entropy(logprobs, factors), lambda p: -(factors * p).sum()),
        (
            importance_sampling(logprobs, sampler, factors),
            lambda p: importance_sampling(p, sampler, factors).total,
        ),
        (cispo(logprobs, sampler, factors), lambda p: -(held * factors * p).sum()),
        (dro(logprobs, sampler, factors), lambda p: dro(p, sampler, factors).total),
    )
    for value, function in smooth:
        assert value.gradient == pytest.approx(slope(function, logprobs), rel=1e-3, abs=1e-4)
    is_kink = (np.abs(ratio - LOW) < 1e-3) | (np.abs(ratio - HIGH) < 1e-3)
    expected = slope(lambda p: ppo(p, sampler, factors).total, logprobs)
    found = ppo(logprobs, sampler, factors).gradient
    assert found[~is_kink] == pytest.approx(expected[~is_kink], rel=1e-3, abs=1e-4)
    rise = np.exp(logprobs) - np.exp(sampler)
    is_jump = np.abs(np.abs(rise) - 0.2) < 1e-3
    expected = slope(lambda p: dppo(p, sampler, factors, kl_tau=0.5).total, logprobs)
    found = dppo(logprobs, sampler, factors, kl_tau=0.5).gradient
    assert found[~is_jump] == pytest.approx(expected[~is_jump], rel=1e-3, abs=1e-4)


@settings(deadline=None)
@given(numbers(-3, 0), numbers(-3, 0))
def test_a_position_without_advantage_adds_nothing(logprobs: Floats, sampler: Floats) -> None:
    for function in (importance_sampling, ppo, cispo, dro, dppo):
        value = function(logprobs, sampler, np.zeros(4))
        assert value.total == 0
        assert not value.gradient.any()


@settings(deadline=None)
@given(numbers(-3, 0), numbers(-3, 0), numbers(-2, 2))
def test_within_its_bounds_ppo_is_importance_sampling(
    logprobs: Floats, sampler: Floats, advantages: Floats
) -> None:
    wide = ppo(logprobs, sampler, advantages, clip_low_threshold=0, clip_high_threshold=1e9)
    plain = importance_sampling(logprobs, sampler, advantages)
    assert wide.total == pytest.approx(plain.total)
    assert wide.gradient == pytest.approx(plain.gradient)


def test_clipped_tells_where_the_gradient_changes() -> None:
    ratio = np.array([1.5, 1.5, 0.5, 0.5, 1.0])
    advantages = np.array([1.0, -1.0, 1.0, -1.0, 1.0])
    in_ppo = clipped("ppo", ratio, advantages, LOW, HIGH)
    assert in_ppo.tolist() == [True, False, False, True, False]
    assert clipped("cispo", ratio, advantages, LOW, HIGH).tolist() == [True] * 4 + [False]


def test_options_default_as_the_wire_says() -> None:
    assert resolve_options("ppo", None) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert resolve_options("cispo", {"clip_high_threshold": 5}) == {
        "clip_low_threshold": 0.8,
        "clip_high_threshold": 5.0,
    }
    assert resolve_options("importance_sampling", {}) == {}
    assert resolve_options("cross_entropy", {}) == {"skip_token_normalization": False}
    assert resolve_options("dro", None) == {"beta": 0.05}
    assert resolve_options("dppo", {"adv_tau": 2}) == {
        "dppo_mask_high": 0.2,
        "dppo_mask_low": 0.2,
        "adv_tau": 2.0,
        "kl_tau": 1e-3,
    }


def test_losses_that_pull_are_losses() -> None:
    assert set(PULLING_LOSSES) <= set(LOSSES)


def test_temperature_is_an_option_of_the_embedded_trainer_alone() -> None:
    assert resolve_options("ppo", {"temperature": 0.6}, embedded=True)["temperature"] == 0.6
    assert resolve_options("ppo", {}, embedded=True)["temperature"] == 1.0
    with pytest.raises(ValueError, match="unknown option 'temperature' of loss 'ppo'"):
        resolve_options("ppo", {"temperature": 0.6})
    with pytest.raises(ValueError, match="unknown option 'temperature' of loss 'cross_entropy'"):
        resolve_options("cross_entropy", {"temperature": 0.6}, embedded=True)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("ppo", {"clip_hgih": 2}, "unknown option 'clip_hgih' of loss 'ppo': it takes clip_low"),
        ("importance_sampling", {"beta": 1}, "unknown option 'beta'.*: it takes temperature"),
        ("ppo", {"clip_low_threshold": "0.8"}, "is '0.8': give a finite number"),
        ("ppo", {"clip_low_threshold": True}, "is True: give a finite number"),
        ("ppo", {"clip_high_threshold": float("nan")}, "is nan: give a finite number"),
        ("ppo", {"clip_high_threshold": 0.2}, "clip_low_threshold 0.8 and clip_high_threshold 0.2"),
        ("ppo", {"clip_low_threshold": -0.2}, "clip_low_threshold -0.2"),
        ("ppo", {"temperature": 0}, "temperature 0.0"),
        ("dro", {"beta": -1}, "option 'beta' of loss 'dro' is -1.0: give 0 or more"),
        ("dppo", {"dppo_mask_low": -0.2}, "option 'dppo_mask_low' .* is -0.2: give 0 or more"),
        ("dppo", {"beta": 0.1}, "unknown option 'beta' of loss 'dppo': it takes dppo_mask_high"),
        ("cross_entropy", {"skip_token_normalization": 1}, "is 1: give true or false"),
    ],
)
def test_options_that_cannot_be_are_refused(
    loss: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_options(loss, options, embedded=True)


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown loss 'gspo': use one of cross_entropy, "):
        find_loss("gspo")
    assert {name: loss.name for name, loss in LOSSES.items()} == {name: name for name in LOSSES}
