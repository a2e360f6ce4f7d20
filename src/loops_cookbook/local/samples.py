"""The routes of a sampler, over the worker of its trainer.

A sample is held until the version that it asks for is served, and given up where its client has
gone.
"""

from dataclasses import replace
from functools import partial

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from loops_cookbook.local.answers import (
    Parsing,
    json_answer,
    read_body,
    refusal,
    while_connected,
)
from loops_cookbook.local.decode import job_of
from loops_cookbook.local.errors import BadRequest
from loops_cookbook.local.metrics import Tally
from loops_cookbook.local.places import Place
from loops_cookbook.local.requests import SampleJob, Weights
from loops_cookbook.local.routes import Limits, Trainer
from loops_cookbook.local.worker import Drawn, NotServed, Worker
from loops_cookbook.services.bodies import Sample, read
from loops_cookbook.services.wire import POLICY_VERSION, samples_json

MOST_DIGITS = 18
"""Of a policy version."""


class Sampler:
    """The sampler's routes."""

    def __init__(self, worker: Worker, trainer: Trainer, limits: Limits, tally: Tally) -> None:
        self._worker = worker
        self._engine = worker.engine
        self._trainer = trainer
        self._limits = limits
        self._tally = tally
        self._parsing = Parsing(worker.off_load)

    def routes(self) -> list[Route]:
        """Every route of a sampler that this server has."""
        return [
            Route("/sample", self._sample, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/trainers_policy_version", self._policy_version, methods=["GET"]),
        ]

    def _unfloored(self, request: Request) -> Weights:
        """What a request is sampled from that asks for no version: a checkpoint, or a beginning."""
        path = request.headers.get("x-checkpoint-path")
        if path is not None:
            return self._engine.pin(Place.parse(path))
        if "x-run-id" not in request.headers:
            return "base"
        if self._trainer.has_begun:
            self._trainer.check_run(request.headers["x-run-id"])
        return "start"

    async def _policy_version(self, _: Request) -> Response:
        return json_answer({"policy_version": self._engine.policy_version})

    async def _models(self, _: Request) -> Response:
        base, version = self._engine.model_name, self._engine.policy_version
        models: list[dict[str, object]] = [{"id": base, "object": "model", "parent": None}]
        if version:
            models.append({"id": f"policy-{version}", "object": "model", "parent": base})
        return json_answer({"object": "list", "data": models})

    async def _sample(self, request: Request) -> Response:
        raw = await read_body(request, self._limits.max_body_bytes)
        job = await self._parsing.do(partial(self._job, raw), len(raw))
        floor = request.headers.get("x-min-policy-version", "0")
        if not floor.isdecimal() or len(floor) > MOST_DIGITS:
            raise BadRequest(
                f"X-Min-Policy-Version is {floor[:40]!r}: send an integer of 0 or more"
            )
        if "x-checkpoint-path" in request.headers and self._engine.policy_version < int(floor):
            # A checkpoint is served until the policy is at the version that is asked for.
            floor = "0"
        job = replace(job, weights=self._unfloored(request))

        async def answer() -> Response:
            try:
                with anyio.move_on_after(self._limits.hold_seconds) as holding:
                    await self._worker.reach(int(floor))
                if holding.cancelled_caught:
                    return refusal(408, f"policy version {floor} is not published yet: ask again")
                drawn = await self._worker.sample(job, int(floor))
            except NotServed as error:
                return refusal(408, str(error))
            except Exception as error:  # the engine's; the request was checked before
                return refusal(500, f"{type(error).__name__}: {error}")
            self._tally.sampled(drawn.sampled.completions)
            return await self._parsing.do(partial(_sampled, job.prompt_ids, drawn), _size(drawn))

        with self._tally.sampling():
            return await while_connected(request, answer)

    def _job(self, raw: bytes) -> SampleJob:
        job = job_of(read(raw, Sample), self._engine.max_seq_len)
        self._engine.check_job(job)
        return job


def _size(drawn: Drawn) -> int:
    """About how many bytes of JSON it makes."""
    tokens = sum(len(completion.ids) for completion in drawn.sampled.completions)
    scores = sum(len(told or ()) for told in drawn.sampled.prompt_scores or ())
    return 64 * (tokens + scores)


def _sampled(prompt: list[int], drawn: Drawn) -> Response:
    body = samples_json(prompt, drawn.sampled.completions, drawn.sampled.prompt_scores)
    version = drawn.policy_version
    headers = {} if version is None else {POLICY_VERSION: str(version)}
    return Response(body, headers=headers, media_type="application/json")
