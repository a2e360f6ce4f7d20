"""A run over the Tinker API, with a double of the SDK, in virtual time: opened, watched, let go."""

import importlib.util
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest
from tests.services.tinker_double import (
    KEY,
    MODEL,
    STUCK,
    APIConnectionError,
    APIStatusError,
    TinkerDouble,
)
from trio.testing import MockClock

from loops_cookbook.errors import (
    LoopsError,
    MissingExtra,
    ModelError,
    ServiceError,
    ServiceRefused,
    ServiceUnavailable,
)
from loops_cookbook.services.base import SampleParams
from loops_cookbook.services.tinker import TinkerOptions, TinkerService, tinker_service
from loops_cookbook.tokens import ids_of

pytestmark = pytest.mark.anyio

OPTIONS = TinkerOptions("http://tinker:8000", KEY, MODEL, lora_rank=8, seed=3, run_id="a-run")
PROMPT = ids_of([1, 2])
PARAMS = SampleParams(max_tokens=4)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@asynccontextmanager
async def opened(double: TinkerDouble) -> AsyncGenerator[TinkerService]:
    network = httpx.MockTransport(double)
    async with tinker_service(OPTIONS, sdk=double, network=network) as service:
        yield service


async def test_a_run_has_a_session_and_an_adapter_of_its_own_and_lets_both_go() -> None:
    double = TinkerDouble()
    async with opened(double) as service:
        assert dict(service.description) == {
            "url": "http://tinker:8000",
            "model_id": "model-1",
            "tinker": "0.24.1",
        }
        assert not service.temperature_in_loss
        assert double.unloaded == []
    session, adapter = double.opened
    assert session == {
        "metadata": {"loops_run": "a-run"},
        "base_url": "http://tinker:8000",
        "api_key": KEY,
    }
    assert adapter == {"base_model": MODEL, "rank": 8, "seed": 3}
    assert double.unloaded == ["model-1"]
    assert double.is_closed


async def test_a_failure_inside_the_run_lets_both_go_and_passes_as_it_is() -> None:
    double = TinkerDouble()
    with pytest.raises(ZeroDivisionError):
        async with opened(double):
            raise ZeroDivisionError
    assert double.unloaded == ["model-1"]
    assert double.is_closed


async def test_the_first_weights_can_be_sampled_before_any_update() -> None:
    double = TinkerDouble()
    async with opened(double) as service:
        (completion,) = await service.sampler.sample(PROMPT, PARAMS)
    assert completion.policy_version == 0
    assert double.saved == ["start-v0"]


async def test_equal_samples_leave_as_one_request() -> None:
    double = TinkerDouble()
    async with opened(double) as service, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(service.sampler.sample, PROMPT, PARAMS)
    assert [(prompt, n) for _, prompt, n, _ in double.samples] == [([1, 2], 3)]


async def test_a_service_with_another_model_is_refused() -> None:
    """SkyRL trains the model that it was started with, whatever name it is sent."""
    double = TinkerDouble(models=["./tiny"])
    with pytest.raises(ModelError, match=r"does not serve 'Qwen/Qwen3-8B'; it has \./tiny"):
        async with opened(double):
            pass
    assert double.opened == []


async def test_a_service_that_does_not_tell_its_models_is_asked_for_the_adapter() -> None:
    double = TinkerDouble(models=None)
    async with opened(double):
        assert double.calls[:2] == ["ServiceClient", "create_model"]


async def test_a_wrong_key_is_refused_without_showing_it() -> None:
    options = TinkerOptions("http://tinker", "tml-wrong", MODEL, lora_rank=8, seed=3, run_id="r")
    double = TinkerDouble()
    with pytest.raises(ServiceRefused, match=r"401: no: \[key\]: see TINKER_BASE_URL") as told:
        async with tinker_service(options, sdk=double, network=httpx.MockTransport(double)):
            pass
    assert "tml-wrong" not in str(told.value)
    assert "tml-wrong" not in repr(options)


