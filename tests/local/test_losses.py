import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from loops_cookbook.learning import losses as reference
from loops_cookbook.local.losses import POLICY_LOSSES, cross_entropy

pytestmark = pytest.mark.torch

Floats = npt.NDArray[np.float64]


def numbers(low: float, high: float) -> st.SearchStrategy[Floats]:
    return arrays(np.float64, 5, elements=st.floats(low, high))


def test_every_policy_loss_of_the_table_is_here() -> None:
    named = {name for name, loss in reference.LOSSES.items() if loss.kind == "policy"}
    assert set(POLICY_LOSSES) == named


@settings(deadline=None)
@given(numbers(-4, 0), numbers(-2, 2))
def test_cross_entropy_equals_the_reference(logprobs: Floats, weights: Floats) -> None:
    tensor = torch.tensor(logprobs, requires_grad=True)
    total = cross_entropy(tensor, torch.tensor(weights)).sum()
    total.backward()
    expected = reference.cross_entropy(logprobs, weights)
    assert total.item() == pytest.approx(expected.total)
    assert tensor.grad.numpy() == pytest.approx(expected.gradient)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(deadline=None)
@given(
    logprobs=numbers(-4, 0),
    sampler=numbers(-4, 0),
    advantages=numbers(-2, 2),
    share=st.floats(0, 1),
    factor=st.floats(1, 3),
)
def test_policy_losses_equal_the_reference(
    name: str, logprobs: Floats, sampler: Floats, advantages: Floats, share: float, factor: float
) -> None:
    taken = {
        option: factor if option in ("clip_high_threshold", "adv_tau") else share
        for option in reference.LOSSES[name].options
    }
    tensor = torch.tensor(logprobs, requires_grad=True)
    total = POLICY_LOSSES[name](
        tensor, torch.tensor(sampler), torch.tensor(advantages), taken
    ).sum()
    total.backward()
    expected = getattr(reference, name)(logprobs, sampler, advantages, **taken)
    assert total.item() == pytest.approx(expected.total)
    assert tensor.grad.numpy() == pytest.approx(expected.gradient)


def test_a_masked_token_that_rose_from_nothing_adds_a_finite_loss() -> None:
    logprobs = torch.zeros(1, requires_grad=True)
    options = reference.LOSSES["dppo"].options | {"kl_tau": 0.0}
    loss = POLICY_LOSSES["dppo"](logprobs, torch.tensor([-200.0]), torch.ones(1), options)
    loss.sum().backward()
    assert (loss.item(), logprobs.grad.item()) == (0.0, 0.0)
