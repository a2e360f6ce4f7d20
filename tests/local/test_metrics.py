"""What a server has done is told as numbers that a person's tools can read."""

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, cast

import anyio
import httpx
import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette

from loops_cookbook.local.metrics import CONTENT_TYPE, Metric, Tally, Watched
from loops_cookbook.local.operations import Operations
from loops_cookbook.local.requests import Completion
from loops_cookbook.local.worker import Engine

pytestmark = pytest.mark.anyio

COMPLETION = Completion([7, 8, 2], [-1.0, -1.0, -1.0], "stop", "xyz")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Still:
    """An engine that does nothing but say where it is."""

    model_name: str = "tiny"
    max_seq_len: int = 32
    vocab_size: int = 50
    lora_rank: int = 4
    step: int = 3
    policy_version: int = 2


async def answered(path: str, tally: Tally) -> httpx.Response:
    watched = Watched(cast(Engine, cast(Any, Still())), tally)
    network = httpx.ASGITransport(Starlette(routes=watched.routes()))
    async with httpx.AsyncClient(transport=network, base_url="http://engine") as client:
        return await client.get(path)


def numbers(text: str) -> dict[str, int]:
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {name: int(value) for name, value in lines}


async def test_the_numbers_are_those_of_engine_and_tally() -> None:
    tally = Tally()
    tally.sampled([COMPLETION, COMPLETION])
    operations = Operations()
    running, ended = operations.open("a", "forward"), operations.open("b", "optim_step")
    tally.accepted(running)
    tally.accepted(ended)
    operations.finish(ended, b"{}")
    with tally.sampling():
        answer = await answered("/metrics", tally)
    assert answer.headers["content-type"] == CONTENT_TYPE
    assert numbers(answer.text) == {
        "loops_policy_version": 2,
        "loops_steps": 3,
        "loops_samples_total": 2,
        "loops_sampled_tokens_total": 6,
        "loops_queue_length": 2,
    }


async def test_what_was_asked_is_unfinished_until_it_ends_however_it_ends() -> None:
    tally, operations = Tally(), Operations()
    failing = operations.open("a", "forward_backward")
    tally.accepted(failing)
    assert tally.unfinished == 1
    operations.fail(failing, "no", "BadRequest")
    assert tally.unfinished == 0
    with anyio.CancelScope() as scope, tally.sampling():
        scope.cancel()
        await anyio.sleep_forever()
    assert tally.unfinished == 0


def test_a_metric_is_written_with_its_kind_and_meaning() -> None:
    text = str(Metric("loops_steps", "gauge", "Steps.", lambda: 5))
    assert text == "# HELP loops_steps Steps.\n# TYPE loops_steps gauge\nloops_steps 5\n"


async def test_the_version_says_what_serves_what() -> None:
    answer = await answered("/version", Tally())
    assert answer.json() == {
        "loops_cookbook": version("loops-cookbook"),
        "model": "tiny",
        "max_seq_len": 32,
        "vocab_size": 50,
        "lora_rank": 4,
        "checkpoints": False,
    }