async def test_a_server_that_never_answers_is_given_up_before_the_sdk_is_used() -> None:
    double = TinkerDouble(is_up=False)
    with pytest.raises(ServiceUnavailable, match="see that the server runs, and TINKER_BASE_URL"):
        async with opened(double):
            pass
    assert double.calls == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (APIStatusError("no such model", 404), ServiceRefused),
        (APIStatusError("not paid", 402), ServiceRefused),
        (APIStatusError("busy", 503), ServiceUnavailable),
        (APIStatusError("slower", 429), ServiceUnavailable),
        (APIConnectionError("lost"), ServiceUnavailable),
        (TimeoutError("too late"), ServiceUnavailable),
        (ValueError("Maximum number of LoRA adapters (3) reached"), ServiceRefused),
    ],
)
@pytest.mark.parametrize("call", ["ServiceClient", "create_model", "saved"])
async def test_what_the_sdk_raises_is_told_as_a_fault_of_the_service(
    error: Exception, kind: type[ServiceError], call: str
) -> None:
    double = TinkerDouble(faults=[(call, error)])
    with pytest.raises(kind, match=f"http://tinker:8000: .* failed: {error.args[0][:5]}"):
        async with opened(double):
            pass


async def test_the_key_is_not_in_what_the_sdk_s_error_becomes() -> None:
    double = TinkerDouble(faults=[("create_model", ValueError(f"headers: x-api-key {KEY}"))])
    with pytest.raises(LoopsError, match=r"x-api-key \[key\]"):
        async with opened(double):
            pass


async def test_a_sample_that_its_caller_leaves_is_not_waited_for() -> None:
    double = TinkerDouble(faults=[("asample", STUCK)])
    async with opened(double) as service:
        began = anyio.current_time()
        with anyio.move_on_after(5):
            await service.sampler.sample(PROMPT, PARAMS)
        assert anyio.current_time() - began == pytest.approx(5)
        assert len(await service.sampler.sample(PROMPT, PARAMS)) == 1


async def test_a_wait_for_a_server_that_is_gone_ends() -> None:
    """The SDK asks a lost server again and again, for hours."""
    double = TinkerDouble(faults=[("asample", STUCK)])
    async with opened(double) as service:
        double.is_up = False
        began = anyio.current_time()
        with pytest.raises(ServiceUnavailable, match=r"a sample: .*see whether the service runs"):
            await service.sampler.sample(PROMPT, PARAMS)
        assert 270 <= anyio.current_time() - began < 400


async def test_a_server_that_was_gone_for_a_while_is_waited_for() -> None:
    double = TinkerDouble(faults=[("asample", STUCK)])
    async with opened(double) as service, anyio.create_task_group() as tasks:
        double.is_up = False

        async def come_back() -> None:
            await anyio.sleep(200)
            double.is_up = True

        tasks.start_soon(come_back)
        with anyio.move_on_after(1000) as patient:
            await service.sampler.sample(PROMPT, PARAMS)
        assert patient.cancelled_caught


async def test_what_the_sdk_logs_is_logged_as_ours() -> None:
    """Each failed sample put a line of the SDK's own on the screen, hundreds in a run."""
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # pyright: ignore[reportAttributeAccessIssue]
    ours = logging.getLogger("loops_cookbook")
    ours.addHandler(handler)
    try:
        async with opened(TinkerDouble()):
            logging.getLogger("tinker.lib.retry_handler").error("it failed")
    finally:
        ours.removeHandler(handler)
    assert seen == ["it failed"]
    assert logging.getLogger("tinker").propagate


@pytest.mark.skipif(importlib.util.find_spec("tinker") is not None, reason="the SDK is installed")
async def test_without_the_sdk_the_extra_is_named() -> None:
    with pytest.raises(MissingExtra, match=r'uv add "loops-cookbook\[tinker\]"'):
        async with tinker_service(OPTIONS):
            pass
