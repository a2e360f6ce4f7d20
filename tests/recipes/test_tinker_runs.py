"""Whole runs over the Tinker API, with a double of the SDK, in virtual time."""

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.recipes.test_hosted_runs import SHORTER, Opening, keep_on, planned
from tests.recipes.test_rl import row_of
from tests.recipes.test_sft import row_of as sft_row_of
from tests.services.tinker_double import KEY, MODEL, STUCK, APIStatusError, TinkerDouble
from trio.testing import MockClock

from loops_cookbook.errors import ServiceRefused, ServiceUnavailable
from loops_cookbook.recipes.before import Before, before
from loops_cookbook.recipes.memory import Memory
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.recipes.sft import run_sft
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.past import SFTPast
from loops_cookbook.rundir.write import RunWriter
from loops_cookbook.services.tinker import TinkerOptions, tinker_service

pytestmark = pytest.mark.anyio

OPTIONS = TinkerOptions("http://tinker", KEY, MODEL, lora_rank=8, seed=0, run_id="a-run")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


async def run(double: TinkerDouble, runnable, project: Path, *settings: str) -> RunFolder:
    """Three updates, recorded in a folder."""
    with (project / "spelling.py").open("a") as file:
        file.write(SHORTER)
    plan = runnable("episode.class='spelling:Brief'", *settings)
    folder = new_run_folder("runs", project)
    network = httpx.MockTransport(double)
    with RunWriter(folder) as writer:
        await run_rl(
            plan,
            lambda: tinker_service(OPTIONS, sdk=double, network=network),
            writer,
            row_of(plan),
        )
    return folder


async def test_rows_are_trained_scored_and_sampled(make_sft_plan, sft_project: Path) -> None:
    double = TinkerDouble()
    plan = make_sft_plan("compute.scope='tinker'", "evaluation.samples=2", "evaluation.every=0")
    folder = new_run_folder("runs", sft_project)
    network = httpx.MockTransport(double)
    with RunWriter(folder) as writer:
        await run_sft(
            plan,
            lambda: tinker_service(OPTIONS, sdk=double, network=network),
            writer,
            sft_row_of(plan),
        )
    assert [loss for _, loss, _ in double.batches] == ["cross_entropy"] * 2
    assert double.saved == ["start-v0", "update-2-v1"]
    assert [path.rpartition("-v")[2] for path, *_ in double.samples] == ["0", "0", "1", "1"]
    assert [row["loss"] for row in rows_of(folder)] == [0.5, 0.5]
    assert rows_of(folder)[-1]["eval/held_out/loss"] == 0.5
    assert json.loads(folder.run.read_text())["status"] == "done"
    assert double.unloaded == ["model-1"]


def rows_of(folder: RunFolder) -> list[dict[str, object]]:
    return [json.loads(line) for line in folder.steps.read_text().splitlines()]


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_run_trains_publishes_and_lets_go(runnable, project: Path, mode: str) -> None:
    double = TinkerDouble()
    folder = await run(double, runnable, project, f"training.mode='{mode}'")
    assert double.saved == ["start-v0", "update-1-v1", "update-2-v2", "update-3-v3"]
    assert len(double.steps) == 3
    assert double.unloaded == ["model-1"]
    told = json.loads(folder.run.read_text())
    assert (told["status"], told["service"]["model_id"]) == ("done", "model-1")
    assert [row["policy/version"] for row in rows_of(folder)] == [1, 2, 3]
    written = b"".join(path.read_bytes() for path in folder.root.rglob("*") if path.is_file())
    assert KEY.encode() not in written


async def test_in_sync_mode_every_sample_is_of_the_version_that_it_trains(
    runnable, project: Path
) -> None:
    double = TinkerDouble()
    await run(double, runnable, project)
    drawn = [int(path.rpartition("-v")[2]) for path, *_ in double.samples]
    assert drawn == sorted(drawn)
    assert set(drawn) == {0, 1, 2}


