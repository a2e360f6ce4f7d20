import pytest

pytest.importorskip("torch")

from tests.local.sampling.builders import draft

from loops_cookbook.local.errors import NotFinite
from loops_cookbook.local.requests import Completion

pytestmark = pytest.mark.torch


def decode(ids: object) -> str:
    assert isinstance(ids, list)
    return "".join("abcdefgh"[token] for token in ids)


def test_a_draft_is_going_until_its_limit() -> None:
    some = draft([1], limit=2)
    some.take(3, -0.5, decode)
    assert some.is_going
    some.take(4, -0.25, decode)
    assert not some.is_going
    assert some.finished(decode) == Completion([3, 4], [-0.5, -0.25], "length", "de")


def test_a_stop_id_ends_it_also_as_the_last_token() -> None:
    some = draft([1], limit=1, stop_ids=[3])
    some.take(3, -0.5, decode)
    assert some.ended == "stop"


def test_one_that_nobody_waits_for_is_not_going() -> None:
    some = draft([1])
    some.is_left = True
    assert not some.is_going


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_a_logprob_that_is_no_number_is_told(logprob: float) -> None:
    with pytest.raises(NotFinite, match="a sampled token has logprob"):
        draft([1]).take(3, logprob, decode)
