"""Logprobs of a micro-batch, however its rows are laid out.

The one place where a layout meets the model, so that what is trained, and what is compared before
training, are computed alike.
"""

import numpy as np
import numpy.typing as npt
import torch

from loops_cookbook.local.model import Policy
from loops_cookbook.local.pad import Flat, MicroBatch


def score(
    policy: Policy, batch: MicroBatch, flat: Flat, *, temperature: float = 1.0
) -> torch.Tensor:
    """float32[M, K], of the targets at the scored positions, in the order of `batch.places`.

    An ignored target is looked up as token 0.
    """

    def tensor(array: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(policy.device)

    branches = batch.branches
    logits = policy.logits_at(
        tensor(batch.ids),
        tensor(batch.lines),
        tensor(batch.columns),
        positions=None if branches is None else tensor(branches.positions),
        ends=None if branches is None else tensor(branches.ends),
    )
    if temperature != 1.0:
        logits = logits / temperature
    targets = tensor(flat.targets_TK[batch.places].clip(min=0))
    return torch.log_softmax(logits, dim=-1)[tensor(batch.sources)[:, None], targets]
