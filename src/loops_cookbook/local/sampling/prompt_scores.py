"""Logprobs of a prompt's own tokens, and of the likeliest ones in their places.

They are of the model's whole distribution at temperature 1, whatever the completion is drawn
with. The first token has none, since nothing stands before it.
"""

import math
from collections.abc import Sequence

import torch
from transformers import DynamicCache

from loops_cookbook.local.errors import NotFinite
from loops_cookbook.local.model import Policy
from loops_cookbook.local.requests import PromptScores, TokenScore
from loops_cookbook.local.sampling.spans import Span, spans_of


def score_prompt(
    policy: Policy, ids: Sequence[int], top: int, *, at_once: int | None
) -> tuple[PromptScores, Span | None]:
    """The scores of a prompt, and its memory where that is a span.

    Args:
        policy: whose weights, as they are now, score.
        ids: the prompt.
        top: how many of the likeliest tokens to tell for each place besides its own.
        at_once: tokens that may be read in one pass; None: the model reads all or none.

    Raises:
        NotFinite: the weights hold numbers that are not finite.
    """
    cache = None if at_once is None else DynamicCache(config=policy.module.config)
    scores: PromptScores = [None]
    step = at_once or len(ids)
    for start in range(0, len(ids), step):
        some = ids[start : start + step]
        output = policy.module(
            input_ids=torch.tensor([some], device=policy.device),
            position_ids=torch.arange(start, start + len(some), device=policy.device)[None],
            use_cache=cache is not None,
            **({} if cache is None else {policy.cache_argument: cache}),
        )
        following = ids[start + 1 : start + step + 1]
        logprobs = output.logits[0, : len(following)].float().log_softmax(-1)
        scores += _scores(logprobs, following, top)
    if cache is None:
        return scores, None
    (span,) = spans_of(cache)
    return scores, span


def _scores(
    logprobs: torch.Tensor, ids: Sequence[int], top: int
) -> list[dict[int, TokenScore] | None]:
    own = logprobs.gather(1, torch.tensor(ids, device=logprobs.device)[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    likeliest = logprobs.topk(top, -1)
    scores: list[dict[int, TokenScore] | None] = []
    for token, logprob, rank, tokens, theirs in zip(
        ids,
        own[:, 0].tolist(),
        ranks.tolist(),
        likeliest.indices.tolist(),
        likeliest.values.tolist(),
        strict=True,
    ):
        if not math.isfinite(logprob):
            raise NotFinite(
                f"a token of the prompt has logprob {logprob}: the weights have run away, so "
                "begin again from a checkpoint or with a lower learning_rate"
            )
        told = {token: TokenScore(logprob, rank)}
        for place, (other, its) in enumerate(zip(tokens, theirs, strict=True), 1):
            told.setdefault(other, TokenScore(its, place))
        scores.append(told)
    return scores
