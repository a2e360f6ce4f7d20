"""Hosted Loops as a service, against a scripted one, in virtual time."""

import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from tests.services.hosted import KEY, MODEL, Hosted, dropped, status, unreachable
from trio.testing import MockClock

from loops_cookbook.errors import LoopsError, ModelError, ServiceRefused, ServiceUnavailable
from loops_cookbook.learning.datums import Datum
from loops_cookbook.services.base import AdamParams, LossSpec, SampleParams
from loops_cookbook.services.control import HostedOptions
from loops_cookbook.services.loops import HostedService, hosted_loops
from loops_cookbook.services.transport import Patience
from loops_cookbook.tokens import ids_of

pytestmark = pytest.mark.anyio

OPTIONS = HostedOptions(model=MODEL, max_seq_len=1024, lora_rank=16, seed=3)
PARAMS = SampleParams(max_tokens=4)
PROMPT = ids_of([1, 2])
ROW = Datum(
    input_ids=PROMPT,
    target_ids=ids_of([2, 7]),
    logprobs=np.zeros(2, np.float32),
    advantages=np.ones(2, np.float32),
)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@asynccontextmanager
async def opened(hosted: Hosted, **changes: Any) -> AsyncGenerator[HostedService]:
    options = HostedOptions(**{**{f: getattr(OPTIONS, f) for f in OPTIONS.__slots__}, **changes})
    async with hosted_loops(
        options,
        api_key=KEY,
        base_url="https://control",
        patience=Patience(chance=lambda: 0.0),
        network=httpx.MockTransport(hosted),
    ) as service:
        yield service


async def update(service: HostedService, number: int = 1) -> int:
    """One update, published; the version."""
    key = f"update-{number}"
    await service.trainer.train([ROW], LossSpec("cispo"), AdamParams(1e-4), key=key)
    return await service.trainer.publish(key=key)


def sent(hosted: Hosted, pattern: str) -> list[httpx.Request]:
    return [r for r in hosted.requests if re.search(pattern, f"{r.method} {r.url.path}")]


@pytest.mark.parametrize("is_serverless", [False, True])
async def test_a_run_is_opened_trained_published_and_sampled(is_serverless: bool) -> None:
    hosted = Hosted(is_serverless=is_serverless)
    async with opened(hosted) as service:
        first = await service.sampler.sample(PROMPT, PARAMS, n=2)
        assert await update(service) == 1
        (second,) = await service.sampler.sample(PROMPT, PARAMS, min_policy_version=1)
    assert [completion.ids.tolist() for completion in first] == [[7, 8], [7]]
    assert second.policy_version == 1
    assert service.description["run_id"] == "run-1"
    assert service.description["mode"] == ("serverless" if is_serverless else "dedicated")
    assert not service.temperature_in_loss
    (opening,) = sent(hosted, "/trainers$")
    assert json.loads(opening.content) == {
        "session_id": "session-1",
        "base_model": MODEL,
        "lora_rank": 16,
        "replicas": 1,
        "availability_model": "dedicated",
        "seed": 3,
        "max_seq_len": 1024,
    }


async def test_a_serverless_sample_names_the_checkpoint_that_was_published_last() -> None:
    hosted = Hosted(is_serverless=True)
    async with opened(hosted) as service:
        await service.sampler.sample(PROMPT, PARAMS)
        await update(service)
        await service.sampler.sample(PROMPT, PARAMS, min_policy_version=1)
    base, pinned = sent(hosted, "/sample$")
    assert "x-checkpoint-path" not in base.headers
    assert json.loads(base.content)["model"] == MODEL
    path = pinned.headers["x-checkpoint-path"]
    assert re.fullmatch(r"bt://loops:run-1/sampler_weights/update-1-[0-9a-f]{32}", path)
    assert json.loads(pinned.content)["lora"] == path


@pytest.mark.parametrize(
    ("mode", "scope"), [("serverless", "serverless"), ("dedicated", "deployment")]
)
async def test_a_mode_that_is_asked_for_is_sent_by_its_scope(mode: Any, scope: str) -> None:
    hosted = Hosted(is_serverless=mode == "serverless")
    async with opened(hosted, mode=mode, team="research"):
        pass
    (opening,) = sent(hosted, "/trainers$")
    assert opening.url.path == "/v1/teams/t1/loops/debug/trainers"
    assert json.loads(opening.content)["scope"] == scope


async def test_another_mode_than_was_asked_for_is_refused() -> None:
    with pytest.raises(
        ServiceRefused, match="serverless was asked for, and run run-1 is dedicated"
    ):
        async with opened(Hosted(is_serverless=False), mode="serverless"):
            pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "Qwen/Other"}, f"does not serve 'Qwen/Other'.*it has {MODEL}"),
        ({"max_seq_len": 8192}, "found 8192, .* up to 4096; use 4096 or less"),
        ({"team": "sales"}, "no team 'sales', it has research"),
    ],
)
async def test_what_the_workspace_does_not_have_is_refused_before_anything_is_made(
    changes: dict[str, Any], words: str
) -> None:
    hosted = Hosted()
    with pytest.raises(ModelError, match=words):
        async with opened(hosted, **changes):
            pass
    assert not hosted.made


