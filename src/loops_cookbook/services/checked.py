"""What a sampler answers is checked where it enters, whoever made the sampler.

An answer that cannot be true is no reply: it raises, so its try fails and may be tried again, and
nothing of it is recorded, graded or trained. That ids and logprobs are of one length, and that
logprobs are finite, `SampledTokens` itself holds.
"""

from collections.abc import Sequence
from typing import NamedTuple

from loops_cookbook.errors import ServiceRefused
from loops_cookbook.services.base import SampleParams, Sampler
from loops_cookbook.tokens import Ids, SampledTokens

_ROUNDING = 0.01
"""By how much the logprob of a token that is all but certain may be above 0, in half precision."""
_NEVER = -9999.0
"""What servers say in the place of minus infinity, which JSON lacks (vLLM's OpenAI API, say)."""


class Asked(NamedTuple):
    """What an answer must keep to."""

    n: int = 1
    """Completions."""
    max_tokens: int = 1
    """Of each."""
    min_policy_version: int = 0
    vocabulary: int | None = None
    """One more than the highest id; None where nobody knows it."""


class CheckedSampler:
    """A `Sampler` that refuses what another one cannot have sampled.

    Args:
        sampler: who samples.
        vocabulary: one more than the highest id that its model has; None where nobody knows it.
    """

    def __init__(self, sampler: Sampler, *, vocabulary: int | None = None) -> None:
        self._sampler = sampler
        self._vocabulary = vocabulary

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        """Draw `n` completions of one prompt.

        Raises:
            ServiceRefused: what came is not what was asked for.
        """
        completions = await self._sampler.sample(
            prompt_ids,
            params,
            n=n,
            min_policy_version=min_policy_version,
            affinity_key=affinity_key,
        )
        asked = Asked(n, params.max_tokens, min_policy_version, self._vocabulary)
        if (wrong := what_is_wrong(completions, asked)) is not None:
            raise ServiceRefused(f"a sampler returned {wrong}: mend the sampler")
        return completions


def what_is_wrong(completions: Sequence[object], asked: Asked) -> str | None:
    """Why an answer cannot be true, as the object of a sentence; None where it can."""
    if len(completions) != asked.n:
        return f"{len(completions)} completions where {asked.n} were asked for"
    for completion in completions:
        if (wrong := _wrong_with(completion, asked)) is not None:
            return wrong
    return None


def _wrong_with(completion: object, asked: Asked) -> str | None:
    if not isinstance(completion, SampledTokens):
        return f"a {type(completion).__name__} where SampledTokens are due"
    ids, version = completion.ids, completion.policy_version
    if len(ids) > asked.max_tokens:
        return f"{len(ids)} tokens where {asked.max_tokens} were the limit"
    if version is not None and version < asked.min_policy_version:
        return (
            f"tokens of policy version {version} where {asked.min_policy_version} was the oldest "
            "to sample from"
        )
    if len(ids) == 0:
        return None
    # As lists: numpy takes thrice as long to look at a short reply.
    logprobs, listed = completion.logprobs.tolist(), ids.tolist()
    least, most = min(logprobs), max(logprobs)
    if most > _ROUNDING:
        return f"the logprob {most:g}, and none is above 0"
    if least <= _NEVER:
        return f"the logprob {least:g}, which is that of a token that is never sampled"
    low, high = min(listed), max(listed)
    if low < 0 or (asked.vocabulary is not None and high >= asked.vocabulary):
        size = "" if asked.vocabulary is None else f" of {asked.vocabulary}"
        return f"the token id {low if low < 0 else high}, which is not in the vocabulary{size}"
    return None
