import pytest

pytest.importorskip("torch")

import torch

from loops_cookbook.local.sampling.spans import Span, Stack

pytestmark = pytest.mark.torch


def span(*tokens: float) -> Span:
    """Two layers, two heads, keys of width 3 and values of width 1: all tell the token."""
    told = torch.tensor(tokens, dtype=torch.float32)[:, None]
    return Span(told.expand(2, 2, -1, 3), -told.expand(2, 2, -1, 1))


def told(span: Span) -> list[float]:
    """The tokens, which all layers and heads must tell alike."""
    tokens = span.keys[0, 0, :, 0]
    assert torch.equal(span.keys, tokens[:, None].expand_as(span.keys))
    assert torch.equal(span.values, -tokens[:, None].expand_as(span.values))
    return tokens.tolist()


def test_a_part_is_what_stands_there() -> None:
    whole = span(1, 2, 3, 4)
    assert len(whole) == 4
    assert told(whole.part(1, 3)) == [2, 3]


def test_a_copy_has_memory_of_its_own() -> None:
    whole = Span(torch.ones(2, 2, 4, 3), torch.ones(2, 2, 4, 1))
    copied = whole.part(0, 2).copied()
    whole.keys.zero_()
    assert copied.keys.eq(1).all()
    assert copied.keys.untyped_storage().nbytes() == copied.keys.nbytes


class TestStack:
    def test_a_slot_holds_its_pieces_one_after_the_other(self) -> None:
        stack = Stack()
        stack.add(2, 8, span(0))
        stack.put(0, [span(1, 2), span(3)])
        stack.put(1, [span(4)])
        assert told(stack.span(0, 3)) == [1, 2, 3]
        assert told(stack.span(1, 1)) == [4]

    def test_what_is_held_stays_when_slots_and_columns_are_added(self) -> None:
        stack = Stack()
        stack.add(1, 2, span(0))
        stack.put(0, [span(1, 2)])
        stack.add(4, 9, span(0))
        stack.put(4, [span(*range(9))])
        assert told(stack.span(0, 2)) == [1, 2]
        assert told(stack.span(4, 9)) == list(range(9))

    def test_slots_are_closed_up(self) -> None:
        stack = Stack()
        stack.add(4, 2, span(0))
        for slot in range(4):
            stack.put(slot, [span(slot, slot)])
        stack.drop([3, 1])
        assert stack.slots == 2
        assert [told(stack.span(slot, 2)) for slot in range(2)] == [[3, 3], [1, 1]]

    def test_what_nobody_wrote_is_a_number_wherever_it_is_finite(self) -> None:
        """Memory happens to hold NaN, and a share of 0 of it was NaN and no 0."""
        stack = Stack()
        stack.add(1, 8, span(0))
        stack.keys.fill_(float("nan"))
        stack.put(0, [span(1, 2, 3)])
        stack.add(2, 8, span(0))
        stack.keys[:, 1:].fill_(float("nan"))
        stack.drop([0])
        stack.add(2, 8, span(0))
        stack.widen(5)
        assert stack.finite == 5
        assert stack.keys[:, :3, :, :5].isfinite().all()
        assert stack.keys[:, 1:3, :, :5].eq(0).all()
        assert told(stack.span(0, 3)) == [1, 2, 3]
