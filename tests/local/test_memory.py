import pytest

pytest.importorskip("torch")

import torch
from transformers import LlamaConfig

from loops_cookbook.local.memory import (
    CPU_BYTES,
    cached_token_bytes,
    lendable_bytes,
    scored_position_bytes,
    trained_token_bytes,
)

pytestmark = pytest.mark.torch

SMALL = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
)


def test_a_cached_token_holds_keys_and_values_in_every_layer() -> None:
    layers, heads, width = 30, 3, 64
    assert cached_token_bytes(SMALL, torch.float32) == 2 * layers * heads * width * 4
    assert cached_token_bytes(SMALL, torch.bfloat16) == 2 * layers * heads * width * 2


def test_a_cpu_batch_of_a_small_model_is_neither_tiny_nor_boundless() -> None:
    lent = lendable_bytes(torch.device("cpu"))
    assert lent == CPU_BYTES
    assert 500 < lent // trained_token_bytes(SMALL, torch.float32) < 5000
    assert 500 < lent // scored_position_bytes(49_152) < 5000
