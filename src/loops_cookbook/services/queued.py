"""A serverless sampler: a sample is queued, and its result is waited for as an operation.

There are no floors here: a sample names the checkpoint that it is drawn from, the one that the
trainer published last, or none, which means the base model. A caller that leaves takes its sample
out of the queue.
"""

import anyio

from loops_cookbook.errors import ServiceError, ServiceRefused
from loops_cookbook.services.base import SampleParams
from loops_cookbook.services.bodies import Samples
from loops_cookbook.services.http import Published
from loops_cookbook.services.operations import (
    Operation,
    accepted,
    of_run,
    result_of,
    understood,
)
from loops_cookbook.services.samples import (
    PATH,
    completions,
    pinned,
    sample_body,
    sample_headers,
)
from loops_cookbook.services.transport import Transport
from loops_cookbook.tokens import Ids, SampledTokens

CANCEL_SECONDS = 5.0
"""For taking a sample out of the queue."""


class QueuedSampler:
    """A `Sampler` over a queue.

    Args:
        transport: to the sampler.
        model: the base model's id, as the service calls it.
        run_id: the service's name of the run.
        published: what the trainer published last.
    """

    def __init__(
        self, transport: Transport, *, model: str, run_id: str, published: Published
    ) -> None:
        self._transport = transport
        self._model = model
        self._run_id = run_id
        self._published = published

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        """Draw `n` completions of one prompt from the checkpoint that was published last."""
        version, path = self._published.version, self._published.path
        if version < min_policy_version:
            raise ServiceRefused(
                f"policy version {min_policy_version} was asked for and {version} is published"
            )
        headers = {**of_run(self._run_id), **pinned(path)}
        body = sample_body(prompt_ids, params, n, model=self._model, lora=path)
        told = sample_headers(headers, affinity_key)
        queued = await accepted(self._transport, "queue", PATH, body, told)
        operation = Operation("a sample", queued)
        try:
            samples = await result_of(operation, Samples, self._transport, "result", headers)
        except anyio.get_cancelled_exc_class():
            await self._take_out(operation, headers)
            raise
        with understood(self._transport, "the result of a sample"):
            return completions(samples, version, n)

    async def _take_out(self, operation: Operation, headers: dict[str, str]) -> None:
        path = f"{operation.path}/cancel"
        with anyio.CancelScope(shield=True), anyio.move_on_after(CANCEL_SECONDS):
            try:
                await self._transport.call("probe", "POST", path, body=b"", headers=headers)
            except ServiceError:
                return  # it is bounded, and nobody waits for the sample any more
