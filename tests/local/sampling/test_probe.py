import pytest

pytest.importorskip("torch")

import torch
from tests.local.sampling.builders import HYBRIDS, made_policy
from transformers.models.llama.modeling_llama import LlamaAttention

from loops_cookbook.local.sampling.probe import try_spans

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "GPT2", "Granite"])
def test_a_model_that_remembers_every_token_is_found_plain(kind: str) -> None:
    finding = try_spans(made_policy(kind))
    assert finding.is_plain, finding
    assert str(finding).startswith("on (largest difference ")


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_model_with_a_window_or_a_state_is_told_by_its_cache(kind: str) -> None:
    finding = try_spans(made_policy(kind, **HYBRIDS[kind]))
    assert not finding.is_plain
    assert str(finding).startswith("off: its cache has ")


def test_half_precision_is_compared_with_half_precision() -> None:
    policy = made_policy("Llama")
    policy.module.to(torch.bfloat16)
    policy.dtype = torch.bfloat16
    finding = try_spans(policy)
    assert finding.is_plain, finding


def test_attention_that_does_more_with_its_keys_is_found_out() -> None:
    finding = try_spans(made_policy("Bloom", n_layer=2, n_head=4))
    assert not finding.is_plain
    assert str(finding).startswith("off: its attention is not plain (")


def test_attention_that_comes_to_something_else_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = made_policy("Llama")
    usual = LlamaAttention.forward

    def swayed(self: LlamaAttention, hidden_states: torch.Tensor, **given: object) -> object:
        rest, weights = usual(self, hidden_states=hidden_states, **given)
        is_ours = self.config._attn_implementation == "loops_rows"
        return rest * (1.01 if is_ours else 1.0), weights

    monkeypatch.setattr(LlamaAttention, "forward", swayed)
    finding = try_spans(policy)
    assert not finding.is_plain
    assert str(finding).startswith("off: logprobs differ by up to ")


def test_weights_that_ran_away_prove_nothing() -> None:
    policy = made_policy("Llama")
    policy.module.get_output_embeddings().weight.data.fill_(float("nan"))
    assert not try_spans(policy).is_plain
