"""The attention memory of a batch that is being decoded: the one place that knows the KV cache.

Prompts are padded on the left, so that the newest token of every row stands in the last column.
The mask hides the padding, and positions count from each row's own start, so a row is computed
as if it were alone. Rows can be repeated, reordered and dropped.
"""

from collections.abc import Sequence
from typing import cast

import torch
from transformers import DynamicCache

from loops_cookbook.local.model import Policy


class Context:
    """What the model has read so far, for each row.

    Args:
        policy: whose weights, as they are now, read.
        prompts: ids, none empty.
        room: how many more tokens a row may get.
    """

    def __init__(self, policy: Policy, prompts: Sequence[Sequence[int]], *, room: int) -> None:
        self._policy = policy
        self._cache = DynamicCache(config=policy.module.config)
        self._ids = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.long)
        mask = torch.zeros(len(prompts), self._ids.shape[1] + room, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            self._ids[row, -len(prompt) :] = torch.tensor(prompt)
            mask[row, self._ids.shape[1] - len(prompt) :] = 1
        self._ids = self._ids.to(policy.device)
        self._filled = self._ids.shape[1]
        # Without padding no mask is given, and the faster attention kernels serve.
        is_padded = any(len(prompt) != self._filled for prompt in prompts)
        self._mask = mask.to(policy.device) if is_padded else None
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=policy.device)

    def read(self) -> torch.Tensor:
        """Read the prompts; logits of each row's next token, float32[B, V]."""
        columns = torch.arange(self._filled, device=self._policy.device)
        starts = self._filled - self._lengths
        positions = (columns[None] - starts[:, None]).clamp(min=0)
        return self._logits(self._ids, positions)

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read one more token in each row; logits of the one after it, float32[B, V]."""
        # A row that has ended may still be carried along: it must not leave the model's window.
        last = self._policy.max_positions
        positions = self._lengths if last is None else self._lengths.clamp(max=last - 1)
        self._filled += 1
        self._lengths = self._lengths + 1
        return self._logits(tokens[:, None], positions[:, None])

    def keep(self, rows: torch.Tensor) -> None:
        """Let these rows be the batch, in this order; a row may be named more than once."""
        self._cache.reorder_cache(cast(torch.LongTensor, rows))
        self._lengths = self._lengths[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._policy.module(
            input_ids=ids,
            attention_mask=None if self._mask is None else self._mask[:, : self._filled],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._policy.cache_argument: self._cache},
        )
        return output.logits[:, -1].float()