async def test_a_slow_deployment_is_waited_for_and_a_sleeping_sampler_woken() -> None:
    hosted = Hosted(
        statuses=["CREATED", "DEPLOYING", "DEPLOYING"],
        sampler_statuses=["DEPLOYING", "SCALED_TO_ZERO", "WAKING_UP", "ACTIVE"],
    )
    began = anyio.current_time()
    async with opened(hosted):
        pass
    assert anyio.current_time() - began == pytest.approx(60)
    assert hosted.is_woken
    assert hosted.made["init_trainer_server"] == 1


@pytest.mark.parametrize("word", ["FAILED", "STOPPED", "PREEMPTED"])
async def test_a_deployment_that_will_not_come_up_ends_the_wait_with_its_status(word: str) -> None:
    with pytest.raises(ServiceUnavailable, match=f"trainer run-1 .* is {word}"):
        async with opened(Hosted(statuses=["DEPLOYING", "DEPLOYING", word, word])):
            pass


async def test_a_deployment_that_never_comes_up_is_given_up_after_an_hour() -> None:
    with pytest.raises(ServiceUnavailable, match=r"did not come up within 3600 s, .* DEPLOYING"):
        async with opened(Hosted(statuses=["DEPLOYING"] * 1000)):
            pass


async def test_a_status_that_cannot_be_told_is_asked_for_again() -> None:
    hosted = Hosted(
        statuses=["DEPLOYING"] * 3,
        faults=[("GET /v1/loops/deployments", status(502)), ("GET /v1/loops/dep", unreachable)],
    )
    async with opened(hosted):
        pass
    assert not hosted.faults


@pytest.mark.parametrize("where", ["sessions", "trainers", "samplers"])
async def test_what_the_control_plane_makes_is_asked_for_once(where: str) -> None:
    hosted = Hosted(faults=[(f"POST .*/{where}$", dropped)])
    with pytest.raises(ServiceUnavailable, match=where):
        async with opened(hosted):
            pass
    assert len(sent(hosted, f"/{where}$")) == 1


@pytest.mark.parametrize(
    "fault",
    [dropped, unreachable, status(408), status(502), status(404)],
    ids=["dropped", "unreachable", "408", "502", "404"],
)
@pytest.mark.parametrize("call", ["forward_backward", "optim_step", "save_weights_for_sampler"])
async def test_an_operation_whose_answer_was_lost_is_not_applied_twice(
    fault: Callable[..., httpx.Response], call: str
) -> None:
    hosted = Hosted(faults=[(f"POST .*/{call}$", fault)] * 2)
    async with opened(hosted) as service:
        assert await update(service) == 1
    assert hosted.steps == hosted.made[call] == 1
    assert len(sent(hosted, f"/{call}$")) == 3


@pytest.mark.parametrize("code", [401, 409, 422, 429, 500, 503])
async def test_an_operation_that_is_refused_is_not_sent_again(code: int) -> None:
    hosted = Hosted(faults=[("POST .*/optim_step$", status(code))])
    async with opened(hosted) as service:
        with pytest.raises(LoopsError, match=f"answered {code}"):
            await update(service)
    assert len(sent(hosted, "/optim_step$")) == 1


async def test_a_queue_is_tried_again_when_it_says_so_and_after_as_long() -> None:
    hosted = Hosted(is_serverless=True, faults=[("/sample$", status(503, Retry_After="17"))])
    async with opened(hosted) as service:
        began = anyio.current_time()
        await service.sampler.sample(PROMPT, PARAMS)
        assert anyio.current_time() - began == pytest.approx(17, abs=0.1)


@pytest.mark.parametrize(
    "fault", [status(503), status(503, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"), status(429)]
)
async def test_a_queue_that_says_no_is_not_asked_again(
    fault: Callable[..., httpx.Response],
) -> None:
    hosted = Hosted(is_serverless=True, faults=[("/sample$", fault)])
    async with opened(hosted) as service:
        with pytest.raises(ServiceUnavailable):
            await service.sampler.sample(PROMPT, PARAMS)
    assert hosted.made["sample"] == 0


async def test_a_queued_sample_whose_answer_was_lost_is_queued_once() -> None:
    hosted = Hosted(is_serverless=True, faults=[("/sample$", dropped), ("GET /s.*/op", dropped)])
    async with opened(hosted) as service:
        await service.sampler.sample(PROMPT, PARAMS)
    assert hosted.made["sample"] == 1


async def test_a_caller_that_leaves_takes_its_sample_out_of_the_queue() -> None:
    hosted = Hosted(is_serverless=True, faults=[("GET /s.*/operations/", status(408))] * 1000)
    async with opened(hosted) as service:
        with anyio.move_on_after(45):
            await service.sampler.sample(PROMPT, PARAMS)
        await anyio.sleep(1)
        assert hosted.made["cancel"] == 1


async def test_a_run_that_is_idle_shows_that_it_is_there() -> None:
    hosted = Hosted()
    async with opened(hosted):
        before = len(sent(hosted, "/health"))
        await anyio.sleep(185)
    assert len(sent(hosted, "/health")) - before == 3


async def test_the_key_is_in_no_error() -> None:
    hosted = Hosted(faults=[("/capabilities", lambda _: httpx.Response(401, text=f"bad {KEY}"))])
    with pytest.raises(ServiceRefused) as told:
        async with opened(hosted):
            pass
    assert KEY not in str(told.value)
    assert "[key]" in str(told.value)
