import numpy as np
import pytest

from loops_cookbook.errors import ServiceRefused
from loops_cookbook.services.base import SampleParams
from loops_cookbook.services.checked import Asked, CheckedSampler, what_is_wrong
from loops_cookbook.testing import Line, ScriptedSampler
from loops_cookbook.tokens import SampledTokens, ids_of, logprobs_of


def said(*ids: int, version: int | None = 3, logprob: float = -0.5) -> SampledTokens:
    return SampledTokens(ids_of(ids), logprobs_of([logprob] * len(ids)), "stop", version)


ASKED = Asked(n=1, max_tokens=4, min_policy_version=3, vocabulary=10)


@pytest.mark.parametrize(
    "answer",
    [
        said(),
        said(0, 9),
        said(1, 2, 3, 4),
        said(1, version=4),
        said(1, version=None),
        said(1, logprob=0.0),
        said(1, logprob=1e-3),
        said(1, logprob=-500.0),
    ],
)
def test_what_may_have_been_sampled_passes(answer: SampledTokens) -> None:
    assert what_is_wrong((answer,), ASKED) is None


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((), "0 completions where 1 were asked for"),
        ((said(1), said(1)), "2 completions where 1 were asked for"),
        (("hello",), "a str where SampledTokens are due"),
        ((said(1, 2, 3, 4, 5),), "5 tokens where 4 were the limit"),
        ((said(1, version=2),), "policy version 2 where 3 was the oldest"),
        ((said(1, 10),), "the token id 10, which is not in the vocabulary of 10"),
        ((said(1, logprob=0.5),), "the logprob 0.5, and none is above 0"),
        ((said(1, logprob=-9999.0),), "the logprob -9999, which is that of a token that is never"),
        ((said(1, -1),), "the token id -1, which is not in the vocabulary of 10"),
    ],
)
def test_what_cannot_have_been_sampled_is_told(answer: tuple[object, ...], why: str) -> None:
    """Logprobs were held to be finite alone: one above 0 was trained on."""
    told = what_is_wrong(answer, ASKED)
    assert told is not None
    assert why in told


def test_without_a_known_vocabulary_an_id_is_only_not_negative() -> None:
    assert what_is_wrong((said(10**6),), Asked(max_tokens=1)) is None
    told = what_is_wrong((said(-5),), Asked(max_tokens=1))
    assert told == "the token id -5, which is not in the vocabulary"


def test_every_completion_is_looked_at() -> None:
    told = what_is_wrong((said(1), said(11)), Asked(2, 4, vocabulary=10))
    assert told is not None
    assert "token id 11" in told


@pytest.mark.anyio
async def test_a_sampler_that_lies_is_refused_and_one_that_does_not_is_passed_on() -> None:
    """A token out of the vocabulary reached the trainer, which ended the run."""
    sampler = CheckedSampler(ScriptedSampler([Line(ids=[7]), Line(ids=[70])]), vocabulary=50)
    (reply,) = await sampler.sample(np.array([1], np.int32), SampleParams(max_tokens=4))
    assert reply.ids.tolist() == [7]
    with pytest.raises(ServiceRefused, match="the token id 70"):
        await sampler.sample(np.array([1], np.int32), SampleParams(max_tokens=4))
