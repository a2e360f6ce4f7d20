"""Completions that are sampled together, with one set of weights, a token a step.

The memory behind them is a `Rows` or a `Context`. A completion that ends leaves at once.
"""

from collections.abc import Sequence, Set
from typing import Protocol

import numpy as np
import torch

from loops_cookbook.local.errors import NotFinite
from loops_cookbook.local.sampling.drafts import Draft
from loops_cookbook.local.sampling.draw import Draws
from loops_cookbook.local.sampling.reader import Prompt
from loops_cookbook.local.text import Decode


class Memory(Protocol):
    """What the rows of a batch have read."""

    @property
    def drafts(self) -> list[Draft]:
        """Whose rows these are, in the order of the batch."""
        ...

    def read(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Read some prompts, no two alike; logits of what follows each, float32[N, V]."""
        ...

    def join(self, drafts: Sequence[Sequence[Draft]]) -> None:
        """Add rows: for each prompt that was read last, those of its drafts."""
        ...

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read one more token in each row; logits of the one after it, float32[B, V]."""
        ...

    def drop(self, ended: Set[Draft]) -> None:
        """Let go of rows."""
        ...


class Batch:
    """Drafts under way.

    Args:
        memory: empty.
        weights: the name of those that compute it; whoever calls puts them in place.
        decode: ids to text, for stop strings.
        device: where the model is.
    """

    def __init__(self, memory: Memory, weights: str, decode: Decode, device: torch.device) -> None:
        self._memory = memory
        self.weights = weights
        self._decode = decode
        self._device = device
        self.drafts: list[Draft] = []
        self._draws: Draws | None = None
        self._faults: list[tuple[Draft, NotFinite]] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        return not self.drafts

    def take_faults(self) -> list[tuple[Draft, NotFinite]]:
        """Drafts that came to nothing since the last call, and why."""
        faults, self._faults = self._faults, []
        return faults

    def begin(self, drafts: Sequence[Draft]) -> None:
        """Read the prompts of some drafts and draw the first token of each."""
        places: dict[Prompt, int] = {}
        lines = [places.setdefault(draft.prompt, len(places)) for draft in drafts]
        logits = self._memory.read(list(places))
        draws = Draws([draft.settings for draft in drafts], self._device)
        self._take(drafts, draws, logits, lines)
        together: list[list[Draft]] = [[] for _ in places]
        for draft, line in zip(drafts, lines, strict=True):
            if draft.is_going:
                together[line].append(draft)
        self._memory.join(together)
        self._settle()

    def step(self) -> None:
        """Draw one more token for every draft."""
        self._drop()
        if self.is_empty:
            return
        tokens = torch.tensor([draft.ids[-1] for draft in self.drafts], device=self._device)
        logits = self._memory.extend(tokens)
        if self._draws is None:
            self._draws = Draws([draft.settings for draft in self.drafts], self._device)
        self._take(self.drafts, self._draws, logits)
        self._drop()

    def _take(
        self,
        drafts: Sequence[Draft],
        draws: Draws,
        logits: torch.Tensor,
        lines: Sequence[int] | None = None,
    ) -> None:
        uniforms = np.array([draft.uniforms[len(draft.ids)] for draft in drafts], np.float32)
        tokens, logprobs = draws.draw(logits, uniforms, lines)
        for draft, token, logprob in zip(drafts, tokens, logprobs, strict=True):
            try:
                draft.take(token, logprob, self._decode)
            except NotFinite as error:
                self._faults.append((draft, error))
                draft.is_left = True

    def _drop(self) -> None:
        ended = {draft for draft in self.drafts if not draft.is_going}
        if ended:
            self._memory.drop(ended)
            self._settle()

    def _settle(self) -> None:
        self.drafts = self._memory.drafts
        self._draws = None
