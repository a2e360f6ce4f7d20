from dataclasses import dataclass

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.local.sampling.shelf import Group, Shelf
from loops_cookbook.local.sampling.spans import Span

pytestmark = pytest.mark.torch

LAYERS, HEADS, SHARING, WIDTH = 2, 2, 3, 4


@dataclass(eq=False)
class Owner:
    """A row, and what it ought to remember: [L, H, T, D]."""

    keys: torch.Tensor
    values: torch.Tensor
    stem: int = 0


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def group(length: int, count: int) -> Group[Owner]:
    """Rows that begin with a made-up prompt in two pieces."""
    prompt = Span(draw(LAYERS, HEADS, length, WIDTH), draw(LAYERS, HEADS, length, WIDTH))
    owners = [Owner(prompt.keys, prompt.values, stem=length) for _ in range(count)]
    return Group([prompt.part(0, 1), prompt.part(1, length)], owners)


def step(shelf: Shelf[Owner]) -> None:
    """Give each row one more token, and compare what it sees with plain attention."""
    rows = len(shelf)
    shelf.begin_step()
    for layer in range(LAYERS):
        queries = draw(rows, HEADS, SHARING, WIDTH)
        keys, values = draw(rows, HEADS, WIDTH), draw(rows, HEADS, WIDTH)
        seen = shelf.attend(layer, queries, keys, values)
        for row, owner in enumerate(shelf.owners):
            if layer == 0:
                pad = draw(LAYERS, HEADS, 1, WIDTH)
                owner.keys = torch.cat((owner.keys, pad), 2)
                owner.values = torch.cat((owner.values, pad), 2)
            owner.keys[layer, :, -1], owner.values[layer, :, -1] = keys[row], values[row]
            shares = (queries[row] @ owner.keys[layer].transpose(1, 2)).softmax(-1)
            assert torch.allclose(seen[row], shares @ owner.values[layer], atol=1e-6)


def shelf_of(*groups: Group[Owner]) -> Shelf[Owner]:
    shelf = Shelf[Owner](
        columns=32, stem_columns=16 if any(len(group.owners) > 1 for group in groups) else 0
    )
    shelf.join(groups)
    return shelf


def test_rows_of_one_length_see_what_they_would_see_alone() -> None:
    for shelf in (shelf_of(group(3, 2), group(3, 2)), shelf_of(group(3, 1), group(3, 1))):
        step(shelf)
        step(shelf)


groups = st.lists(st.tuples(st.integers(2, 5), st.integers(1, 4)), min_size=1, max_size=3)
"""Lengths of prompts and how many rows begin with each."""
acts = st.lists(
    st.one_of(
        st.tuples(st.just("join"), groups),
        st.tuples(st.just("drop"), st.sets(st.integers(0, 9))),
        st.tuples(st.just("step"), st.none()),
    ),
    max_size=10,
)


@settings(deadline=None, max_examples=25)
@given(st.booleans(), acts)
def test_rows_see_what_they_would_see_alone_however_others_come_and_go(
    has_stems: bool, acts: list[tuple[str, object]]
) -> None:
    torch.manual_seed(0)
    shelf = Shelf[Owner](columns=16, stem_columns=16 if has_stems else 0)
    shelf.join([group(3, 2 if has_stems else 1)])
    for act, of in acts:
        if act == "join":
            assert isinstance(of, list)
            shelf.join([group(length, count if has_stems else 1) for length, count in of])
        elif act == "drop":
            assert isinstance(of, set)
            ended = {slot for slot in of if slot < len(shelf)}
            if len(ended) < len(shelf):
                kept = [owner for slot, owner in enumerate(shelf.owners) if slot not in ended]
                shelf.drop(ended)
                assert set(shelf.owners) == set(kept)
        else:
            step(shelf)
    step(shelf)
    for slot, owner in enumerate(shelf.owners):
        own = shelf.own(slot)
        assert torch.equal(own.keys, owner.keys[:, :, owner.stem if has_stems else 0 :])
        assert torch.equal(own.values, owner.values[:, :, owner.stem if has_stems else 0 :])


@pytest.mark.parametrize("counts", [(1, 1), (2, 3)])
def test_positions_go_on_from_the_prompts(counts: tuple[int, int]) -> None:
    shelf = shelf_of(group(3, counts[0]), group(5, counts[1]))
    assert shelf.positions().tolist() == [3] * counts[0] + [5] * counts[1]
    step(shelf)
    assert shelf.positions().tolist() == [4] * counts[0] + [6] * counts[1]
