from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from transformers import MistralConfig, MistralForCausalLM

from loops_cookbook.local.model import Policy, load_policy
from loops_cookbook.local.sampling.attention import attending, cache_over

pytestmark = pytest.mark.torch


class Values:
    """Memory in which each row sees the newest token alone."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, tuple[int, ...]]] = []

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        self.asked.append((layer, tuple(queries.shape)))
        return values[:, :, None].expand(*queries.shape[:3], -1)


@pytest.fixture
def policy(model_dir: Path) -> Policy:
    return load_policy(model_dir, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=32)


@torch.no_grad()
def test_each_layer_asks_the_memory_in_the_place_of_its_cache(policy: Policy) -> None:
    memory = Values()
    ids = torch.tensor([[3], [4], [5]])
    cache = {policy.cache_argument: cache_over(memory, 2)}
    with attending(policy.module):
        logits = policy.module(input_ids=ids, use_cache=True, **cache).logits
    assert memory.asked == [(0, (3, 2, 2, 8)), (1, (3, 2, 2, 8))]
    # A token that sees itself alone is a text of one token.
    assert torch.allclose(logits, policy.module(input_ids=ids, use_cache=False).logits, atol=1e-5)


@torch.no_grad()
def test_outside_of_the_block_the_model_attends_as_ever(policy: Policy) -> None:
    ids = torch.tensor([[3, 4, 5]])
    before = policy.module(input_ids=ids).logits
    with pytest.raises(ZeroDivisionError), attending(policy.module):
        raise ZeroDivisionError
    assert torch.equal(policy.module(input_ids=ids).logits, before)


@torch.no_grad()
def test_attention_that_is_not_plain_is_refused() -> None:
    config = MistralConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=4,
    )
    module = MistralForCausalLM(config)
    cpu = torch.device("cpu")
    policy = Policy(module, device=cpu, dtype=torch.float32, max_seq_len=32)
    cache = {policy.cache_argument: cache_over(Values(), 1)}
    with attending(module), pytest.raises(ValueError, match="sliding_window is not plain"):
        module(input_ids=torch.tensor([[3]]), use_cache=True, **cache)


@torch.no_grad()
def test_more_than_one_new_token_a_row_is_refused(policy: Policy) -> None:
    cache = {policy.cache_argument: cache_over(Values(), 2)}
    with attending(policy.module), pytest.raises(ValueError, match="2 new tokens a row"):
        policy.module(input_ids=torch.tensor([[3, 4]]), use_cache=True, **cache)
