"""Where no checkpoint can be had, a run says so at its beginning and is not ended by it halfway."""

from pathlib import Path

import httpx
import pytest
from tests.recipes.notebook import Notebook
from tests.recipes.test_before import carry_out, photographed
from tests.recipes.test_resume import RL
from tests.services.loops_server import LoopsServer
from trio.testing import MockClock

from loops_cookbook.errors import ServiceRefused
from loops_cookbook.recipes.checkpoints import checkpointer
from loops_cookbook.rundir.layout import new_run_folder
from loops_cookbook.rundir.read import open_run
from loops_cookbook.services.http import HttpCheckpointer, HttpTrainer
from loops_cookbook.services.transport import open_transport

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


async def test_a_trainer_that_keeps_none_is_warned_of_and_another_is_not() -> None:
    notebook = Notebook()
    network = httpx.MockTransport(lambda _: httpx.Response(200))
    async with open_transport("http://gpu", network=network) as transport:
        keeps = HttpCheckpointer(transport, model="m", run_id="r")
        assert checkpointer(keeps, notebook) is keeps
        assert notebook.notes == []
        assert checkpointer(HttpTrainer(transport, model="m", run_id="r"), notebook) is None
    (told,) = notebook.notes
    assert told.startswith("warning: the trainer keeps no checkpoints: ")
    assert "cannot be resumed" in told
    assert "`loops serve --checkpoints FOLDER`" in told


async def test_a_run_on_a_server_that_keeps_none_is_warned_once_and_ends_well(
    runnable, tmp_path: Path
) -> None:
    """It failed at its first checkpoint, ten updates on."""
    folder, server = new_run_folder("runs", tmp_path), LoopsServer(keeps_checkpoints=False)
    run = await carry_out(runnable(*RL), folder, server)
    assert run.run.status == "done"
    assert len(server.weights) == 4
    assert folder.log.read_text().count("the trainer keeps no checkpoints") == 1
    assert run.checkpoints() == ()
    assert not folder.updates.exists()


class Unwilling(LoopsServer):
    """Says nothing of checkpoints, and refuses some."""

    refused: tuple[str, ...] = ()

    def apply(self, name: str, body: dict[str, object]) -> dict[str, object]:
        if name == "save_state" and body["name"] in self.refused:
            return {"path": 7}
        return super().apply(name, body)


async def test_a_checkpoint_that_is_refused_does_not_end_a_run_whose_batches_are_kept(
    runnable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, server = new_run_folder("runs", tmp_path), Unwilling()
    server.refused = ("update-000002", "update-000003")
    run = await carry_out(runnable(*RL), folder, server)
    assert [row.update for row in run.checkpoints()] == [4]
    told = [record.getMessage()[:26] for record in caplog.records]
    assert told == ["no checkpoint of update 2:", "no checkpoint of update 3:"]


async def test_the_last_checkpoint_has_to_be_saved_and_is_when_the_run_goes_on(
    runnable, tmp_path: Path
) -> None:
    folder, server = new_run_folder("runs", tmp_path), Unwilling()
    server.refused = ("update-000004",)
    with pytest.raises(ServiceRefused):
        await carry_out(runnable(*RL), folder, server)
    assert open_run(folder.root).run.status == "failed"
    server.refused = ()
    again = await carry_out(runnable(*RL), folder, server)
    assert again.run.status == "done"
    assert [row.update for row in again.checkpoints()] == [2, 3, 4]
    _, whole, _ = await photographed(runnable(*RL), tmp_path)
    assert server.weights == whole.weights