async def test_a_sample_that_is_stuck_is_cut_by_the_clock_and_the_run_goes_on(
    runnable, project: Path
) -> None:
    double = TinkerDouble(faults=[("asample", STUCK)])
    folder = await run(double, runnable, project)
    assert len(double.steps) == 3
    assert rows_of(folder)[-1]["totals"]["attempts/timed_out"] == 4  # pyright: ignore[reportIndexIssue]


async def test_a_trainer_that_is_gone_ends_the_run(runnable, project: Path) -> None:
    class Lost(TinkerDouble):
        async def forward_backward_async(self, data, loss_fn, loss_fn_config):
            self.is_up = False
            return await super().forward_backward_async(data, loss_fn, loss_fn_config)

    double = Lost(faults=[("forward_backward result", STUCK)])
    with pytest.raises(ServiceUnavailable, match=r"an update: .*see whether the service runs"):
        await run(double, runnable, project)
    (folder,) = (project / "runs").iterdir()
    told = json.loads((folder / "run.json").read_text())
    assert told["status"] == "failed"
    assert double.is_closed


def on(double: TinkerDouble) -> Opening:
    network = httpx.MockTransport(double)

    def opening(known: Before):
        options = replace(OPTIONS, first_version=known.updates)
        return lambda: tinker_service(options, sdk=double, network=network)

    return opening


async def test_a_run_goes_on_with_an_adapter_of_its_own(runnable, project: Path) -> None:
    """It is loaded before anything else is asked of the adapter, and versions go on."""
    plan = planned(runnable, project, "training.updates=5")
    whole, folder = TinkerDouble(), new_run_folder("runs", project)
    expected = await keep_on(on(whole), plan, new_run_folder("runs", project))

    first = TinkerDouble(faults=[("forward_backward result", APIStatusError("no", 400))])
    after = first.faults.pop()

    async def failing(adam_params):
        if len(first.steps) == 3:
            first.faults.append(after)
        return await TinkerDouble.optim_step_async(first, adam_params)

    first.optim_step_async = failing
    with pytest.raises(ServiceRefused):
        await keep_on(on(first), plan, folder)
    path = "tinker://model-1/weights/update-000002"
    assert list(first.kept) == [path]

    second = TinkerDouble(kept=first.kept, model_id="model-2")
    again = await keep_on(on(second), plan, folder)
    assert second.loaded == [(path, True)]
    assert second.calls.index("load_state") < second.calls.index("save_weights_for_sampler")
    assert second.saved == ["begin-3-life1-v3", "update-4-life1-v4", "update-5-life1-v5"]
    assert [step.said for step in second.steps] == [step.said for step in whole.steps]
    assert len(second.batches) == 5
    versions = [row.metrics["policy/version"] for row in again.steps()]
    assert versions == [row.metrics["policy/version"] for row in expected.steps()]
    assert [row.path for row in again.checkpoints()][-1] == "tinker://model-2/weights/update-000005"


async def test_a_run_starts_from_a_checkpoint_without_its_optimizer(
    runnable, project: Path
) -> None:
    theirs = "tinker://model-0/weights/u9"
    double = TinkerDouble(kept={theirs: [("their batch", "their step")]})
    folder = new_run_folder("runs", project)
    await keep_on(on(double), planned(runnable, project), folder, start=theirs)
    assert double.loaded == [(theirs, False)]
    assert double.saved[0] == "begin-0-v0"
    assert double.batches[0] == "their batch"
    assert len(double.batches) == 4


async def test_rows_are_sampled_before_the_first_update_of_a_run_that_goes_on(
    make_sft_plan, sft_project: Path
) -> None:
    """Nothing was published for it: the run was killed before its first checkpoint."""
    double = TinkerDouble()
    plan = make_sft_plan("compute.scope='tinker'", "evaluation.samples=1", "evaluation.every=0")
    folder = new_run_folder("runs", sft_project)
    with RunWriter(folder) as writer:
        memory = Memory[SFTPast](past=SFTPast(), life=1)
        opened = on(double)(before(memory))
        await run_sft(plan, opened, writer, sft_row_of(plan), None, memory)
    assert double.saved[0] == "update-0-life1-v0"
    assert len(double.steps) == 2
