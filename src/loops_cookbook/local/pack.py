"""Rows become trees: what rows share at their beginning is computed once.

Sorted rows are the paths of a tree: a row follows the one before it as far as both read the same
ids, then branches off. A tree stands in one line of a micro-batch in the order in which its
columns are first read, so that whatever was read after a column stands right behind it: column j
is seen from the columns j to `ends[j]` - 1 and from no others. Several trees may share a line;
none sees another. What always holds: each scored position of each row has one column, at its own
place in the row, that sees exactly what stands before it in its row.

A mask is quadratic in the line. So a row joins a tree only while the columns that this saves are
worth more than the pairs of columns that it adds, and only within the bounds; else it begins a
tree of its own. Where no line branches and none holds two trees, no mask is needed.

A pure function of the rows, in numpy. Whether a model computes trees as it computes rows is for
`loops_cookbook.local.probe` to find out.

Source: tree attention, Miao et al. 2023 (SpecInfer, arXiv:2305.09781), used here for training.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from loops_cookbook.local.pad import Branches, Flat, MicroBatch

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How large packed micro-batches may be. A row that exceeds a bound stands alone."""

    max_tokens: int
    """Columns of all lines, padding included."""
    max_scored: int
    """Scored positions of all rows."""
    max_pairs: int
    """Squared widths of all lines: what the mask holds."""
    pairs_per_token: int
    """How many pairs of columns cost as much as one column."""

    def allow(self, *, lines: int, width: int, scored: int) -> bool:
        """Whether a micro-batch may be that large."""
        return (
            lines * width <= self.max_tokens
            and lines * width**2 <= self.max_pairs
            and scored <= self.max_scored
        )


