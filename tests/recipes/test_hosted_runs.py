"""Whole runs on a scripted hosted Loops, in virtual time: what survives, what ends a run."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest
from tests.recipes.test_rl import row_of
from tests.recipes.test_sft import row_of as sft_row_of
from tests.services.hosted import KEY, MODEL, Fault, Hosted, dropped, status, unreachable, usual
from trio.testing import MockClock

from loops_cookbook.cli.resuming import Resumed
from loops_cookbook.errors import LoopsError, ServiceUnavailable
from loops_cookbook.recipes.before import Before, before
from loops_cookbook.recipes.memory import Memory
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.recipes.sft import run_sft
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.past import Past, read_past
from loops_cookbook.rundir.read import RecordedRun, open_run
from loops_cookbook.rundir.savepoints import SavePoints
from loops_cookbook.rundir.write import RunWriter
from loops_cookbook.services.base import Service
from loops_cookbook.services.control import HostedOptions
from loops_cookbook.services.loops import hosted_loops
from loops_cookbook.services.transport import Patience

pytestmark = pytest.mark.anyio

Opening = Callable[[Before], Callable[[], AbstractAsyncContextManager[Service]]]

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
    folder = new_run_folder("runs", project)
    with RunWriter(folder) as writer:
        plan = planned(runnable, project)
        await run_rl(plan, opener(hosted), writer, row_of(plan))
    return folder


def planned(runnable, project: Path, *settings: str) -> Plan:
    if "Brief" not in (project / "spelling.py").read_text():
        with (project / "spelling.py").open("a") as file:
            file.write(SHORTER)
    return runnable("episode.class='spelling:Brief'", "training.checkpoint_every=2", *settings)


async def keep_on(
    opening: Opening, plan: Plan, folder: RunFolder, *, start: str | None = None
) -> RecordedRun:
    """The run of a folder, from its beginning or from where it stood, with checkpoints."""
    with RunWriter(folder) as writer, SavePoints(folder) as savepoints:
        memory, row = Memory[Past](savepoints, start=start), row_of(plan)
        if folder.run.is_file():
            resumed = Resumed(open_run(folder.root))
            past = read_past(resumed.run, group_size=plan.config.training.group_size)
            memory, row = resumed.remember(memory, past), resumed.row(row, at=1.0, update=0)
        opened = opening(before(memory))
        await run_rl(plan, opened, writer, row, None, memory)
    return open_run(folder.root)


def on(hosted: Hosted) -> Opening:
    return lambda known: opener(hosted, path=known.loads)


def opener(
    hosted: Hosted, *, path: str | None = None
) -> Callable[[], AbstractAsyncContextManager[Service]]:
    options = HostedOptions(model=MODEL, max_seq_len=64, lora_rank=16, seed=0, path=path)
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


@pytest.mark.parametrize("is_serverless", [False, True])
async def test_a_run_that_failed_goes_on_in_another_one_of_the_service(
    runnable, project: Path, is_serverless: bool
) -> None:
    plan = planned(runnable, project, "training.updates=5")
    whole = Hosted(is_serverless=is_serverless)
    expected = await keep_on(on(whole), plan, new_run_folder("runs", project))

    first, folder = Hosted(is_serverless=is_serverless), new_run_folder("runs", project)
    first.faults = [("POST .*/optim_step", usual)] * 3 + [("POST .*/optim_step", status(503))]
    with pytest.raises(ServiceUnavailable):
        await keep_on(on(first), plan, folder)
    assert [row.update for row in open_run(folder.root).steps()] == [1, 2, 3]

    second = Hosted(is_serverless=is_serverless, run="run-2", saved=first.saved)
    again = await keep_on(on(second), plan, folder)
    assert second.weights == whole.weights
    assert again.run.service["run_id"] == "run-2"
    assert [row.path for row in again.checkpoints()] == [
        "bt://loops:run-1/weights/update-000002",
        "bt://loops:run-2/weights/update-000004",
        "bt://loops:run-2/weights/update-000005",
    ]
    # The service counts the steps that made the weights, so its versions go on.
    versions = [row.metrics["policy/version"] for row in again.steps()]
    assert versions == [row.metrics["policy/version"] for row in expected.steps()]
    (opened,) = [json.loads(r.content) for r in second.requests if r.url.path.endswith("/trainers")]
    assert opened["path"] == "bt://loops:run-1/weights/update-000002"


@pytest.mark.parametrize("fault", [status(429), status(503)])
async def test_a_service_that_is_busy_costs_a_checkpoint_and_not_the_run(
    runnable, project: Path, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    folder, hosted = new_run_folder("runs", project), Hosted()
    hosted.faults = [("POST .*/save_state", fault)]
    ended = await keep_on(on(hosted), planned(runnable, project), folder)
    assert [row.update for row in ended.checkpoints()] == [3]
    assert "no checkpoint of update 2: POST https://trainer/run-1/save_state" in caplog.text


async def test_a_checkpoint_whose_answer_is_lost_is_saved_once(runnable, project: Path) -> None:
    plan = planned(runnable, project)
    faults = [("POST .*/save_state", dropped), ("POST .*/save_state", status(502))]
    hosted, folder = Hosted(faults=faults), new_run_folder("runs", project)
    ended = await keep_on(on(hosted), plan, folder)
    assert hosted.made["save_state"] == len(hosted.saved) == 2
    assert [row.update for row in ended.checkpoints()] == [2, 3]

    faults = [("POST .*/load_state", dropped), ("GET .*/operations/", dropped)]
    second = Hosted(faults=faults, run="run-2", saved=hosted.saved)
    longer = planned(runnable, project, "training.updates=4")
    await keep_on(on(second), longer, folder)
    assert second.made["load_state_with_optimizer"] == 1
    assert second.weights[:3] == hosted.weights
    assert len(second.weights) == 4


@pytest.mark.parametrize("is_serverless", [False, True])
async def test_what_a_run_starts_from_is_sampled_before_its_first_update(
    runnable, project: Path, is_serverless: bool
) -> None:
    """Its version is 0, by which a service means the base model."""
    theirs = "bt://loops:run-0/weights/update-000009"
    hosted = Hosted(is_serverless=is_serverless, saved={theirs: (["their batch"], 9)})
    folder = new_run_folder("runs", project)
    ended = await keep_on(on(hosted), planned(runnable, project), folder, start=theirs)
    assert hosted.weights[0] == "their batch"
    assert hosted.made["load_state"] == 1
    assert [row.metrics["policy/version"] for row in ended.steps()] == [1, 2, 3]
    samples = [r for r in hosted.requests if r.url.path.endswith("/sample")]
    paths = [r.headers.get("x-checkpoint-path", "") for r in samples]
    assert paths[0].startswith("bt://loops:run-1/sampler_weights/begin-0")
    assert "x-min-policy-version" not in samples[0].headers
    if not is_serverless:
        assert [path[-7:] for path in paths if path] == ["begin-0"] * paths.count(paths[0])
        assert {r.headers.get("x-min-policy-version") for r in samples} == {None, "1", "2"}
    assert {row.policy_versions for row in ended.rollouts()} == {(0,), (1,), (2,)}
