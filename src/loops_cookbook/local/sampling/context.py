"""Rows of any model: a padded batch over the model's own cache, which nobody can join.

Prompts are padded on the left, so that the newest token of every row stands in the last column.
The mask hides the padding, and positions count from each row's own start, so a row is computed
as if it were alone. What a prompt left in the cache is repeated for all rows that begin with it.
Rows that have ended are carried along until enough of them have.
"""

from collections.abc import Sequence, Set
from typing import cast

import torch
from transformers import DynamicCache

from loops_cookbook.local.model import Policy
from loops_cookbook.local.sampling.drafts import Draft
from loops_cookbook.local.sampling.reader import Prompt

DROP_BELOW = 0.75
"""Ended rows are dropped when the share of rows still going falls to this: dropping copies the
memory of those that stay, so it does not pay for a few."""


class Context:
    """A batch that begins once.

    Args:
        policy: whose weights, as they are at each call, compute.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._cache = DynamicCache(config=policy.module.config)
        self._ids = torch.zeros(0, 0, dtype=torch.long)
        self._lengths = torch.zeros(0, dtype=torch.long)
        self._mask: torch.Tensor | None = None
        self._rows: list[Draft | None] = []
        """Whose each row is; None: of one that has ended."""

    @property
    def drafts(self) -> list[Draft]:
        """Whose rows are going on, in the order of the batch."""
        return [draft for draft in self._rows if draft is not None]

    def read(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Read some prompts; logits of what follows each, float32[N, V]."""
        width = max(map(len, prompts))
        ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        self._lengths = mask.sum(1).to(self._policy.device)
        # Without padding no mask is given, and the faster attention kernels serve.
        self._mask = None if bool(mask.all()) else mask.to(self._policy.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return self._logits(ids.to(self._policy.device), positions.to(self._policy.device))

    def join(self, drafts: Sequence[Sequence[Draft]]) -> None:
        """Begin the batch: for each prompt that was read, the rows of its drafts."""
        self._rows = [draft for together in drafts for draft in together]
        prompt_of = [place for place, together in enumerate(drafts) for _ in together]
        if self._rows and prompt_of != list(range(len(self._lengths))):
            self._keep(prompt_of)

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read one more token in each row; logits of the one after it, float32[B, V]."""
        going = [row for row, draft in enumerate(self._rows) if draft is not None]
        is_whole = len(going) == len(self._rows)
        live = torch.tensor(going, device=tokens.device)
        if not is_whole:
            tokens = tokens.new_zeros(len(self._rows)).index_copy(0, live, tokens)
        # A row that has ended must not leave the model's window.
        last = self._policy.max_positions
        positions = self._lengths if last is None else self._lengths.clamp(max=last - 1)
        self._lengths = self._lengths + 1
        if self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        logits = self._logits(tokens[:, None], positions[:, None])
        return logits if is_whole else logits.index_select(0, live)

    def drop(self, ended: Set[Draft]) -> None:
        """Let go of rows."""
        self._rows = [None if draft in ended else draft for draft in self._rows]
        going = [row for row, draft in enumerate(self._rows) if draft is not None]
        if going and len(going) <= DROP_BELOW * len(self._rows):
            self._rows = [self._rows[row] for row in going]
            self._keep(going)

    def _keep(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self._policy.device)
        self._cache.reorder_cache(cast(torch.LongTensor, index))
        self._lengths = self._lengths[index]
        if self._mask is not None:
            self._mask = self._mask[index]

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._policy.module(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._policy.cache_argument: self._cache},
        )
        return output.logits[:, -1].float()
