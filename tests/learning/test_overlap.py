"""Held-out texts that are trained on too: found where they are, and nowhere else."""

from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.learning.overlap import NEAR, Shared, runs, shared, words

LONG = " ".join(f"word{i}" for i in range(60))

texts = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=30).map(" ".join)


def test_case_spacing_and_spelling_of_characters_do_not_make_another_text() -> None:
    assert shared(["IS  7\nprime? \uff21"], ["other", "is 7 prime? a"]) == [Shared(0, 1, "same")]


def test_a_mark_makes_another_text() -> None:
    assert shared(["3 + 2"], ["3 - 2"]) == []


def test_a_long_text_with_one_word_changed_is_near() -> None:
    assert shared([LONG.replace("word30", "else")], [LONG]) == [Shared(0, 0, "near")]


def test_a_short_text_with_one_word_changed_is_another() -> None:
    assert shared(["how many orders are paid today"], ["how many orders are open today"]) == []


def test_the_first_of_several_that_are_the_same_is_named() -> None:
    assert shared(["x"], ["y", "x", "x"]) == [Shared(0, 1, "same")]


def test_texts_without_words_are_near_to_nothing() -> None:
    assert shared(["!!", ""], ["??"]) == []


@given(st.lists(texts, max_size=6), st.lists(texts, max_size=8))
def test_looking_at_the_rarest_runs_misses_no_pair(own: list[str], others: list[str]) -> None:
    """The index finds exactly what comparing every pair finds."""

    def near(one: str, other: str) -> bool:
        a, b = runs(words(one)), runs(words(other))
        return bool(a and b) and len(a & b) >= NEAR * len(a | b)

    found = {each.place for each in shared(own, others)}
    same = {i for i, text in enumerate(own) if words(text) in map(words, others)}
    assert found == same | {i for i, t in enumerate(own) if any(near(t, o) for o in others)}
