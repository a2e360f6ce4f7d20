import pytest

pytest.importorskip("torch")

import torch
from tests.local.sampling.builders import HYBRIDS, made_policy, noting, whole

from loops_cookbook.local.errors import NotFinite
from loops_cookbook.local.sampling.prompt_scores import score_prompt

pytestmark = pytest.mark.torch

PROMPT = [3, 9, 27, 4, 12, 36, 31]
KINDS = [("Llama", 4), ("Llama", 100), ("Llama", None), ("Qwen3Next", None)]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "at_once"), KINDS)
def test_scores_are_those_of_the_model_at_temperature_1(kind: str, at_once: int | None) -> None:
    policy = made_policy(kind, **HYBRIDS.get(kind, {}))
    scores, _ = score_prompt(policy, PROMPT, 2, at_once=at_once)
    logprobs = whole(policy, PROMPT).log_softmax(-1)
    assert len(scores) == len(PROMPT)
    assert scores[0] is None
    for place, told in enumerate(scores[1:]):
        ordered = logprobs[place].argsort(descending=True).tolist()
        own = PROMPT[place + 1]
        assert told is not None
        assert list(told) == [own, *(token for token in ordered[:2] if token != own)]
        for token, score in told.items():
            assert score.logprob == pytest.approx(float(logprobs[place, token]), abs=1e-4)
            assert score.rank == 1 + ordered.index(token)


@torch.no_grad()
def test_none_but_the_prompts_own_tokens_need_be_told() -> None:
    scores, _ = score_prompt(made_policy("Llama"), PROMPT, 0, at_once=3)
    assert [told and list(told) for told in scores] == [None, *([token] for token in PROMPT[1:])]


@torch.no_grad()
def test_the_memory_of_the_prompt_is_told_where_it_was_read_in_parts() -> None:
    policy = made_policy("Llama")
    with noting(policy) as passes:
        _, span = score_prompt(policy, PROMPT, 0, at_once=3)
    assert passes == [[PROMPT[:3]], [PROMPT[3:6]], [PROMPT[6:]]]
    assert span is not None
    assert len(span) == len(PROMPT)
    assert score_prompt(policy, PROMPT, 0, at_once=None)[1] is None


@torch.no_grad()
def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    assert score_prompt(made_policy("Llama"), [3], 1, at_once=8)[0] == [None]


@torch.no_grad()
def test_weights_that_ran_away_are_told() -> None:
    policy = made_policy("Llama")
    policy.module.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(NotFinite, match="a token of the prompt has logprob nan"):
        score_prompt(policy, PROMPT, 0, at_once=8)
