import pytest

pytest.importorskip("torch")

import torch
from peft.tuners.lora import LoraLayer
from tests.local.sampling.builders import made_policy, whole
from torch import nn

from loops_cookbook.local.model import Policy
from loops_cookbook.local.sampling.stand_ins import (
    PART,
    merged_bytes,
    with_head_in_parts,
    with_merged_adapters,
    without_adapters,
)

pytestmark = pytest.mark.torch

TEXT = [3, 9, 27, 4]


@pytest.fixture
def adapted() -> Policy:
    """A model whose adapters do something."""
    policy = made_policy("Qwen2")  # its projections have biases
    policy.reset(4, lora_alpha=16.0, seed=0)
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.add_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    return policy


def adapters(policy: Policy) -> int:
    return sum(isinstance(module, LoraLayer) for module in policy.module.modules())


def test_merged_adapters_come_to_the_same(adapted: Policy) -> None:
    expected = whole(adapted, TEXT)
    with with_merged_adapters(adapted.module).standing_in():
        assert adapters(adapted) == 0
        assert torch.allclose(whole(adapted, TEXT), expected, atol=1e-4)
    assert torch.equal(whole(adapted, TEXT), expected)


def test_merged_adapters_stay_as_they_were_when_they_were_merged(adapted: Policy) -> None:
    merged, expected = with_merged_adapters(adapted.module), whole(adapted, TEXT)
    adapted.trainable[1].data.add_(1.0)
    with merged.standing_in():
        assert torch.allclose(whole(adapted, TEXT), expected, atol=1e-4)
    assert not torch.allclose(whole(adapted, TEXT), expected, atol=1e-2)


def test_without_adapters_the_model_is_as_it_was_loaded(adapted: Policy) -> None:
    with without_adapters(adapted.module).standing_in():
        bare = whole(adapted, TEXT)
    with adapted.untrained():
        assert torch.equal(bare, whole(adapted, TEXT))


def test_what_is_trained_is_found_again_whatever_happens_in_between(adapted: Policy) -> None:
    before = adapters(adapted)
    with (
        pytest.raises(ZeroDivisionError),
        with_merged_adapters(adapted.module).standing_in(),
    ):
        raise ZeroDivisionError
    assert adapters(adapted) == before


def test_the_size_of_merged_copies_is_that_of_the_layers(adapted: Policy) -> None:
    layers = [
        module.get_base_layer()
        for module in adapted.module.modules()
        if isinstance(module, LoraLayer)
    ]
    assert merged_bytes(adapted.module) == sum(4 * layer.weight.numel() for layer in layers)


def test_what_would_lose_something_is_not_merged() -> None:
    policy = made_policy("Llama")
    policy.module.to(torch.bfloat16)
    policy.reset(4, lora_alpha=16.0, seed=0)
    assert merged_bytes(policy.module) is None


def test_a_large_head_in_parts_comes_to_the_same() -> None:
    policy = made_policy("Llama", vocab_size=2 * PART + 5)
    expected = whole(policy, TEXT)
    head = policy.module.get_output_embeddings()
    with with_head_in_parts(policy.module).standing_in():
        assert policy.module.get_output_embeddings() is not head
        assert torch.allclose(whole(policy, TEXT), expected, atol=1e-5)
    assert policy.module.get_output_embeddings() is head


def test_a_small_head_and_one_that_is_more_than_a_product_stay() -> None:
    for policy in (made_policy("Llama"), made_policy("Llama", vocab_size=2 * PART)):
        head = policy.module.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        if policy.vocab_size == 2 * PART:
            head.bias = nn.Parameter(torch.zeros(2 * PART))
        with with_head_in_parts(policy.module).standing_in():
            assert policy.module.get_output_embeddings() is head
