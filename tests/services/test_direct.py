"""The sampler's client against a scripted server, in virtual time."""

import json
import math
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest
from trio.testing import MockClock

from loops_cookbook.errors import ServiceRefused, ServiceUnavailable
from loops_cookbook.services.base import SampleParams
from loops_cookbook.services.direct import HttpSampler
from loops_cookbook.services.transport import Patience, open_transport
from loops_cookbook.tokens import ids_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@dataclass
class FakeSampler:
    """Answers every sample with `n` equal completions."""

    version: str | None = "4"
    choices: int | None = None
    logprob: float | None = -0.5
    requests: list[httpx.Request] = field(default_factory=list[httpx.Request])
    before: list[httpx.Response] = field(default_factory=list[httpx.Response])

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.before:
            return self.before.pop(0)
        n = self.choices if self.choices is not None else json.loads(request.content)["n"]
        choice = {
            "finish_reason": "stop",
            "logprobs": {"tokens": ["token_id:7"], "token_logprobs": [self.logprob]},
        }
        headers = {} if self.version is None else {"x-trainers-policy-version": self.version}
        return httpx.Response(200, headers=headers, json={"choices": [choice] * n})


@asynccontextmanager
async def sampling(server: FakeSampler, run_id: str | None = "r") -> AsyncGenerator[HttpSampler]:
    async with open_transport(
        "http://sampler",
        patience=Patience(60.0, chance=lambda: 0.0),
        network=httpx.MockTransport(server),
    ) as transport:
        yield HttpSampler(transport, run_id=run_id)


class TestSampler:
    async def test_completions_carry_ids_logprobs_and_the_version(self) -> None:
        async with sampling(FakeSampler()) as sampler:
            first, second = await sampler.sample(ids_of([1]), SampleParams(max_tokens=1), n=2)
        assert (first.ids.tolist(), first.logprobs.tolist()) == ([7], [-0.5])
        assert (second.stop, second.policy_version) == ("stop", 4)

    async def test_a_floor_and_an_affinity_key_are_headers(self) -> None:
        server = FakeSampler()
        async with sampling(server) as sampler:
            await sampler.sample(
                ids_of([1]), SampleParams(max_tokens=1), min_policy_version=4, affinity_key="g1"
            )
        headers = server.requests[0].headers
        assert headers["x-min-policy-version"] == "4"
        assert headers["x-baseten-session-id"] == "g1"
        assert headers["x-run-id"] == "r"

    async def test_what_is_not_asked_for_is_not_sent(self) -> None:
        server = FakeSampler()
        async with sampling(server, run_id=None) as sampler:
            await sampler.sample(ids_of([1]), SampleParams(max_tokens=1), min_policy_version=0)
        sent = server.requests[0].headers
        assert not {"x-min-policy-version", "x-baseten-session-id", "x-run-id"} & set(sent)

    async def test_each_call_has_a_dashed_key_of_its_own_kept_over_retries(self) -> None:
        server = FakeSampler(before=[httpx.Response(408), httpx.Response(503)])
        async with sampling(server) as sampler:
            await sampler.sample(ids_of([1]), SampleParams(max_tokens=1))
            await sampler.sample(ids_of([1]), SampleParams(max_tokens=1))
        *tries, other = [request.headers["idempotency-key"] for request in server.requests]
        assert len(tries) == 3
        assert len(set(tries)) == 1
        assert other != tries[0]
        assert re.fullmatch("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", other)

    async def test_what_the_wire_cannot_say_is_refused_before_it_is_sent(self) -> None:
        """It left as a WireError, which is no ServiceError, and was told as a bug of ours."""
        server = FakeSampler()
        async with sampling(server) as sampler:
            with pytest.raises(ServiceRefused, match=r"cannot be asked for \(temperature"):
                await sampler.sample(ids_of([1]), SampleParams(max_tokens=1, temperature=math.nan))
        assert server.requests == []

    async def test_a_sampler_that_cannot_say_its_version_is_believed(self) -> None:
        async with sampling(FakeSampler(version=None)) as sampler:
            (tokens,) = await sampler.sample(
                ids_of([1]), SampleParams(max_tokens=1), min_policy_version=9
            )
        assert tokens.policy_version is None

    @pytest.mark.parametrize(
        "server",
        [
            FakeSampler(version="3"),
            FakeSampler(version="latest"),
            FakeSampler(version="9" * 5000),
            FakeSampler(choices=1),
            FakeSampler(choices=0),
            FakeSampler(logprob=None),
        ],
        ids=["too old", "no number", "no such number", "too few", "none", "no logprob"],
    )
    async def test_an_answer_that_is_not_what_was_asked_for_is_refused(
        self, server: FakeSampler
    ) -> None:
        async with sampling(server) as sampler:
            with pytest.raises(ServiceRefused, match="breaks the Loops protocol"):
                await sampler.sample(
                    ids_of([1]), SampleParams(max_tokens=1), n=2, min_policy_version=4
                )

    @pytest.mark.parametrize(
        ("body", "quoted"),
        [
            (b"<html>\n<h1>Sign in</h1></html>", "<html> <h1>Sign in</h1></html>"),
            (b'{"error": {"message": "overloaded"}}', "overloaded"),
            (b"", "no detail"),
        ],
    )
    async def test_what_is_no_answer_is_quoted(self, body: bytes, quoted: str) -> None:
        """Of a page that asks to sign in, only the column was told at which it is not JSON."""
        network = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
        async with open_transport("http://sampler", network=network) as transport:
            with pytest.raises(ServiceRefused) as caught:
                await HttpSampler(transport, run_id=None).sample(
                    ids_of([1]), SampleParams(max_tokens=1)
                )
        assert f" with {quoted!r}: see that a Loops server is there" in str(caught.value)

    async def test_a_sampler_that_never_gets_ready_is_unavailable(self) -> None:
        server = FakeSampler(before=[httpx.Response(404)] * 100)
        async with sampling(server) as sampler:
            with pytest.raises(ServiceUnavailable, match="404"):
                await sampler.sample(ids_of([1]), SampleParams(max_tokens=1))
