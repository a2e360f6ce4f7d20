"""Packing is on for models that honour the mask, and off for every other, by trying alone."""

import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import transformers
from transformers import PreTrainedModel

from loops_cookbook.local.model import Policy
from loops_cookbook.local.probe import MOST_BEGINNING, Differences, judge, probe

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """More of them spend their time meeting in models this small."""
    torch.set_num_threads(1)


GOOD = Differences(packed=2e-6, alone=1e-6, leaking=0.5)

LINEAR = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


def policy(
    family: str, config: str, *, dtype: torch.dtype = torch.float32, **changes: Any
) -> Policy:
    """A tiny random model of a family: 4 layers of width 32, rows of up to 64 tokens."""
    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(
            getattr(transformers, config)(**settings | changes)
        )
    return Policy(module.to(dtype), device=torch.device("cpu"), dtype=dtype, max_seq_len=64)


@pytest.mark.parametrize(
    ("family", "config", "changes"),
    [
        ("Llama", "LlamaConfig", {}),
        ("Llama", "LlamaConfig", {"attn_implementation": "eager"}),
        ("Qwen3", "Qwen3Config", {"head_dim": 8}),
        ("GPTNeoX", "GPTNeoXConfig", {}),
        # A window that no row outgrows is none.
        ("Mistral", "MistralConfig", {"sliding_window": 64}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_honour_the_mask_are_packed(
    family: str, config: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    packing = probe(policy(family, config, dtype=dtype, **changes))
    assert packing.is_on, str(packing)
    assert str(packing).startswith("on (largest difference ")


@pytest.mark.parametrize(
    ("family", "config", "changes"),
    [
        ("Mistral", "MistralConfig", {"sliding_window": 24}),
        ("Gemma3", "Gemma3TextConfig", {"sliding_window": 8, "head_dim": 8}),
        ("GptOss", "GptOssConfig", {"sliding_window": 8, "head_dim": 8, "num_local_experts": 4}),
        ("Qwen3_5", "Qwen3_5TextConfig", LINEAR),
        ("Qwen3Next", "Qwen3NextConfig", LINEAR | EXPERTS),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_do_not_are_padded(
    family: str, config: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    packing = probe(policy(family, config, dtype=dtype, **changes))
    assert not packing.is_on
    assert str(packing).startswith("off: packed logprobs differ by up to ")


@pytest.mark.parametrize(("family", "config"), [("Mamba", "MambaConfig"), ("Bloom", "BloomConfig")])
def test_models_that_fail_on_a_mask_are_padded(family: str, config: str) -> None:
    packing = probe(policy(family, config))
    assert not packing.is_on
    assert packing.reason.startswith("this model takes no mask of its own (")
    assert "\n" not in packing.reason


def test_a_window_that_is_too_long_to_try_is_not_tried() -> None:
    made = policy("Llama", "LlamaConfig")
    made.module.config.sliding_window = MOST_BEGINNING
    assert probe(made).is_on
    made.max_seq_len = 2 * MOST_BEGINNING
    assert str(probe(made)) == "off: rows may outgrow a window of 1024, too long to try"


def test_a_model_of_very_few_positions_is_padded() -> None:
    made = policy("Llama", "LlamaConfig", max_position_embeddings=20)
    assert str(probe(made)) == "off: 20 positions are too few to try"


def test_a_probe_leaves_no_gradients_and_no_random_numbers_behind() -> None:
    made = policy("Llama", "LlamaConfig")
    made.reset(0, lora_alpha=16, seed=0)
    before = torch.random.get_rng_state()
    probe(made)
    assert all(parameter.grad is None for parameter in made.trainable)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_in_full_precision_packed_rows_may_not_differ() -> None:
    assert str(judge(GOOD, is_half=False)) == "on (largest difference 2.0e-06)"
    assert not judge(replace(GOOD, packed=2e-4, leaking=9.0), is_half=False).is_on
    assert not judge(replace(GOOD, packed=math.nan), is_half=False).is_on


def test_in_half_precision_they_may_differ_as_rounding_does() -> None:
    noisy = Differences(packed=0.03, alone=0.01, leaking=3.0)
    assert judge(noisy, is_half=True).is_on
    assert not judge(noisy, is_half=False).is_on
    assert not judge(replace(noisy, packed=0.05), is_half=True).is_on
    assert not judge(replace(noisy, leaking=0.2), is_half=True).is_on


def test_a_probe_that_could_not_tell_proves_nothing() -> None:
    for packed, leaking in ((2e-5, 1.9e-3), (0.0, 5e-4), (0.0, 0.0), (0.0, math.nan)):
        packing = judge(replace(GOOD, packed=packed, leaking=leaking), is_half=False)
        assert not packing.is_on
        assert "nothing shows" in packing.reason
