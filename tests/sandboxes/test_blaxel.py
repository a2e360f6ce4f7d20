"""Machines of Blaxel: what is asked of the service, and what becomes of its failures.

The SDK is the real one; the service is a double on loopback, whose commands really run.
"""

import traceback

import anyio
import pytest
from tests.sandboxes.blaxel_service import KEY, WORKSPACE, Service
from tests.sandboxes.conftest import NEEDS_BUBBLEWRAP, Open, entry, spec_for

from loops_cookbook.errors import SandboxError, SandboxUnavailable
from loops_cookbook.recipes.cleanup import clean
from loops_cookbook.rundir.layout import new_run_folder
from loops_cookbook.sandboxes import blaxel_sdk
from loops_cookbook.sandboxes.base import Backend, Entry, Sandbox
from loops_cookbook.sandboxes.blaxel import Blaxel
from loops_cookbook.sandboxes.ledger import Ledger, open_entries

pytestmark = [pytest.mark.anyio, pytest.mark.blaxel, NEEDS_BUBBLEWRAP]


@pytest.fixture
def backend(blaxel_service: Service) -> Backend:
    return Blaxel()


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blaxel_sdk, "_PAUSES", (0.01, 0.01, 0.01))
    monkeypatch.setattr(blaxel_sdk, "_STEP_SECONDS", 0.01)


async def test_a_sandbox_has_its_name_its_label_and_its_lifetime_from_the_first(
    opening: Open, run: str, blaxel_service: Service
) -> None:
    made = await opening(network=False, memory_mb=2048, lifetime_seconds=600)
    (body,) = [body for method, _, body in blaxel_service.asked if method == "POST"]
    assert body["metadata"]["name"] == made.name == f"loops-{run}-1"
    assert body["metadata"]["labels"]["loops-run"] == run
    runtime = body["spec"]["runtime"]
    assert (runtime["memory"], runtime["ttl"]) == (2048, "600s")
    assert runtime["image"] == "blaxel/base-image:latest"
    network = body["spec"]["network"]
    assert network["proxy"]["allowedDomains"] == ["nothing.invalid"]
    assert network["firewall"] == {"rulesets": ["proxy"]}


