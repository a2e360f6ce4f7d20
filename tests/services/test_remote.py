"""Servers at given addresses as a service, in virtual time."""

from collections.abc import Callable
from dataclasses import replace

import anyio
import httpx
import pytest
from tests.services.loops_server import LoopsServer
from trio.testing import MockClock

from loops_cookbook.errors import ServiceRefused, ServiceUnavailable
from loops_cookbook.services.base import Left, SampleParams
from loops_cookbook.services.remote import RemoteOptions, remote_loops
from loops_cookbook.tokens import ids_of

pytestmark = pytest.mark.anyio

OPTIONS = RemoteOptions(
    trainer_url="http://gpu:8000/",
    sampler_url="http://gpu:8001",
    model="a/model",
    lora_rank=8,
    run_id="run",
    api_key="secret-of-the-server",
)
OURS = {"loops_cookbook": "0.1.0", "lora_rank": 8, "extra": None}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


def server(
    health: Callable[[httpx.Request], httpx.Response] = lambda _: httpx.Response(200),
    version: tuple[int, object] = (200, OURS),
    sample: object = None,
) -> httpx.MockTransport:
    """A trainer and a sampler that begin a run, and do no more."""

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return health(request)
        if request.url.path == "/version":
            return httpx.Response(version[0], json=version[1])
        if request.url.path == "/sample":
            return httpx.Response(200, json=sample)
        if request.url.path == "/init_trainer_server":
            return httpx.Response(202, json={"operation_id": "o"})
        return httpx.Response(200, json={"status": "done", "result": {"step": 0, "lora_rank": 8}})

    return httpx.MockTransport(answer)


async def test_both_addresses_are_asked_whether_they_have_the_model() -> None:
    asked: list[str] = []

    def health(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Api-Key secret-of-the-server"
        asked.append(str(request.url))
        return httpx.Response(200)

    async with remote_loops(OPTIONS, network=server(health)) as service:
        assert service.temperature_in_loss
        assert service.description["loops_cookbook"] == "0.1.0"
    query = "health?base_model=a%2Fmodel"
    assert asked == [f"http://gpu:8000/{query}", f"http://gpu:8001/{query}"]


async def test_a_token_that_the_trainers_model_does_not_know_fails_its_call_alone() -> None:
    """It was trained on, which the trainer refused, and that ended the run."""
    choice = {"logprobs": {"tokens": ["token_id:31"], "token_logprobs": [-1.0]}}
    network = server(version=(200, {**OURS, "vocab_size": 31}), sample={"choices": [choice]})
    async with remote_loops(OPTIONS, network=network) as service:
        with pytest.raises(ServiceRefused, match="token id 31, which is not in the vocabulary of"):
            await service.sampler.sample(ids_of([1]), SampleParams(max_tokens=1))


async def test_a_server_that_is_not_ours_is_not_told_the_temperature() -> None:
    async with remote_loops(OPTIONS, network=server(version=(404, "what?"))) as service:
        assert not service.temperature_in_loss


async def test_a_server_that_is_still_starting_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def health(_: httpx.Request) -> httpx.Response:
        if anyio.current_time() - began < 60:
            raise httpx.ConnectError("refused")
        return httpx.Response(200)

    began = anyio.current_time()
    async with remote_loops(OPTIONS, network=server(health)):
        pass
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("waiting for http://gpu:8000: GET http://gpu:8000/health")


async def test_an_address_where_nobody_answers_is_given_up_with_what_to_do() -> None:
    def health(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    began = anyio.current_time()
    with pytest.raises(ServiceUnavailable, match=r"refused.*addresses in \[compute\]"):
        async with remote_loops(OPTIONS, network=server(health)):
            pass
    assert 120 <= anyio.current_time() - began < 130


@pytest.mark.parametrize("code", [401, 403, 422])
async def test_a_refusal_is_told_at_once_without_the_key(code: int) -> None:
    def health(request: httpx.Request) -> httpx.Response:
        return httpx.Response(code, json={"detail": f"no: {request.headers['authorization']}"})

    with pytest.raises(ServiceRefused, match=f"answered {code}: no: ") as told:
        async with remote_loops(OPTIONS, network=server(health)):
            pass
    assert "secret-of-the-server" not in str(told.value)


async def test_every_beginning_has_a_name_of_its_own_and_is_carried_out() -> None:
    """A later process was answered from memory, and went on with the weights of the one before."""
    server = LoopsServer()
    for _ in range(2):
        async with remote_loops(OPTIONS, network=httpx.MockTransport(server)) as service:
            server.weights.append("a batch")
            assert service.held is None
    assert server.weights == ["a batch"]
    begun = [result for result in server.operations.values() if "lora_rank" in result]
    assert len(begun) == 2


@pytest.mark.parametrize("told", [(200, b"[]"), (200, b'{"last_operation": 7}'), (501, b"no")])
async def test_a_server_that_does_not_tell_what_it_did_last_begins_anew(
    told: tuple[int, bytes],
) -> None:
    server = LoopsServer()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/policy_version":
            return httpx.Response(told[0], content=told[1])
        return await server(request)

    options = replace(OPTIONS, left=Left("b", ("update-3",), ("update-4",)))
    async with remote_loops(options, network=httpx.MockTransport(answer)) as service:
        assert service.held is None
        assert service.description["beginning"] != "b"
