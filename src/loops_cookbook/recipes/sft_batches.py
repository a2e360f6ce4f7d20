"""Which rows each update of an SFT run trains on: a pure function of their sizes and a seed.

Each epoch takes every row once, in an order of its own. A batch holds a number of rows, or as many
as fit a number of tokens, and never rows of two epochs: the last of an epoch may be smaller.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loops_cookbook.config.sft import SFTTrainingTable
from loops_cookbook.rollouts.order import task_order


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The rows of one update, by their places among the usable ones."""

    epoch: int
    """From 0."""
    rows: tuple[int, ...]
    seen: int
    """Rows of its epoch that are trained once this batch is, its own included."""


def batches(sizes: Sequence[int], training: SFTTrainingTable) -> list[BatchPlan]:
    """The batches of a whole run, in order.

    Args:
        sizes: tokens of each row.
        training: how they are ordered and how large a batch is.
    """
    planned: list[BatchPlan] = []
    for epoch in range(training.epochs):
        order = (
            task_order(len(sizes), training.seed, epoch)
            if training.shuffle
            else tuple(range(len(sizes)))
        )
        seen = 0
        for rows in _cut(order, sizes, training):
            seen += len(rows)
            planned.append(BatchPlan(epoch, rows, seen))
    return planned


def _cut(
    order: Sequence[int], sizes: Sequence[int], training: SFTTrainingTable
) -> Iterator[tuple[int, ...]]:
    batch: list[int] = []
    tokens = 0
    for row in order:
        is_full = (
            len(batch) == training.batch_size
            if training.batch_tokens is None
            else tokens + sizes[row] > training.batch_tokens
        )
        if batch and is_full:
            yield tuple(batch)
            batch, tokens = [], 0
        batch.append(row)
        tokens += sizes[row]
    if batch:
        yield tuple(batch)
