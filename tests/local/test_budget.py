from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from loops_cookbook.local.budget import MAX_TOKENS, Budget, budget
from loops_cookbook.local.model import Policy, load_policy
from loops_cookbook.local.pack import Bounds
from loops_cookbook.local.pad import MicroBatch

pytestmark = pytest.mark.torch

TOKEN = 2 * (32 * 32 + 5 * 64) * 4
"""Bytes that a token of the tiny model leaves behind, by the estimate."""


@pytest.fixture
def policy(model_dir: Path) -> Policy:
    return load_policy(model_dir, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=32)


def batch(lines: int, width: int) -> MicroBatch:
    nothing = np.zeros(0, np.int64)
    return MicroBatch(np.zeros((lines, width), np.int64), None, *[nothing] * 4)


def test_a_small_models_activations_are_kept(policy: Policy) -> None:
    found = budget(policy)
    assert str(found) == "kept"
    assert found.choices == [found.bounds]
    assert found.bounds.max_tokens == MAX_TOKENS
    assert not found.recomputes(batch(8, 1024))


def test_tokens_beyond_what_fits_are_recomputed(policy: Policy) -> None:
    found = budget(policy, lent_bytes=100 * TOKEN)
    assert str(found) == "kept up to 100 tokens of a micro-batch, recomputed beyond"
    assert not found.recomputes(batch(4, 25))
    assert found.recomputes(batch(1, 101))
    # Two blocks' inputs of 32 float32, and one of the two blocks.
    assert found.recomputed_tokens == 100 * TOKEN // (2 * 32 * 4 + TOKEN // 2)
    assert [choice.max_tokens for choice in found.choices] == [100, found.recomputed_tokens]


def test_every_bound_grows_with_what_is_lent(policy: Policy) -> None:
    little, much = (budget(policy, lent_bytes=size).bounds for size in (2**20, 2**22))
    assert much.max_tokens > 3 * little.max_tokens
    assert much.max_scored > 3 * little.max_scored
    assert much.max_pairs > 3 * little.max_pairs


def test_without_a_fused_kernel_pairs_are_dear(policy: Policy) -> None:
    fused = budget(policy).bounds.max_pairs
    policy.module.set_attn_implementation("eager")
    assert budget(policy).bounds.max_pairs < fused / 5


def test_what_is_recomputed_costs_a_third_more() -> None:
    made = Budget(Bounds(100, 100, 10**6, pairs_per_token=1000), recomputed_tokens=200)
    assert made.cost([batch(1, 100)]) == pytest.approx(110)
    assert made.cost([batch(1, 100), batch(1, 200)]) == pytest.approx(110 + 240 * 4 / 3)
