import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.local.sampling.prefixes import Prefixes
from loops_cookbook.local.sampling.spans import Span

pytestmark = pytest.mark.torch

Text = list[int]
texts = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def span(text: Text, start: int = 0) -> Span:
    """Each token's memory tells of all that stands up to it, as a model's does."""
    told = [hash(tuple(text[: place + 1])) % 10**6 for place in range(start, len(text))]
    keys = torch.tensor(told, dtype=torch.float64).reshape(1, 1, -1, 1)
    return Span(keys, -keys)


def found(prefixes: Prefixes, text: Text, weights: str = "live") -> int:
    """How much of a text is held; what is held must be its own."""
    spans = prefixes.find(weights, text)
    length = sum(map(len, spans))
    if spans:
        keys = torch.cat([some.keys for some in spans], 2)
        assert torch.equal(keys, span(text[:length]).keys)
    return length


def common(one: Text, other: Text) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_nothing_is_found_at_first() -> None:
    prefixes = Prefixes(100)
    assert prefixes.find("live", [1, 2]) == []


@settings(deadline=None)
@given(st.lists(texts, max_size=12), texts)
def test_the_longest_beginning_of_any_text_is_found(held: list[Text], asked: Text) -> None:
    prefixes = Prefixes(10**6)
    for text in held:
        prefixes.hold("live", text, span(text))
    assert found(prefixes, asked) == max((common(text, asked) for text in held), default=0)


@settings(deadline=None)
@given(st.lists(texts, max_size=12))
def test_what_texts_share_is_held_once(held: list[Text]) -> None:
    prefixes = Prefixes(10**6)
    for text in held:
        prefixes.hold("live", text, span(text))
    beginnings = {tuple(text[:end]) for text in held for end in range(1, len(text) + 1)}
    assert prefixes.tokens == len(beginnings)


@settings(deadline=None)
@given(st.lists(st.tuples(texts, st.booleans()), max_size=25), st.integers(1, 12))
def test_the_bound_is_kept_and_what_is_found_is_right(
    acts: list[tuple[Text, bool]], most: int
) -> None:
    prefixes = Prefixes(most)
    for text, is_asked in acts:
        if is_asked:
            found(prefixes, text)
        else:
            start = found(prefixes, text)
            prefixes.hold("live", text, span(text, start))
            assert found(prefixes, text) == (len(text) if len(text) <= most else start)
        assert prefixes.tokens <= most
        held = {id(node): node for node in prefixes._nodes}  # pyright: ignore[reportPrivateUsage]
        assert prefixes.tokens == sum(len(node.ids) for node in held.values())


def test_what_was_used_least_recently_goes_first() -> None:
    prefixes = Prefixes(6)
    for text in ([1, 1, 1], [2, 2, 2]):
        prefixes.hold("live", text, span(text))
    found(prefixes, [1, 1])
    prefixes.hold("live", [3], span([3]))
    assert [found(prefixes, text) for text in ([1, 1, 1], [2, 2, 2], [3])] == [3, 0, 1]


def test_a_beginning_stays_as_long_as_anything_that_hangs_on_it() -> None:
    prefixes = Prefixes(5)
    for text in ([1, 1, 2], [1, 1, 3], [1, 1, 4]):
        prefixes.hold("live", text, span(text))
    prefixes.hold("live", [1, 1, 5], span([1, 1, 5]))
    assert [found(prefixes, [1, 1, last]) for last in (2, 3, 4, 5)] == [2, 3, 3, 3]


def test_an_end_is_held_where_its_beginning_is() -> None:
    prefixes = Prefixes(10)
    prefixes.hold("live", [1, 2, 3, 4], span([1, 2, 3, 4], 2))
    assert found(prefixes, [1, 2, 3, 4]) == 0
    prefixes.hold("live", [1, 2], span([1, 2]))
    prefixes.hold("live", [1, 2, 3, 4], span([1, 2, 3, 4], 2))
    assert found(prefixes, [1, 2, 3, 4]) == 4


def test_each_set_of_weights_has_its_own() -> None:
    prefixes = Prefixes(10)
    prefixes.hold("live", [1, 2], span([1, 2]))
    prefixes.hold("base", [1, 3], span([1, 3]))
    assert (found(prefixes, [1, 2]), found(prefixes, [1, 2], "base")) == (2, 1)
    prefixes.forget("live")
    assert (found(prefixes, [1, 2]), found(prefixes, [1, 3], "base")) == (0, 2)
    assert prefixes.tokens == 2
    prefixes.forget("live")


def test_what_is_let_go_is_freed() -> None:
    prefixes = Prefixes(4)
    whole = span([1, 2, 3, 4])
    prefixes.hold("live", [1, 2, 3, 4], whole)
    prefixes.hold("live", [1, 2, 5], span([1, 2, 5]))
    (held,) = prefixes.find("live", [1, 2])
    assert held.keys.untyped_storage().nbytes() == 2 * 8


def test_without_room_nothing_is_held() -> None:
    prefixes = Prefixes(0)
    prefixes.hold("live", [1], span([1]))
    assert prefixes.find("live", [1]) == []
