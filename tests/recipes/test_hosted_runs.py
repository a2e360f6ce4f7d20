"""Whole runs on a scripted hosted Loops, in virtual time: what survives, what ends a run."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest
from tests.recipes.test_rl import row_of
from tests.recipes.test_sft import row_of as sft_row_of
from tests.services.hosted import KEY, MODEL, Hosted, dropped, status, unreachable
from trio.testing import MockClock

from loops_cookbook.errors import LoopsError
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.recipes.sft import run_sft
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.write import RunWriter
from loops_cookbook.services.base import Service
from loops_cookbook.services.control import HostedOptions
from loops_cookbook.services.loops import hosted_loops
from loops_cookbook.services.transport import Patience

pytestmark = pytest.mark.anyio

SHORTER = """

class Brief(Spell):
    async def grade(self, grading: Grading) -> float:
        return float(len(grading.transcript[0].reply["content"]) % 2)
"""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


async def run(hosted: Hosted, runnable, project: Path) -> RunFolder:
    """Three updates, recorded in a folder."""
    with (project / "spelling.py").open("a") as file:
        file.write(SHORTER)
    plan = runnable("episode.class='spelling:Brief'")
    folder = new_run_folder("runs", project)
    with RunWriter(folder) as writer:
        await run_rl(plan, opener(hosted), writer, row_of(plan))
    return folder


def opener(hosted: Hosted) -> Callable[[], AbstractAsyncContextManager[Service]]:
    options = HostedOptions(model=MODEL, max_seq_len=64, lora_rank=16, seed=0)
    return lambda: hosted_loops(
        options,
        api_key=KEY,
        base_url="https://control",
        patience=Patience(chance=lambda: 0.0),
        network=httpx.MockTransport(hosted),
    )


@pytest.mark.parametrize("is_serverless", [False, True])
async def test_a_run_trains_on_hosted_loops_and_records_the_service_s_run(
    runnable, project: Path, is_serverless: bool
) -> None:
    hosted = Hosted(is_serverless=is_serverless)
    folder = await run(hosted, runnable, project)
    told = json.loads(folder.run.read_text())
    assert (told["status"], told["service"]["run_id"]) == ("done", "run-1")
    assert hosted.steps == 3
    assert hosted.made["save_weights_for_sampler"] == 3
    written = b"".join(path.read_bytes() for path in folder.root.rglob("*") if path.is_file())
    assert KEY.encode() not in written


@pytest.mark.parametrize("is_serverless", [False, True])
async def test_conversations_are_trained_on_hosted_loops_too(
    make_sft_plan, sft_project: Path, is_serverless: bool
) -> None:
    hosted = Hosted(is_serverless=is_serverless)
    plan, folder = make_sft_plan("evaluation.samples=1"), new_run_folder("runs", sft_project)
    with RunWriter(folder) as writer:
        await run_sft(plan, opener(hosted), writer, sft_row_of(plan))
    rows = [json.loads(line) for line in folder.steps.read_text().splitlines()]
    assert json.loads(folder.run.read_text())["service"]["run_id"] == "run-1"
    assert [row["update"] for row in rows] == [1, 2]
    assert rows[-1]["eval/held_out/loss"] == 1.0
    assert (hosted.steps, hosted.made["forward"]) == (2, 2)
    assert hosted.made["save_weights_for_sampler"] == 1


async def test_lost_answers_and_short_outages_change_nothing(runnable, project: Path) -> None:
    faults = [
        ("POST .*/optim_step", dropped),
        ("POST .*/forward_backward", unreachable),
        ("GET .*/operations/", dropped),
        ("GET .*/operations/", status(502)),
        ("POST .*/sample$", status(503)),
        ("POST .*/sample$", dropped),
        ("POST .*/save_weights_for_sampler", dropped),
    ]
    hosted = Hosted(faults=faults)
    folder = await run(hosted, runnable, project)
    assert not hosted.faults
    assert hosted.steps == hosted.made["optim_step"] == 3
    rows = [json.loads(line) for line in folder.steps.read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2, 3]
    assert rows[-1]["totals"]["attempts/discarded"] == 0


async def test_a_trainer_that_shuts_down_ends_the_run_with_its_words(
    runnable, project: Path
) -> None:
    hosted = Hosted(faults=[("POST .*/optim_step", status(503))])
    with pytest.raises(LoopsError, match="/optim_step answered 503: scripted 503"):
        await run(hosted, runnable, project)
    (folder,) = (project / "runs").iterdir()
    told = json.loads((folder / "run.json").read_text())
    assert told["status"] == "failed"
    assert "503" in told["reason"]
    assert hosted.steps == 0
