"""A sampler that answers directly: `loops serve`, and the dedicated one of hosted Loops.

It sends one request a call, and a retry of it under the same key. The version that the answer is of
is told with it, and is at least the one that was asked for.
"""

from loops_cookbook.services.base import SampleParams
from loops_cookbook.services.bodies import Samples, WireError, read
from loops_cookbook.services.http import Published
from loops_cookbook.services.operations import of_run, understood
from loops_cookbook.services.samples import (
    PATH,
    completions,
    pinned,
    sample_body,
    sample_headers,
)
from loops_cookbook.services.transport import Transport
from loops_cookbook.services.wire import POLICY_VERSION, whole
from loops_cookbook.tokens import Ids, SampledTokens


class HttpSampler:
    """A `Sampler` over HTTP.

    Args:
        transport: to the sampler.
        run_id: the run whose policy is sampled; None for a server of one model.
        published: what its trainer published, where the server takes version 0 for the base model
            whatever was loaded.
    """

    def __init__(
        self, transport: Transport, *, run_id: str | None, published: Published | None = None
    ) -> None:
        self._transport = transport
        self._run_id = run_id
        self._published = published or Published()

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        """Draw `n` completions of one prompt, from at least `min_policy_version`.

        0 asks for the weights as they were before any training.
        """
        path = self._published.path if self._published.version == 0 else None
        headers = of_run(self._run_id)
        if min_policy_version > 0:
            headers["X-Min-Policy-Version"] = str(min_policy_version)
        else:
            headers |= pinned(path)
        body = sample_body(prompt_ids, params, n)
        told = sample_headers(headers, affinity_key)
        answer = await self._transport.call("sample", "POST", PATH, body=body, headers=told)
        with understood(self._transport, f"POST {PATH}", answer):
            version = _version(answer.headers.get(POLICY_VERSION), min_policy_version)
            version = 0 if path is not None and min_policy_version == 0 else version
            return completions(read(answer.body, Samples), version, n)


def _version(told: str | None, floor: int) -> int | None:
    if told is None:
        return None
    version = whole(told)
    if version is None:
        raise WireError(f"{POLICY_VERSION}: {told[:50]!r} is no version")
    if version < floor:
        raise WireError(f"{POLICY_VERSION}: {version}, where at least {floor} was asked for")
    return version
