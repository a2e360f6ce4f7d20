import pytest

pytest.importorskip("torch")

from tests.local.sampling.builders import ticket

from loops_cookbook.local.requests import Sampled, TokenScore
from loops_cookbook.local.sampling.draw import UniformNoise

pytestmark = pytest.mark.torch

NOISE = UniformNoise()


def decode(_: object) -> str:
    return "text"


def test_completions_begin_in_parts_and_each_has_noise_of_its_own() -> None:
    some = ticket(n=3, limit=4)
    drafts = some.begin(2, NOISE) + some.begin(1, NOISE)
    assert some.waiting == 0
    assert some.drafts == drafts
    expected = [NOISE.draw(7, place, 4).tolist() for place in range(3)]
    assert [draft.uniforms.tolist() for draft in drafts] == expected


def test_it_has_ended_when_all_completions_have() -> None:
    some = ticket(n=2, limit=1)
    for _ in range(2):
        assert not some.is_ended
        (draft,) = some.begin(1, NOISE)
        assert not some.is_ended
        draft.take(5, -1.0, decode)
    assert some.is_ended
    some.prompt_scores = [None, {3: TokenScore(-1.0, 1)}]
    outcome = some.outcome(decode)
    assert isinstance(outcome, Sampled)
    assert [completion.ids for completion in outcome.completions] == [[5], [5]]
    assert outcome.prompt_scores == some.prompt_scores


def test_one_that_is_left_has_nothing_more_to_do() -> None:
    some = ticket(n=3)
    (draft,) = some.begin(1, NOISE)
    some.leave()
    assert (some.is_ended, some.waiting, draft.is_going) == (True, 0, False)


def test_one_that_failed_comes_to_its_fault() -> None:
    some = ticket(n=3)
    (draft,) = some.begin(1, NOISE)
    fault = RuntimeError("no memory")
    some.fail(fault)
    assert (some.is_ended, some.is_left, draft.is_going) == (True, False, False)
    assert some.outcome(decode) is fault


def test_one_that_begins_again_draws_the_same_noise_and_is_alone() -> None:
    some = ticket(n=2)
    first = some.begin(2, NOISE)
    some.begin_again()
    assert (some.waiting, some.is_alone) == (2, True)
    assert not any(draft.is_going for draft in first)
    again = some.begin(2, NOISE)
    assert [draft.uniforms.tolist() for draft in again] == [d.uniforms.tolist() for d in first]
