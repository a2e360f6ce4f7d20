"""Rows as trees: each scored position has one column, which sees its own row and nothing else."""

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("torch")  # `local` is an extra of its own

from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.local.pack import Bounds, cost, grow, pack
from loops_cookbook.local.pad import Flat, MicroBatch, flatten
from loops_cookbook.local.requests import Row

pytestmark = pytest.mark.torch

WIDE = Bounds(max_tokens=10_000, max_scored=10_000, max_pairs=10**8, pairs_per_token=10**6)

ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=8),
    min_size=1,
    max_size=12,
)
"""Rows of few words, which share beginnings often: (id, is scored) at each position."""
BOUNDS = st.builds(
    Bounds,
    max_tokens=st.integers(1, 60),
    max_scored=st.integers(1, 40),
    max_pairs=st.integers(1, 900),
    pairs_per_token=st.integers(1, 300),
)


def flat_of(rows: Sequence[Sequence[tuple[int, bool]]]) -> Flat:
    return flatten(
        [
            Row(
                np.array([word for word, _ in row], np.int32),
                np.zeros(len(row), np.int64),
                np.array([is_scored for _, is_scored in row], np.float32),
            )
            for row in rows
        ],
        is_supervised=True,
    )


def group(prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> Flat:
    """Rows of one prompt whose answers are scored, the last token of each as a target alone."""
    rows = [(*prompt, *answer)[:-1] for answer in answers]
    return flat_of([[(word, k >= len(prompt) - 1) for k, word in enumerate(row)] for row in rows])


def beginnings(flat: Flat) -> dict[int, list[int]]:
    """For each scored place, what stands up to it in its row."""
    starts, rows = flat.starts_R, flat.row_of_T
    return {
        place: flat.ids_T[starts[rows[place]] : place + 1].tolist()
        for place in np.flatnonzero(flat.is_scored_T).tolist()
    }


def seen(batch: MicroBatch, line: int, column: int) -> np.ndarray:
    """The columns that one sees, by the rule that the mask follows."""
    before = np.arange(column + 1)
    return before if batch.branches is None else before[batch.branches.ends[line, before] > column]


@settings(deadline=None)
@given(ROWS, BOUNDS)
def test_each_scored_position_has_one_column_that_sees_its_own_row(
    rows: list[list[tuple[int, bool]]], bounds: Bounds
) -> None:
    flat = flat_of(rows)
    found: list[tuple[int, list[int]]] = []
    for batch in pack(flat, bounds):
        for place, source in zip(batch.places, batch.sources, strict=True):
            line, column = batch.lines[source], batch.columns[source]
            columns = seen(batch, line, column)
            found.append((place, batch.ids[line, columns].tolist()))
            if batch.branches is not None:
                positions = batch.branches.positions[line, columns]
                assert positions.tolist() == list(range(len(columns)))
    # A list of pairs, so that a place that is computed twice is seen.
    assert sorted(found) == sorted(beginnings(flat).items())


@settings(deadline=None)
@given(ROWS, BOUNDS)
def test_micro_batches_stay_within_their_bounds(
    rows: list[list[tuple[int, bool]]], bounds: Bounds
) -> None:
    flat = flat_of(rows)
    for batch in pack(flat, bounds):
        lines, width = batch.ids.shape
        is_alone = len(set(flat.row_of_T[batch.places].tolist())) == 1
        assert is_alone or lines * width <= bounds.max_tokens
        assert is_alone or lines * width**2 <= bounds.max_pairs
        assert is_alone or len(batch.places) <= bounds.max_scored
        assert set(batch.lines.tolist()) == set(range(lines))


@settings(deadline=None)
@given(ROWS, BOUNDS)
def test_every_column_sees_itself(rows: list[list[tuple[int, bool]]], bounds: Bounds) -> None:
    for batch in pack(flat_of(rows), bounds):
        if batch.branches is not None:
            assert (batch.branches.ends > np.arange(batch.ids.shape[1])).all()


@settings(deadline=None)
@given(ROWS)
def test_where_sharing_is_free_each_beginning_is_computed_once(
    rows: list[list[tuple[int, bool]]],
) -> None:
    flat = flat_of(rows)
    distinct = {tuple(b[:k]) for b in beginnings(flat).values() for k in range(1, len(b) + 1)}
    assert len(grow(flat, WIDE).ids_N) == len(distinct)


def test_a_group_is_its_prompt_once_and_every_answer() -> None:
    answers = [[5, 6, 7], [5, 8, 9], [6, 1, 2]]
    (batch,) = pack(group([1, 2, 3, 4], answers), WIDE)
    assert batch.ids.tolist() == [[1, 2, 3, 4, 5, 6, 8, 6, 1]]
    assert batch.branches.positions.tolist() == [[0, 1, 2, 3, 4, 5, 5, 4, 5]]
    assert batch.branches.ends.tolist() == [[9, 9, 9, 9, 7, 6, 7, 9, 9]]
    # Nine answer tokens, of which the first of all three and the second of two share logits.
    assert len(batch.places) == 9
    assert batch.columns.tolist() == [3, 4, 5, 6, 7, 8]


def test_a_batch_of_groups_costs_a_fraction_of_its_rows() -> None:
    rng = np.random.default_rng(0)
    rows = [
        [(word, k >= 23) for k, word in enumerate([*prompt, answer])]
        for prompt in rng.integers(0, 1000, (8, 24)).tolist()
        for answer in rng.permutation(16).tolist()
    ]
    bounds = Bounds(max_tokens=8192, max_scored=8192, max_pairs=10**6, pairs_per_token=288)
    (batch,) = pack(flat_of(rows), bounds)
    assert batch.ids.shape == (8, 40)
    assert len(batch.lines) == 8 * 17
    assert cost(batch, bounds) == pytest.approx(320 * (1 + 40 / 288))


def test_rows_that_are_equal_are_one_row() -> None:
    (batch,) = pack(group([1, 2], [[3, 4]] * 5), WIDE)
    assert batch.ids.tolist() == [[1, 2, 3]]
    assert batch.branches is None
    assert batch.sources.tolist() == [0, 1] * 5


def test_a_row_that_goes_on_from_another_needs_no_mask() -> None:
    flat = flat_of([[(1, False), (2, True)], [(1, False), (2, False), (3, True)]])
    (batch,) = pack(flat, WIDE)
    assert batch.ids.tolist() == [[1, 2, 3]]
    assert batch.branches is None
    assert batch.columns.tolist() == [1, 2]


def test_narrow_trees_fill_the_line_beside_a_wide_one() -> None:
    flat = flat_of([[(word, True)] * width for word, width in ((1, 6), (2, 3), (3, 2), (4, 1))])
    (batch,) = pack(flat, WIDE)
    assert batch.ids.tolist() == [[1] * 6, [2, 2, 2, 3, 3, 4]]
    assert batch.branches.ends.tolist() == [[6] * 6, [3, 3, 3, 5, 5, 6]]
    assert batch.branches.positions.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 0]]


def test_a_short_beginning_is_not_worth_a_wide_mask() -> None:
    flat = group([1], [[word] * 20 for word in (2, 3)])
    cheap, dear = (Bounds(10_000, 10_000, 10**8, pairs_per_token=pairs) for pairs in (10_000, 10))
    assert [len(grow(flat, bounds).trees) for bounds in (cheap, dear)] == [1, 2]


def test_rows_with_nothing_scored_are_not_computed() -> None:
    assert list(pack(flat_of([[(1, False)], [(2, False)]]), WIDE)) == []
