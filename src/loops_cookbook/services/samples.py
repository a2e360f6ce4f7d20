"""What a sample over the Loops wire is asked with, and what of the answer its caller gets.

Samplers that answer at once and those that queue share it; how they wait is their own.
"""

import uuid
from collections.abc import Mapping

from loops_cookbook.errors import ServiceRefused
from loops_cookbook.services.base import SampleParams
from loops_cookbook.services.bodies import Samples, WireError
from loops_cookbook.services.operations import with_body
from loops_cookbook.services.wire import sample_json, sampled
from loops_cookbook.tokens import Ids, SampledTokens

PATH = "/sample"


def pinned(path: str | None) -> dict[str, str]:
    """The header of a sample from a checkpoint; none where it is from none."""
    return {} if path is None else {"X-Checkpoint-Path": path}


def sample_headers(headers: Mapping[str, str], affinity_key: str | None) -> dict[str, str]:
    """The headers of a sample; equal affinity keys are best served in one place."""
    told = with_body(headers, str(uuid.uuid4()))
    return {**told, "X-Baseten-Session-ID": affinity_key} if affinity_key else told


def sample_body(
    prompt_ids: Ids,
    params: SampleParams,
    n: int,
    *,
    model: str | None = None,
    lora: str | None = None,
) -> bytes:
    """The body of a sample, as `wire.sample_json` takes it.

    Raises:
        ServiceRefused: the parameters cannot be written.
    """
    try:
        return sample_json(prompt_ids, params, n, model=model, lora=lora)
    except WireError as error:
        raise ServiceRefused(
            f"a sample cannot be asked for ({error}): mend the parameters that it was given"
        ) from error


def completions(answer: Samples, version: int | None, n: int) -> tuple[SampledTokens, ...]:
    """As many completions as were asked for.

    Raises:
        WireError: there are others, or one is none.
    """
    made = sampled(answer, version)
    if len(made) != n:
        raise WireError(f"choices: {len(made)} of the {n} asked for")
    return made
