"""Rows become padded micro-batches of bounded size: the plain way to lay out training data.

`flatten` joins the rows of a request end to end and says which positions are scored.
`micro_batches` lays rows out one to a line, cut after the last scored position and padded at the
end; a row without a scored position is never computed. `loops_cookbook.local.pack` yields
`MicroBatch` values over the same `Flat` too, and computes what rows share once. Dimensions: T
positions of all rows, R rows, K targets at each position.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loops_cookbook.local.requests import IGNORED_TARGET, Row


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """The rows of one request, end to end."""

    ids_T: npt.NDArray[np.int64]
    targets_TK: npt.NDArray[np.int64]
    factors_TK: npt.NDArray[np.float32]
    """Weights or advantages, 0 where the target is ignored."""
    sampler_logprobs_TK: npt.NDArray[np.float32] | None
    """For policy losses, which have K = 1."""
    is_scored_T: npt.NDArray[np.bool_]
    lengths_R: npt.NDArray[np.int64]

    @property
    def starts_R(self) -> npt.NDArray[np.int64]:
        """Where each row begins."""
        return self.lengths_R.cumsum() - self.lengths_R

    @property
    def row_of_T(self) -> npt.NDArray[np.int64]:
        """The row of each position."""
        return np.repeat(np.arange(len(self.lengths_R)), self.lengths_R)

    def needed_R(self) -> npt.NDArray[np.int64]:
        """How much of each row must be read: up to its last scored position, or nothing."""
        row_of_T = self.row_of_T
        columns_T = np.arange(len(self.ids_T)) - self.starts_R[row_of_T]
        needed_R = np.zeros(len(self.lengths_R), np.int64)
        np.maximum.at(needed_R, row_of_T, np.where(self.is_scored_T, columns_T + 1, 0))
        return needed_R

    def scored_R(self) -> npt.NDArray[np.int64]:
        """How many positions of each row are scored."""
        return np.bincount(self.row_of_T[self.is_scored_T], minlength=len(self.lengths_R))


@dataclass(frozen=True, slots=True, eq=False)
class Branches:
    """How the lines of a micro-batch are read, where they are more than one row each."""

    positions: npt.NDArray[np.int64]
    """int64[B, width], the place of each column in the rows that it belongs to."""
    ends: npt.NDArray[np.int64]
    """int64[B, width]. Column j is seen from the columns j to `ends[j]` - 1 and from no others."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some rows as the model reads them, and the positions in them that are scored."""

    ids: npt.NDArray[np.int64]
    """int64[B, width], padded at the end."""
    branches: Branches | None
    """None: each line is one row, whose columns see all that stands before them."""
    lines: npt.NDArray[np.int64]
    """int64[U], the line of each position whose logits are needed."""
    columns: npt.NDArray[np.int64]
    """int64[U], its column."""
    places: npt.NDArray[np.int64]
    """int64[M], the scored positions' places in the `Flat`."""
    sources: npt.NDArray[np.int64]
    """int64[M], which of the U gives the logits of each."""


def flatten(rows: Sequence[Row], *, is_supervised: bool, every_target: bool = False) -> Flat:
    """Join rows and find the scored positions: those whose weight or advantage is not 0.

    Args:
        rows: at least one, as `check_rows` lets them pass.
        is_supervised: factors are weights (1 where a row has none), else advantages.
        every_target: score every target that is not ignored, whatever its factor.
    """
    targets_TK = np.concatenate([_targets(row) for row in rows])
    is_target_TK = targets_TK != IGNORED_TARGET
    if is_supervised:
        streams = [
            np.ones(len(row.input_ids) * targets_TK.shape[1], np.float32)
            if row.weights is None
            else row.weights.ravel()
            for row in rows
        ]
    else:
        streams = [row.advantages for row in rows if row.advantages is not None]
    given_TK = np.concatenate(streams).reshape(targets_TK.shape)
    factors_TK = np.where(is_target_TK, given_TK, np.float32(0))
    logprobs = [] if is_supervised else [row.logprobs for row in rows if row.logprobs is not None]
    return Flat(
        ids_T=np.concatenate([row.input_ids for row in rows]).astype(np.int64),
        targets_TK=targets_TK,
        factors_TK=factors_TK,
        sampler_logprobs_TK=np.concatenate(logprobs)[:, None] if logprobs else None,
        is_scored_T=(is_target_TK if every_target else factors_TK != 0).any(1),
        lengths_R=np.array([len(row.input_ids) for row in rows]),
    )


def split(values_TK: npt.NDArray[np.float32], rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
    """One array a row, of the shape of its targets; 0 where a next token was wanted and none is."""
    parts: list[npt.NDArray[np.float32]] = []
    end = 0
    for row in rows:
        start, end = end, end + len(row.input_ids)
        targets = row.input_ids if row.target_ids is None else row.target_ids
        part = values_TK[start:end].reshape(targets.shape)
        if row.target_ids is None:
            part = np.append(part[:-1], np.float32(0))
        parts.append(part)
    return parts


def micro_batches(flat: Flat, *, max_tokens: int, max_scored: int) -> Iterator[MicroBatch]:
    """Lay the rows out, longest first.

    Args:
        flat: the rows.
        max_tokens: bound of a micro-batch's tokens, padding included.
        max_scored: bound of its scored positions. A row that exceeds a bound stands alone.
    """
    row_of_T, starts_R, needed_R = flat.row_of_T, flat.starts_R, flat.needed_R()
    for rows in _groups(needed_R, flat.scored_R(), max_tokens=max_tokens, max_scored=max_scored):
        line_of_R = np.full(len(needed_R), -1)
        line_of_R[rows] = np.arange(len(rows))
        places = np.flatnonzero(flat.is_scored_T & (line_of_R[row_of_T] >= 0))
        columns = np.arange(needed_R[rows].max())
        is_row = columns < needed_R[rows][:, None]
        source = np.where(is_row, starts_R[rows][:, None] + columns, 0)
        yield MicroBatch(
            ids=np.where(is_row, flat.ids_T[source], 0),
            branches=None,
            lines=line_of_R[row_of_T[places]],
            columns=places - starts_R[row_of_T[places]],
            places=places,
            sources=np.arange(len(places)),
        )


def _groups(
    needed_R: npt.NDArray[np.int64],
    scored_R: npt.NDArray[np.int64],
    *,
    max_tokens: int,
    max_scored: int,
) -> Iterator[npt.NDArray[np.int64]]:
    """Rows that go together, in order of falling length, so that the first sets the width."""
    group: list[int] = []
    width = scored = 0
    for row in np.argsort(-needed_R, kind="stable").tolist():
        if needed_R[row] == 0:
            break
        scored += int(scored_R[row])
        if group and ((len(group) + 1) * width > max_tokens or scored > max_scored):
            yield np.array(group)
            group = []
        if not group:
            width, scored = int(needed_R[row]), int(scored_R[row])
        group.append(row)
    if group:
        yield np.array(group)


def _targets(row: Row) -> npt.NDArray[np.int64]:
    """int64[N, K]; without targets the next token, and nothing after the last."""
    if row.target_ids is None:
        return np.append(row.input_ids[1:].astype(np.int64), IGNORED_TARGET)[:, None]
    return row.target_ids.reshape(len(row.input_ids), -1)