async def test_the_region_and_an_image_are_passed_on(
    opening: Open, blaxel_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BL_REGION", "eu-lon-1")
    await opening(image="my/image:1")
    (body,) = [body for method, _, body in blaxel_service.asked if method == "POST"]
    assert body["spec"]["region"] == "eu-lon-1"
    assert body["spec"]["runtime"]["image"] == "my/image:1"
    assert "network" not in body["spec"]


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("status", [500, 503, 504])
async def test_a_creation_whose_answer_is_lost_is_found_and_not_made_twice(
    opening: Open, blaxel_service: Service, status: int
) -> None:
    blaxel_service.answers.append((status, "the edge had no answer in time", True))
    made = await opening()
    assert (await made.exec("echo 1")).stdout == "1\n"
    assert [*blaxel_service.there] == [made.name]
    assert blaxel_service.paths("POST") == ["/v0/sandboxes"]


@pytest.mark.usefixtures("no_pauses")
async def test_a_busy_service_is_asked_again(opening: Open, blaxel_service: Service) -> None:
    blaxel_service.answers.append((429, "slowly", False))
    blaxel_service.answers.append((404, "not there", False))  # the look for what was made
    await opening()
    assert len(blaxel_service.paths("POST")) == 2


async def test_a_name_that_somebody_else_has_is_told_and_left_alone(
    backend: Backend, run: str, opening: Open, blaxel_service: Service
) -> None:
    await opening()
    with pytest.raises(SandboxError, match=f"the name is taken in workspace {WORKSPACE}"):
        await backend.create(entry(backend, run), spec_for(backend))
    assert "DELETE" not in [method for method, _, _ in blaxel_service.asked]


async def test_a_name_that_is_too_long_is_told_without_asking(
    backend: Backend, blaxel_service: Service
) -> None:
    with pytest.raises(SandboxError, match="has 56 characters, and blaxel takes 49"):
        await backend.create(entry(backend, "r" * 48), spec_for(backend))
    assert blaxel_service.asked == []


async def test_a_command_is_started_and_then_asked_after_never_waited_for(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service's edge cuts a request that is silent for a minute, and the command runs on."""
    started: list[dict[str, object]] = []
    process = type(sandbox._enclosure._instance.process)  # type: ignore[attr-defined]
    begin = process.exec

    async def noting(self: object, wanted: dict[str, object]) -> object:
        started.append(wanted)
        return await begin(self, wanted)

    monkeypatch.setattr(process, "exec", noting)
    await sandbox.exec("sleep 0.3; echo done")
    assert [wanted["wait_for_completion"] for wanted in started] == [False]


@pytest.mark.parametrize("what", ["POST", "wait"])
async def test_a_command_survives_an_answer_that_the_edge_cut(sandbox: Sandbox, what: str) -> None:
    await sandbox.exec(f"touch /tmp/busy-{what}; echo 1 >> runs")
    assert (await sandbox.exec("echo 2 >> runs; cat runs", timeout=20)).stdout == "1\n2\n"
    assert (await sandbox.exec(f"ls /tmp/busy-{what}")).exit_status != 0  # it was cut


async def test_nothing_is_left_of_a_commands_outputs(sandbox: Sandbox) -> None:
    await sandbox.exec("yes | head -c 3000000; echo 2 >&2")
    await sandbox.exec("sleep 60", timeout=0.3)
    await sandbox.write_file("a", "1")
    assert (await sandbox.exec("ls -dA /tmp/.loops-* | wc -l")).stdout == "1\n"  # its own


async def test_what_the_service_runs_for_itself_is_not_stopped(sandbox: Sandbox) -> None:
    await sandbox.exec("(setsid sleep 4451 >/dev/null 2>&1 &); sleep 4452 &")
    await sandbox.stop_processes()
    await sandbox.stop_processes()
    assert (await sandbox.exec("ps axo args | grep -c '[ ]445.$'")).stdout == "0\n"


async def test_a_machine_that_is_gone_is_a_lost_sandbox(
    sandbox: Sandbox, blaxel_service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BL_SANDBOX_READ_RETRIES", "0")
    blaxel_service.end(sandbox.name)
    with pytest.raises(SandboxError, match=f"{sandbox.name} is lost"):
        await sandbox.exec("true")


async def test_no_key_is_in_what_is_told(
    backend: Backend, run: str, blaxel_service: Service
) -> None:
    blaxel_service.answers.append((400, f"what is {KEY} to us", False))
    with pytest.raises(SandboxError, match=r"\*\*\*") as caught:
        await backend.create(entry(backend, run), spec_for(backend))
    assert KEY not in "".join(traceback.format_exception(caught.value))


async def test_a_key_that_is_not_taken_is_refused_before_a_run(
    backend: Backend, blaxel_service: Service
) -> None:
    await backend.probe(spec_for(backend))
    assert blaxel_service.paths("POST") == []  # a look costs nothing
    blaxel_service.answers.append((401, "who are you", False))
    with pytest.raises(SandboxUnavailable, match=r"who are you.*check BL_API_KEY and BL_WORKSPACE"):
        await backend.probe(spec_for(backend))


@pytest.mark.usefixtures("no_pauses")
async def test_a_deletion_is_over_when_the_service_says_so(
    sandbox: Sandbox, backend: Backend, run: str, blaxel_service: Service
) -> None:
    blaxel_service.lingers = 3
    assert await backend.remove(entry(backend, run))
    assert blaxel_service.there[sandbox.name]["status"] == "TERMINATED"
    assert not await backend.remove(entry(backend, run))


async def test_what_is_of_another_run_or_workspace_stays(
    sandbox: Sandbox, backend: Backend, blaxel_service: Service
) -> None:
    with pytest.raises(SandboxError, match="is not of run x: it stays"):
        await backend.remove(Entry(sandbox.name, "x", "blaxel", WORKSPACE))
    with pytest.raises(SandboxError, match=r"is in workspace 'theirs'.*set BL_WORKSPACE"):
        await backend.remove(Entry(sandbox.name, "x", "blaxel", "theirs"))
    assert blaxel_service.there[sandbox.name]["status"] == "DEPLOYED"


async def test_cleaning_up_releases_what_is_recorded_and_what_is_labelled_and_no_more(
    backend: Backend, blaxel_service: Service, tmp_path: object
) -> None:
    folder = new_run_folder("runs", tmp_path)  # type: ignore[arg-type]
    run = folder.root.name
    mine, stray, theirs = (
        entry(backend, run, 1),
        entry(backend, run, 2),
        entry(backend, "another-run", 1),
    )
    with Ledger(folder.sandboxes) as ledger:
        ledger.opens(mine)
        ledger.opens(entry(backend, run, 3))  # asked for, and never made
    made = [await backend.create(each, spec_for(backend)) for each in (mine, stray, theirs)]
    told = await clean(folder.root, dry_run=True)
    assert told.held == [mine.name, f"loops-{run}-3", stray.name]
    assert "DELETE" not in [method for method, _, _ in blaxel_service.asked]

    cleaned = await clean(folder.root)
    assert (cleaned.released, cleaned.gone) == ([mine.name, stray.name], [f"loops-{run}-3"])
    assert await backend.find("another-run") == [theirs.name]
    assert open_entries(folder.sandboxes) == ()
    assert (await clean(folder.root)).lines == []
    for each in made:
        await each.release()


async def test_a_create_that_is_cancelled_while_the_service_works_is_deleted(
    backend: Backend, run: str, blaxel_service: Service
) -> None:
    with anyio.move_on_after(0.001):
        await backend.create(entry(backend, run), spec_for(backend))
    assert await backend.find(run) == []
    assert {each["status"] for each in blaxel_service.there.values()} <= {"TERMINATED"}