@dataclass(frozen=True, slots=True)
class Tree:
    """Some rows in one piece: columns `start` to `end` - 1 of a `Forest`."""

    start: int
    end: int
    scored: int
    """Scored positions of its rows."""

    @property
    def width(self) -> int:
        """How many columns it has."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """All rows as trees, end to end: N columns, and P scored positions in ascending order."""

    trees: Sequence[Tree]
    ids_N: Ints
    positions_N: Ints
    """The place of each column in its rows."""
    ends_N: Ints
    """Behind the last column that sees this one."""
    places_P: Ints
    """In the `Flat`."""
    columns_P: Ints
    """Which column gives the logits of each."""

    def is_path(self, tree: Tree) -> bool:
        """Whether each column of a tree sees all that stand before it, as those of one row do."""
        return bool((self.ends_N[tree.start : tree.end] == tree.end).all())


def pack(flat: Flat, bounds: Bounds) -> Iterator[MicroBatch]:
    """Lay the rows out as trees, the widest first."""
    forest = grow(flat, bounds)
    starts = np.array([tree.start for tree in forest.trees], np.int64)
    tree_of_P = np.searchsorted(starts, forest.columns_P, side="right") - 1
    for lines in _lines(forest.trees, bounds):
        yield _micro_batch(forest, tree_of_P, lines)


def cost(batch: MicroBatch, bounds: Bounds) -> float:
    """What a micro-batch takes to compute, in tokens."""
    return batch.ids.size * (1 + batch.ids.shape[1] / bounds.pairs_per_token)


def grow(flat: Flat, bounds: Bounds) -> Forest:
    """Join rows into trees as far as that pays and is allowed."""
    starts_R, needed_R, scored_R = flat.starts_R, flat.needed_R(), flat.scored_R().tolist()
    columns = np.arange(needed_R.sum())
    ends_N = np.zeros_like(columns)
    column_of_T = np.zeros(len(flat.ids_T), np.int64)
    path = np.zeros(needed_R.max(initial=0), np.int64)
    trees: list[Tree] = []
    branches: list[tuple[int, int, int]] = []
    tree, depth, end = Tree(0, 0, 0), 0, 0
    for row, first, length, shared in _in_order(flat.ids_T, starts_R, needed_R):
        if not _joins(tree, length, shared, scored_R[row], bounds):
            trees.append(tree)
            tree, shared = Tree(end, end, 0), 0
        # What the row before read from here on, this one and those after it do not see.
        ends_N[path[shared:depth]] = end
        start, end, depth = end, end + length - shared, length
        path[shared:length] = columns[start:end]
        column_of_T[first : first + length] = path[:length]
        branches.append((first, shared, length - shared))
        tree = Tree(tree.start, end, tree.scored + scored_R[row])
    ends_N[path[:depth]] = end
    firsts, shares, news = np.array(branches, np.int64).reshape(-1, 3).T
    positions = columns[:end] + np.repeat(shares - news.cumsum() + news, news)
    places = np.flatnonzero(flat.is_scored_T)
    return Forest(
        trees=[*trees, tree] if end else [],
        ids_N=flat.ids_T[positions + np.repeat(firsts, news)],
        positions_N=positions,
        ends_N=ends_N[:end],
        places_P=places,
        columns_P=column_of_T[places],
    )


def _in_order(ids_T: Ints, starts_R: Ints, needed_R: Ints) -> Iterator[tuple[int, int, int, int]]:
    """Each needed row, its first id, how many are read, how many as in the row before it.

    Any order serves that leaves rows of one beginning together, as that of their bytes does.
    """
    starts, needed = starts_R.tolist(), needed_R.tolist()
    reads = {
        row: ids_T[starts[row] : starts[row] + needed[row]]
        for row in np.flatnonzero(needed_R).tolist()
    }
    before = ids_T[:0]
    for row in sorted(reads, key=lambda row: reads[row].tobytes()):
        read = reads[row]
        shared = min(len(before), len(read))
        differs = before[:shared] != read[:shared]
        if shared and differs[place := int(differs.argmax())]:
            shared = place
        yield row, starts[row], len(read), shared
        before = read


def _joins(tree: Tree, length: int, shared: int, scored: int, bounds: Bounds) -> bool:
    """Whether a row becomes a part of the tree before it, rather than a tree of its own."""
    grown = tree.width + length - shared
    added_pairs = grown**2 - tree.width**2 - length**2
    return tree.width == 0 or (
        bounds.allow(lines=1, width=grown, scored=tree.scored + scored)
        and added_pairs <= shared * bounds.pairs_per_token
    )


def _lines(trees: Sequence[Tree], bounds: Bounds) -> Iterator[list[list[int]]]:
    """The trees in each line of each micro-batch: the widest first, narrow ones share lines."""
    lines: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    width = scored = 0
    for place in sorted(range(len(trees)), key=lambda place: -trees[place].width):
        tree = trees[place]
        scored += tree.scored
        # The line with the most room comes first: what does not fit there fits in none.
        is_new = not rooms or -rooms[0][0] < tree.width
        if lines and not bounds.allow(lines=len(lines) + is_new, width=width, scored=scored):
            yield lines
            lines, rooms, is_new = [], [], True
        if not lines:
            width, scored = tree.width, tree.scored
        room, line = (-width, len(lines)) if is_new else heappop(rooms)
        if is_new:
            lines.append([])
        lines[line].append(place)
        heappush(rooms, (room + tree.width, line))
    if lines:
        yield lines


def _micro_batch(forest: Forest, tree_of_P: Ints, lines: Sequence[Sequence[int]]) -> MicroBatch:
    width = max(sum(forest.trees[place].width for place in places) for places in lines)
    ids, positions, ends = np.zeros((3, len(lines), width), np.int64)
    # What pads a line sees itself, since attention to nothing is not a number.
    ends[:] = np.arange(1, width + 1)
    line_of = np.full(len(forest.trees), -1)
    shift_of = np.zeros(len(forest.trees), np.int64)
    is_plain = True
    for line, places in enumerate(lines):
        column = 0
        for place in places:
            tree = forest.trees[place]
            shift = column - tree.start
            here, there = slice(column, column + tree.width), slice(tree.start, tree.end)
            ids[line, here] = forest.ids_N[there]
            positions[line, here] = forest.positions_N[there]
            ends[line, here] = forest.ends_N[there] + shift
            line_of[place], shift_of[place] = line, shift
            is_plain = is_plain and column == 0 and forest.is_path(tree)
            column += tree.width
    chosen = np.flatnonzero(line_of[tree_of_P] >= 0)
    tree_of = tree_of_P[chosen]
    cells, sources = np.unique(
        line_of[tree_of] * width + forest.columns_P[chosen] + shift_of[tree_of],
        return_inverse=True,
    )
    return MicroBatch(
        ids=ids,
        branches=None if is_plain else Branches(positions, ends),
        lines=cells // width,
        columns=cells % width,
        places=forest.places_P[chosen],
        sources=sources,
    )
