import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st
from tests.local.sampling.builders import made_policy, ticket

from loops_cookbook.local.sampling.room import Room, columns_of, room_for, stem_columns_of

pytestmark = pytest.mark.torch


def room(*, rows: int = 1000, is_shared: bool = True) -> Room:
    return Room(rows=rows, token=10, row=5, is_shared=is_shared, held_tokens=0)


def test_a_shared_prompt_is_counted_once() -> None:
    some = ticket([1] * 80, limit=12)
    assert room().needed(some, 3) == 128 * 10 + 3 * (16 * 10 + 5)
    assert room(is_shared=False).needed(some, 3) == 3 * (80 * 10 + 12 * 10 + 5)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 20))
def test_what_is_counted_holds_the_padding_of_rows_and_of_prompts(
    prompt: int, limit: int, count: int
) -> None:
    """Rows were counted bare, while each took up to twice that, and prompts any multiple."""
    its = room().needed(ticket([1] * prompt, limit=limit), count)
    alone = columns_of(prompt + limit)
    held = alone if count == 1 else stem_columns_of(prompt) + count * columns_of(limit)
    assert its >= held * 10 + count * 5


@given(st.integers(0, 2000), st.booleans(), st.integers(1, 9), st.integers(1, 9))
def test_as_many_fit_as_fit_and_one_at_least(
    rows: int, is_shared: bool, prompt: int, limit: int
) -> None:
    its, some = room(rows=rows, is_shared=is_shared), ticket([1] * prompt, limit=limit)
    count = its.fitting(some)
    assert count == 1 or its.needed(some, count) <= rows
    assert its.needed(some, count + 1) > rows


@given(st.integers(5, 2000))
def test_the_longest_text_that_fits_is_told(rows: int) -> None:
    its = room(rows=rows, is_shared=False)
    for tokens, fits in ((its.most_tokens, True), (its.most_tokens + 1, False)):
        if tokens >= 2:
            some = ticket([1] * (tokens - 1), limit=1)
            assert (its.needed(some, 1) <= rows) == fits


def test_half_is_for_what_is_held_where_anything_is() -> None:
    policy = made_policy("Llama")
    token = 2 * 2 * 2 * 8 * 4
    holds = room_for(policy, is_shared=True, holds=True, lent_bytes=100 * token)
    assert (holds.rows, holds.token, holds.held_tokens) == (50 * token, token, 50)
    whole = room_for(policy, is_shared=True, holds=False, lent_bytes=100 * token)
    assert (whole.rows, whole.held_tokens) == (100 * token, 0)
    assert whole.most_scored == 100 * token // (16 * 41)
