"""What every run has around its work, whatever the work is."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest
from tests.recipes.notebook import Notebook
from trio.testing import MockClock

from loops_cookbook.errors import ServiceUnavailable
from loops_cookbook.recipes.checkpoints import CheckpointRules
from loops_cookbook.recipes.frame import open_frame
from loops_cookbook.recipes.memory import Memory
from loops_cookbook.records import RunRow
from loops_cookbook.rollouts.stall import STALL_SECONDS
from loops_cookbook.rundir.past import Past
from loops_cookbook.services.base import Service
from loops_cookbook.testing import ScriptedService

pytestmark = pytest.mark.anyio

ROW = RunRow(
    run="a-run",
    started_at=0.0,
    recipe="another",
    scope="local",
    model="a/policy",
    updates=None,
    attempts_per_update=None,
    tasks={},
    counts={"attempts/started": 8},
    service={},
    versions={},
    config_path="train.toml",
    config={},
)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


async def test_a_run_is_told_from_its_start_to_its_end() -> None:
    service, notebook = ScriptedService([]), Notebook()
    async with open_frame(service, notebook, ROW) as frame:
        assert [row.service for row in notebook.started] == [{}, dict(service.description)]
        frame.ending.counts = lambda: {"attempts/started": 16}
        assert not notebook.ended
    assert notebook.ended == [("done", {"attempts/started": 16}, None)]
    assert not service.is_open


async def test_an_error_of_the_work_is_told_once_the_service_is_closed_and_goes_on() -> None:
    service = ScriptedService([])

    class Looks(Notebook):
        def run_ended(self, *told: object) -> None:
            assert not service.is_open
            super().run_ended(*told)  # type: ignore[arg-type]

    notebook = Looks()
    with pytest.raises(ServiceUnavailable, match="gone"):
        async with open_frame(service, notebook, ROW):
            raise ServiceUnavailable("gone")
    assert notebook.ended == [("failed", {"attempts/started": 8}, "gone")]


async def test_a_run_that_goes_on_keeps_its_counts_where_its_service_does_not_start() -> None:
    """An RL run that was resumed had its counts in run.json replaced by none."""

    @asynccontextmanager
    async def refuses() -> AsyncGenerator[Service]:
        raise ServiceUnavailable("nobody is there")
        yield

    notebook = Notebook()
    with pytest.raises(ServiceUnavailable):
        async with open_frame(refuses, notebook, ROW):
            pytest.fail("there is nothing to work with")
    assert notebook.ended == [("failed", {"attempts/started": 8}, "nobody is there")]


async def test_a_run_that_is_cancelled_is_told_as_interrupted() -> None:
    notebook = Notebook()
    with anyio.move_on_after(5):
        async with open_frame(ScriptedService([]), notebook, ROW):
            await anyio.sleep_forever()
    assert [status for status, *_ in notebook.ended] == ["interrupted"]


async def test_what_a_run_waits_for_is_said_where_nothing_moves() -> None:
    notebook = Notebook()
    async with open_frame(ScriptedService([]), notebook, ROW) as frame:
        with frame.narrator.waiting_for("rain"):
            await anyio.sleep(2.5 * STALL_SECONDS)
    (told,) = notebook.notes
    assert told.startswith("info: nothing has moved for 120 s; ")
    assert "rain" in told


async def test_a_run_that_keeps_nothing_has_no_checkpoints_and_no_word_of_it() -> None:
    notebook = Notebook()
    async with open_frame(ScriptedService([]), notebook, ROW) as frame:
        assert frame.checkpoints(Memory[Past](), CheckpointRules(1, 1)) is None
    assert not notebook.notes
