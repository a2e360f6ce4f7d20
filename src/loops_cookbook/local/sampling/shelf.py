"""Rows of like length while they are decoded: their memory, and attention to it.

A row owns one slot of a `Stack`, with a column for each of its tokens. Rows that share a prompt
(a *stem*) do not each hold it: it is held once, all of them attend to it together in one product,
and the softmax runs over stem and own columns alike. Slots are always dense: the last ones move
into those that end. So nothing is computed for rows that have ended, and nothing is copied for
those that go on, but for the few that move.

Source of attending to a shared beginning once: Juravsky et al. 2024, "Hydragen"
(arXiv:2402.05099).
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from loops_cookbook.local.sampling.spans import Span, Stack

Ints = npt.NDArray[np.int64]
OwnerT = TypeVar("OwnerT")


@dataclass(frozen=True, slots=True)
class Group(Generic[OwnerT]):
    """Rows that begin with one prompt."""

    prompt: Sequence[Span]
    """What was read of it, in order."""
    owners: Sequence[OwnerT]
    """Who the rows belong to, one each."""

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return sum(map(len, self.prompt))


class Shelf(Generic[OwnerT]):
    """Rows with stems, or rows that hold their whole prompts themselves.

    Args:
        columns: tokens that a row may come to own.
        stem_columns: tokens of a prompt that is shared; 0: none is.
    """

    def __init__(self, columns: int, *, stem_columns: int) -> None:
        self._columns = columns
        self._stem_columns = stem_columns
        self._has_stems = stem_columns > 0
        self._own, self._shared = Stack(), Stack()
        self.owners: list[OwnerT] = []
        """Of each slot."""
        self._lengths: Ints = np.zeros(0, np.int64)
        """Of what each slot holds."""
        self._stem_of: Ints = np.zeros(0, np.int64)
        self._stem_lengths: Ints = np.zeros(0, np.int64)
        self._grid: torch.Tensor | None = None
        """int64[G * N], the slots of each stem, some of them again where a stem has fewer; None:
        all slots in order."""
        self._grid_place: torch.Tensor | None = None
        """int64[S], where each slot is in the grid."""
        self._stem_mask: torch.Tensor | None = None
        self._width = 0
        self._mask: torch.Tensor | None = None
        self._cells = torch.zeros(0, dtype=torch.long)

    def __len__(self) -> int:
        return len(self.owners)

    def join(self, groups: Sequence[Group[OwnerT]]) -> None:
        """Add the rows of some groups behind those that are here."""
        first, like = len(self), groups[0].prompt[0]
        for group in groups:
            self.owners += group.owners
        self._own.add(len(self) - first, self._columns, like)
        lengths = [0 if self._has_stems else group.length for group in groups]
        counts = [len(group.owners) for group in groups]
        self._lengths = np.append(self._lengths, np.repeat(lengths, counts))
        if not self._has_stems:
            for slot, group in enumerate((g for g in groups for _ in g.owners), first):
                self._own.put(slot, group.prompt)
            return
        places = range(len(self._stem_lengths), len(self._stem_lengths) + len(groups))
        self._stem_lengths = np.append(self._stem_lengths, [group.length for group in groups])
        self._stem_of = np.append(self._stem_of, np.repeat(places, counts))
        self._shared.add(len(groups), self._stem_columns, like)
        for stem, group in zip(places, groups, strict=True):
            self._shared.put(stem, group.prompt)
        self._lay_grid(like.keys)

    def drop(self, ended: Set[int]) -> None:
        """Let go of the rows in some slots."""
        moved = _closed_up(len(self), ended)
        kept = np.array(moved, np.int64)
        self._own.drop(moved)
        self.owners = [self.owners[slot] for slot in moved]
        self._lengths = self._lengths[kept]
        if self._has_stems and moved:
            self._drop_stems(kept)

    def own(self, slot: int) -> Span:
        """What a row owns, without copying."""
        return self._own.span(slot, int(self._lengths[slot]))

    def positions(self) -> Ints:
        """The place of each row's next token in its text."""
        if not self._has_stems:
            return self._lengths
        return self._lengths + self._stem_lengths[self._stem_of]

    def begin_step(self) -> None:
        """Give each row a column for one more token."""
        keys = self._own.keys
        _, _, heads, columns, _ = keys.shape
        rows = np.arange(len(self))[:, None] * heads + np.arange(heads)
        self._cells = torch.from_numpy((rows * columns + self._lengths[:, None]).ravel())
        self._cells = self._cells.to(keys.device)
        self._lengths = self._lengths + 1
        self._width = int(self._lengths.max())
        self._own.widen(self._width)
        self._mask = _mask(self._lengths, self._width, keys)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Take in the newest token's keys and values, and attend to all there are.

        Args:
            layer: of the model.
            queries: [S, H, R, D], scaled; R query heads share a key-value head.
            keys, values: [S, H, D]

        Returns:
            [S, H, R, D]
        """
        held_keys, held_values = self._own.keys[layer], self._own.values[layer]
        held_keys.view(-1, held_keys.shape[-1]).index_copy_(0, self._cells, keys.flatten(0, 1))
        held_values.view(-1, held_values.shape[-1]).index_copy_(
            0, self._cells, values.flatten(0, 1)
        )
        slots = len(self)
        scores = queries @ held_keys[:slots, :, : self._width].transpose(-1, -2)
        if self._mask is not None:
            scores = scores + self._mask
        stem = 0
        if self._has_stems:
            stem_scores = self._stem_scores(layer, queries)
            stem = stem_scores.shape[-1]
            scores = torch.cat((stem_scores, scores), -1)
        shares = scores.softmax(-1, dtype=torch.float32).to(queries.dtype)
        seen = shares[..., stem:] @ held_values[:slots, :, : self._width]
        return seen + self._stem_values(layer, shares[..., :stem]) if stem else seen

    def _stem_scores(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """[S, H, R, P], where P is the length of the longest stem."""
        gridded = self._to_grid(queries)
        stems, width = len(self._stem_lengths), int(self._stem_lengths.max())
        scores = gridded @ self._shared.keys[layer, :stems, :, :width].transpose(-1, -2)
        if self._stem_mask is not None:
            scores = scores + self._stem_mask
        return self._from_grid(scores, queries.shape[2])

    def _stem_values(self, layer: int, shares: torch.Tensor) -> torch.Tensor:
        """[S, H, R, D]"""
        stems = len(self._stem_lengths)
        values = self._shared.values[layer, :stems, :, : shares.shape[-1]]
        return self._from_grid(self._to_grid(shares) @ values, shares.shape[2])

    def _to_grid(self, rows: torch.Tensor) -> torch.Tensor:
        """[S, H, R, X] to [G, H, N * R, X]: what attends to one stem stands together."""
        if self._grid is not None:
            rows = rows.index_select(0, self._grid)
        stems = len(self._stem_lengths)
        _, heads, sharing, width = rows.shape
        apart = rows.view(stems, -1, heads, sharing, width).transpose(1, 2)
        return apart.reshape(stems, heads, -1, width)

    def _from_grid(self, gridded: torch.Tensor, sharing: int) -> torch.Tensor:
        """The inverse."""
        stems, heads, _, width = gridded.shape
        apart = gridded.view(stems, heads, -1, sharing, width).transpose(1, 2)
        rows = apart.reshape(-1, heads, sharing, width)
        return rows if self._grid_place is None else rows.index_select(0, self._grid_place)

    def _drop_stems(self, kept: Ints) -> None:
        self._stem_of = self._stem_of[kept]
        stems = len(self._stem_lengths)
        unused = set(range(stems)) - set(self._stem_of.tolist())
        if unused:
            moved = _closed_up(stems, unused)
            self._shared.drop(moved)
            self._stem_lengths = self._stem_lengths[np.array(moved, np.int64)]
            place = {source: stem for stem, source in enumerate(moved)}
            self._stem_of = np.array([place[stem] for stem in self._stem_of.tolist()], np.int64)
        self._lay_grid(self._shared.keys)

    def _lay_grid(self, like: torch.Tensor) -> None:
        """Find out which rows attend to each stem, once for as long as they stay."""
        width = int(self._stem_lengths.max())
        self._stem_mask = _mask(self._stem_lengths, width, like)
        order = np.argsort(self._stem_of, kind="stable")
        counts = np.bincount(self._stem_of)
        firsts = np.repeat(counts.cumsum() - counts, counts)
        grid = np.zeros((len(counts), counts.max()), np.int64)
        grid[self._stem_of[order], np.arange(len(order)) - firsts] = order
        places = np.empty_like(order)
        places[order] = self._stem_of[order] * counts.max() + np.arange(len(order)) - firsts
        is_plain = grid.size == len(order) and (grid.ravel() == np.arange(len(order))).all()
        self._grid = None if is_plain else torch.from_numpy(grid.ravel()).to(like.device)
        self._grid_place = None if is_plain else torch.from_numpy(places).to(like.device)


def _closed_up(count: int, ended: Set[int]) -> list[int]:
    """Which place each place is filled from, once those that ended are filled from the end."""
    going = [place for place in range(count) if place not in ended]
    kept = len(going)
    last = [place for place in going if place >= kept]
    return [last.pop() if place in ended else place for place in range(kept)]


def _mask(lengths: Ints, width: int, like: torch.Tensor) -> torch.Tensor | None:
    """[N, 1, 1, width], added to scores: -inf behind each length; None: none is shorter."""
    if (lengths == width).all():
        return None
    hidden = np.where(np.arange(width) < lengths[:, None], 0.0, -np.inf)
    return torch.from_numpy(hidden).to(like.device, like.dtype)[:, None, None]
