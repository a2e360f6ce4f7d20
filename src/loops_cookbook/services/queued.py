"""A serverless sampler: a sample is queued, and its result is waited for as an operation.

There are no floors here: a sample names the checkpoint that it is drawn from, the one that the
trainer published last, or none, which means the base model. A caller that leaves takes its sample
out of the queue.
"""

import uuid
from urllib.parse import quote

import anyio

from loops_cookbook.errors import ServiceError, ServiceRefused
from loops_cookbook.services.base import SampleParams
from loops_cookbook.services.bodies import Accepted, Samples, WireError, read
from loops_cookbook.services.http import Operation, Published, result_of, understood
from loops_cookbook.services.transport import Transport
from loops_cookbook.services.wire import sample_json, sampled
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
        headers = {"X-Run-Id": self._run_id}
        if path is not None:
            headers["X-Checkpoint-Path"] = path
        try:
            body = sample_json(prompt_ids, params, n, model=self._model, lora=path)
        except WireError as error:
            raise ServiceRefused(
                f"a sample cannot be asked for ({error}): mend the parameters that it was given"
            ) from error
        told = {**headers, "Idempotency-Key": str(uuid.uuid4()), "Content-Type": "application/json"}
        if affinity_key:
            told["X-Baseten-Session-ID"] = affinity_key
        answer = await self._transport.call("queue", "POST", "/sample", body=body, headers=told)
        with understood(self._transport, "POST /sample"):
            operation = Operation("a sample", read(answer.body, Accepted).operation_id)
        try:
            samples = await result_of(operation, Samples, self._transport, "result", headers)
        except anyio.get_cancelled_exc_class():
            await self._take_out(operation.id, headers)
            raise
        with understood(self._transport, "the result of a sample"):
            completions = sampled(samples, version)
            if len(completions) != n:
                raise WireError(f"choices: {len(completions)} of the {n} asked for")
        return completions

    async def _take_out(self, operation: str, headers: dict[str, str]) -> None:
        path = f"/operations/{quote(operation, safe='')}/cancel"
        with anyio.CancelScope(shield=True), anyio.move_on_after(CANCEL_SECONDS):
            try:
                await self._transport.call("probe", "POST", path, body=b"", headers=headers)
            except ServiceError:
                return  # it is bounded, and nobody waits for the sample any more
