import numpy as np
import pytest

pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.local.pad import flatten, micro_batches, split
from loops_cookbook.local.requests import Row

pytestmark = pytest.mark.torch


def row(scored: list[bool]) -> Row:
    """Ids and targets that are nowhere else; advantage 1 where it is scored."""
    ids = np.arange(len(scored), dtype=np.int32)
    return Row(
        ids,
        ids.astype(np.int64) + 1,
        logprobs=np.zeros(len(scored), np.float32),
        advantages=np.array(scored, np.float32),
    )


def test_factors_are_advantages_or_weights_and_0_where_the_target_is_ignored() -> None:
    targets = np.array([-100, 4, 5])
    ids = np.array([1, 2, 3], np.int32)
    given_ = np.array([1, 0, 2], np.float32)
    policy = flatten([Row(ids, targets, logprobs=given_, advantages=given_)], is_supervised=False)
    assert policy.factors_TK[:, 0].tolist() == [0, 0, 2]
    assert policy.is_scored_T.tolist() == [False, False, True]
    supervised = flatten([Row(ids, targets, given_), Row(ids, targets)], is_supervised=True)
    assert supervised.factors_TK[:, 0].tolist() == [0, 0, 2, 0, 1, 1]
    assert supervised.sampler_logprobs_TK is None


def test_every_target_is_scored_on_request() -> None:
    ids = np.array([1, 2, 3], np.int32)
    flat = flatten(
        [Row(ids, weights=np.zeros(3, np.float32))], is_supervised=True, every_target=True
    )
    assert flat.targets_TK[:, 0].tolist() == [2, 3, -100]
    assert flat.is_scored_T.tolist() == [True, True, False]


def test_a_position_of_several_targets_is_scored_for_any_of_them() -> None:
    targets = np.array([[1, 2], [3, 4], [5, -100]])
    weights = np.array([[0, 1], [0, 0], [0, 1]], np.float32)
    flat = flatten([Row(np.array([1, 2, 3], np.int32), targets, weights)], is_supervised=True)
    assert flat.is_scored_T.tolist() == [True, False, False]


def test_values_split_into_the_shapes_of_the_targets() -> None:
    ids = np.array([1, 2], np.int32)
    values = np.arange(1, 5, dtype=np.float32)[:, None]
    parts = split(values, [Row(ids, np.array([1, 2])), Row(ids)])
    assert [part.tolist() for part in parts] == [[1, 2], [3, 0]]
    (wide,) = split(values.reshape(2, 2), [Row(ids, np.ones((2, 2), np.int64))])
    assert wide.tolist() == [[1, 2], [3, 4]]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(1, 20),
)
def test_each_scored_position_is_laid_out_once(
    rows: list[list[bool]], max_tokens: int, max_scored: int
) -> None:
    flat = flatten([row(scored) for scored in rows], is_supervised=False)
    places: list[int] = []
    for batch in micro_batches(flat, max_tokens=max_tokens, max_scored=max_scored):
        lines, width = batch.ids.shape
        assert lines == 1 or lines * width <= max_tokens
        assert lines == 1 or len(batch.places) <= max_scored
        # Ids count up in each row, so a scored position's id is its column, and so are those
        # before it.
        for line, column in zip(batch.lines, batch.columns, strict=True):
            assert batch.ids[line, : column + 1].tolist() == list(range(column + 1))
        assert batch.ids[batch.lines, batch.columns].tolist() == flat.ids_T[batch.places].tolist()
        assert set(batch.lines.tolist()) == set(range(lines))
        assert batch.sources.tolist() == list(range(len(batch.places)))
        assert batch.branches is None
        assert batch.columns.max() == width - 1
        places += batch.places.tolist()
    assert sorted(places) == np.flatnonzero(flat.is_scored_T).tolist()


def test_a_row_is_needed_up_to_its_last_scored_position() -> None:
    flat = flatten(
        [row([True, False, True, False]), row([False]), row([True])], is_supervised=False
    )
    assert flat.needed_R().tolist() == [3, 0, 1]
    assert flat.scored_R().tolist() == [2, 0, 1]
    assert flat.row_of_T.tolist() == [0, 0, 0, 0, 1, 2]


def test_rows_with_nothing_scored_are_not_computed() -> None:
    flat = flatten([row([False, False])] * 3, is_supervised=False)
    assert list(micro_batches(flat, max_tokens=8, max_scored=8)) == []
