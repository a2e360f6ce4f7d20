"""Keys and values of consecutive tokens, over all layers: what attention remembers of a text.

Only models whose every layer remembers every token by one key and one value for each head have
spans (`loops_cookbook.local.sampling.probe` finds out). A span can be cut into parts and put
together again, since each token's key and value depend on the tokens before it alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The memory of T tokens. Dimensions: L layers, H key-value heads, D numbers a head."""

    keys: torch.Tensor
    """[L, H, T, D]"""
    values: torch.Tensor
    """[L, H, T, D], where D may differ from that of the keys."""

    def __len__(self) -> int:
        return self.keys.shape[2]

    def part(self, start: int, end: int) -> "Span":
        """The tokens `start` to `end` - 1, without copying."""
        return Span(self.keys[:, :, start:end], self.values[:, :, start:end])

    def copied(self) -> "Span":
        """The same in memory of its own."""
        return Span(self.keys.contiguous().clone(), self.values.contiguous().clone())


def spans_of(cache: Cache) -> list[Span]:
    """The memory of each row of a cache, padding included, in memory of their own."""
    layers = cast(Sequence[DynamicLayer], cache.layers)
    keys = torch.stack([cast(torch.Tensor, layer.keys) for layer in layers])
    values = torch.stack([cast(torch.Tensor, layer.values) for layer in layers])
    return [Span(keys[:, row], values[:, row]) for row in range(keys.shape[1])]


class Stack:
    """Spans side by side in preallocated memory: `keys` and `values` are [L, S, H, C, D].

    Slot s holds one span in its columns 0 to its length - 1; the lengths are the user's to know.
    The first `finite` columns of every slot in use hold numbers, behind the length some or other:
    a share of 0 of them is 0, which it would not be of what memory happens to hold.
    """

    def __init__(self) -> None:
        self._held: Span | None = None
        self.slots = 0
        """In use."""
        self.finite = 0

    @property
    def keys(self) -> torch.Tensor:
        """[L, S, H, C, D]"""
        assert self._held is not None
        return self._held.keys

    @property
    def values(self) -> torch.Tensor:
        """[L, S, H, C, D]"""
        assert self._held is not None
        return self._held.values

    def add(self, slots: int, columns: int, like: Span) -> None:
        """Take more slots into use; each may come to have so many columns."""
        self._reserve(self.slots + slots, columns, like)
        first, self.slots = self.slots, self.slots + slots
        for kind in (self.keys, self.values):
            kind[:, first : self.slots, :, : self.finite] = 0

    def drop(self, moved: Sequence[int]) -> None:
        """Let slot k hold what slot `moved[k]` holds, and have no others."""
        targets = [slot for slot, source in enumerate(moved) if slot != source]
        if targets:
            index = torch.tensor([targets, [moved[slot] for slot in targets]])
            index = index.to(self.keys.device)
            for kind in (self.keys, self.values):
                part = kind[:, :, :, : self.finite]
                part.index_copy_(1, index[0], part.index_select(1, index[1]))
        self.slots = len(moved)

    def widen(self, columns: int) -> None:
        """Let the first columns of all slots be finite."""
        if columns > self.finite:
            for kind in (self.keys, self.values):
                kind[:, : self.slots, :, self.finite : columns] = 0
            self.finite = columns

    def put(self, slot: int, pieces: Sequence[Span]) -> None:
        """Let a slot hold some spans, one after the other."""
        self.widen(sum(map(len, pieces)))
        column = 0
        for piece in pieces:
            end = column + len(piece)
            self.keys[:, slot, :, column:end] = piece.keys
            self.values[:, slot, :, column:end] = piece.values
            column = end

    def span(self, slot: int, length: int) -> Span:
        """What a slot holds, without copying."""
        return Span(self.keys[:, slot, :, :length], self.values[:, slot, :, :length])

    def _reserve(self, slots: int, columns: int, like: Span) -> None:
        old = self._held
        if old is not None:
            has_slots, has_columns = old.keys.shape[1], old.keys.shape[3]
            if slots <= has_slots and columns <= has_columns:
                return
            slots = has_slots if slots <= has_slots else max(slots, has_slots + has_slots // 4)
            columns = max(columns, has_columns)

        def grown(like: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
            layers, heads, _, width = like.shape
            made = like.new_empty(layers, slots, heads, columns, width)
            if before is not None:
                used = slice(None), slice(self.slots), slice(None), slice(self.finite)
                made[used] = before[used]
            return made

        self._held = Span(
            grown(like.keys, None if old is None else old.keys),
            grown(like.values, None if old is None else old.values),
        )
