"""What a worker process answers to one request."""

import math
import pickle
import sys
from collections.abc import Callable

import pytest

from loops_cookbook.episodes.worker import LENGTH_BYTES, answer, framed


class Unreadable(Exception):
    """An exception that pickle writes and cannot read back."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def raise_unreadable() -> None:
    raise Unreadable("a", "b")


def asked(function: Callable[..., object], *args: object) -> tuple[str, object, str]:
    kind, value, text = pickle.loads(answer(pickle.dumps((function, args))))
    return kind, value, text


def test_a_value_is_returned() -> None:
    assert asked(math.factorial, 5) == ("returned", 120, "")


def test_an_exception_is_raised_with_its_traceback() -> None:
    kind, value, text = asked(math.sqrt, -1)
    assert (kind, type(value)) == ("raised", ValueError)
    assert text.startswith("Traceback")


def test_an_exception_that_cannot_be_read_back_is_told_as_text() -> None:
    kind, value, text = asked(raise_unreadable)
    assert (kind, value) == ("failed", None)
    assert text.rstrip().endswith("Unreadable: ab")


def test_an_exit_is_told_as_text() -> None:
    kind, _, text = asked(sys.exit, 3)
    assert kind == "failed"
    assert text.rstrip().endswith("SystemExit: 3")


def test_a_result_that_cannot_be_pickled_is_unsendable() -> None:
    kind, _, text = asked(memoryview, b"bytes")
    assert kind == "unsendable"
    assert "memoryview" in text


@pytest.mark.parametrize("request_", [b"", b"no pickle", pickle.dumps(math.sqrt)[:-3]])
def test_a_request_that_cannot_be_read_is_unknown(request_: bytes) -> None:
    kind, value, _ = pickle.loads(answer(request_))
    assert (kind, value) == ("unknown", None)


def test_a_frame_begins_with_its_length() -> None:
    assert framed(b"abc") == (3).to_bytes(LENGTH_BYTES, "big") + b"abc"
