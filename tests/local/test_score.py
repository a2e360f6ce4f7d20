from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from loops_cookbook.local.model import load_policy
from loops_cookbook.local.pack import Bounds, pack
from loops_cookbook.local.pad import flatten, micro_batches
from loops_cookbook.local.requests import Row
from loops_cookbook.local.score import score

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_each_row_alone(
    model_dir: Path, is_packed: bool, temperature: float
) -> None:
    policy = load_policy(model_dir, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=32)
    rows = [
        Row(np.array([3, 4, 5], np.int32), np.array([[4, 6], [5, -100], [7, 8]])),
        Row(np.array([3, 4, 9, 10], np.int32), np.array([[4, 1], [9, 2], [10, 3], [11, 4]])),
    ]
    flat = flatten(rows, is_supervised=True)
    layout = (
        pack(flat, Bounds(100, 100, 10_000, pairs_per_token=1000))
        if is_packed
        else micro_batches(flat, max_tokens=100, max_scored=100)
    )
    (batch,) = layout
    assert (batch.branches is not None) == is_packed
    with torch.no_grad():
        found = score(policy, batch, flat, temperature=temperature)
        whole = [policy.module(input_ids=torch.tensor(row.input_ids)[None].long()) for row in rows]
    logprobs = torch.cat([torch.log_softmax(out.logits[0] / temperature, -1) for out in whole])
    targets = torch.tensor(flat.targets_TK)
    expected = logprobs.gather(1, targets.clamp(min=0))[batch.places]
    assert torch.allclose(found, expected, atol=1e-5)
