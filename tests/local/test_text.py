from pathlib import Path

import pytest

pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.errors import ModelError
from loops_cookbook.local.text import ends_in_stop, load_decode

pytestmark = pytest.mark.torch


def decode_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def test_text_holds_special_tokens(model_dir: Path) -> None:
    assert load_decode(model_dir)([3, 4, 2]) == "ab<end>"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer can be read from"):
        load_decode(tmp_path)


def test_a_stop_string_is_found_across_tokens_once_it_is_whole() -> None:
    ids = list("so: ün".encode())
    found = [ends_in_stop(ids[:end], ["ün", "??"], decode_bytes) for end in range(1, len(ids) + 1)]
    assert found == [False] * (len(ids) - 1) + [True]


def test_without_stop_strings_nothing_is_decoded() -> None:
    def decode(ids: object) -> str:
        raise AssertionError

    assert not ends_in_stop([1], [], decode)


@settings(deadline=None)
@given(st.text("abé", min_size=1, max_size=40), st.text("abé", min_size=1, max_size=4))
def test_the_tail_says_what_the_whole_text_says(text: str, stop: str) -> None:
    ids = list(text.encode())
    first = next((end for end in range(1, len(ids) + 1) if stop in decode_bytes(ids[:end])), None)
    found = next(
        (end for end in range(1, len(ids) + 1) if ends_in_stop(ids[:end], [stop], decode_bytes)),
        None,
    )
    assert found == first
