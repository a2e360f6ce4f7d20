"""A run on a server that is killed goes on right, whatever the server did or forgot meanwhile."""

import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import httpx
import pytest
from tests.recipes.test_resume import GROUP_SIZE, RL, metrics, require_whole
from tests.recipes.test_rl import row_of
from tests.recipes.test_sft import row_of as sft_row_of
from tests.services.loops_server import LoopsServer
from trio.testing import MockClock

from loops_cookbook.cli.resuming import Resumed
from loops_cookbook.recipes.before import Before, before
from loops_cookbook.recipes.memory import Memory
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.recipes.sft import run_sft
from loops_cookbook.recipes.sft_plan import SFTPlan
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.past import Past, SFTPast, read_past, read_sft_past
from loops_cookbook.rundir.read import RecordedRun, open_run
from loops_cookbook.rundir.savepoints import SavePoints
from loops_cookbook.rundir.write import RunWriter
from loops_cookbook.services.base import Left, Service
from loops_cookbook.services.remote import RemoteOptions, remote_loops
from loops_cookbook.services.transport import Patience

pytestmark = pytest.mark.anyio
SFT = ("training.epochs=3", "training.checkpoint_every=2", "evaluation.every=2")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@dataclass
class Killed:
    """What a kill would have left: the run's folder, and the server, which lives on."""

    folder: RunFolder
    server: LoopsServer


@dataclass
class Album:
    """Copies folder and server before and after each operation of the trainer."""

    folder: RunFolder
    place: Path
    kills: list[Killed] = field(default_factory=list[Killed])

    def watch(self, server: LoopsServer) -> Callable[[str], None]:
        def shoot(_: str) -> None:
            if self.folder.run.is_file():
                root = self.place / f"{len(self.kills):04}" / self.folder.root.name
                shutil.copytree(self.folder.root, root)
                self.kills.append(Killed(RunFolder(root), server.copy()))

        return shoot


def opener(
    server: LoopsServer, folder: RunFolder, known: Before
) -> Callable[[], AbstractAsyncContextManager[Service]]:
    options = RemoteOptions(
        "http://gpu", "http://gpu", "a/policy", 32, run_id=folder.root.name, left=known.left
    )
    return lambda: remote_loops(
        options, patience=Patience(chance=lambda: 0.0), network=httpx.MockTransport(server)
    )


async def carry_out(
    plan: Plan | SFTPlan, folder: RunFolder, server: LoopsServer, *, start: str | None = None
) -> RecordedRun:
    """A run in a folder, from its beginning or from where its records say that it stood."""
    resumed = Resumed(open_run(folder.root)) if folder.run.is_file() else None
    with RunWriter(folder) as writer, SavePoints(folder) as savepoints:
        if isinstance(plan, SFTPlan):
            of_sft = Memory[SFTPast](savepoints, start=start)
            row = sft_row_of(plan)
            if resumed is not None:
                of_sft = resumed.remember(of_sft, read_sft_past(resumed.run))
                row = resumed.row(row, at=1.0, update=0)
            opened = opener(server, folder, before(of_sft))
            await run_sft(plan, opened, writer, row, None, of_sft)
        else:
            memory = Memory[Past](savepoints, start=start)
            row = row_of(plan)
            if resumed is not None:
                past = read_past(resumed.run, group_size=GROUP_SIZE)
                memory = resumed.remember(memory, past)
                row = resumed.row(row, at=1.0, update=past.update)
            opened = opener(server, folder, before(memory))
            await run_rl(plan, opened, writer, row, None, memory)
    return open_run(folder.root)


async def photographed(
    plan: Plan | SFTPlan, place: Path, server: LoopsServer | None = None, **named: str
) -> tuple[RecordedRun, LoopsServer, list[Killed]]:
    """A whole run, and what a kill at any of its operations would have left."""
    server, folder = server or LoopsServer(), new_run_folder("runs", place)
    album = Album(folder, place / "album")
    server.watch = album.watch(server)
    return await carry_out(plan, folder, server, **named), server, album.kills


def lived_on(run: RecordedRun) -> bool:
    return "the trainer lived on" in run.folder.log.read_text()


async def test_an_rl_run_goes_on_with_a_server_that_lived_on_as_if_nothing_had_been(
    runnable, tmp_path: Path
) -> None:
    """Killed before its first checkpoint, a run trained what it had trained already once more: the
    server took the next beginning for the one that it knew, and kept its weights."""
    plan = runnable(*RL)
    whole, server, kills = await photographed(plan, tmp_path)
    ways: Counter[bool] = Counter()
    for killed in kills:
        again = await carry_out(plan, killed.folder, killed.server)
        require_whole(again, killed.server.weights, 4)
        assert killed.server.weights == server.weights
        assert metrics(again) == metrics(whole)
        ways[lived_on(again)] += 1
    assert min(ways[True], ways[False]) >= 2


async def test_an_sft_run_goes_on_with_a_server_that_lived_on(
    make_sft_plan, tmp_path: Path
) -> None:
    plan = make_sft_plan(*SFT)
    whole, server, kills = await photographed(plan, tmp_path)
    ways: Counter[bool] = Counter()
    for killed in kills:
        again = await carry_out(plan, killed.folder, killed.server)
        assert killed.server.weights == server.weights
        assert metrics(again) == metrics(whole)
        ways[lived_on(again)] += 1
    assert min(ways[True], ways[False]) >= 2


@pytest.mark.parametrize("lost", ["restarted", "silent", "forgetful", "replaced"])
async def test_a_server_that_cannot_show_what_it_has_is_loaded(
    runnable, tmp_path: Path, lost: str
) -> None:
    plan = runnable(*RL)
    _, server, kills = await photographed(plan, tmp_path)
    for killed in kills[::5]:
        then = killed.server
        if lost == "restarted":
            killed.server = LoopsServer(saved=then.saved)
        elif lost == "silent":
            then.tells_last = False
        elif lost == "forgetful":  # an hour later: the update's own name means nothing any more
            then.operations.clear()
        else:  # another run was here, and trained a batch
            then.accept("theirs", "init_trainer_server", {"lora_rank": 1})
        again = await carry_out(plan, killed.folder, killed.server)
        require_whole(again, killed.server.weights, 4)
        assert killed.server.weights == server.weights
        assert lost == "forgetful" or not lived_on(again)


async def test_a_run_killed_again_and_again_goes_on_with_the_trainer_that_lives(
    runnable, tmp_path: Path
) -> None:
    """Names of one life must not be taken for those of another, by whoever lives on."""
    plan = runnable(*RL)
    whole, server, kills = await photographed(plan, tmp_path)
    for first in kills[:: len(kills) // 3]:
        album = Album(first.folder, tmp_path / f"again-{first.folder.root.parent.name}")
        first.server.watch = album.watch(first.server)
        await carry_out(plan, first.folder, first.server)
        for second in album.kills[::4]:
            again = await carry_out(plan, second.folder, second.server)
            require_whole(again, second.server.weights, 4)
            assert second.server.weights == server.weights
            assert metrics(again) == metrics(whole)


@pytest.mark.parametrize("operation", ["forward_backward", "optim_step"])
async def test_a_batch_that_was_forgotten_at_an_interruption_is_not_in_the_weights(
    runnable, tmp_path: Path, operation: str
) -> None:
    """The server has a part of an update that the records gave up: that must be left behind."""
    plan = runnable(*RL)
    _, server, _ = await photographed(plan, tmp_path)
    folder, interrupted = new_run_folder("runs", tmp_path), LoopsServer()
    with anyio.CancelScope() as scope:

        def stop(name: str) -> None:
            if name == operation and len(interrupted.weights) >= 2:
                scope.cancel()

        interrupted.watch = stop
        await carry_out(plan, folder, interrupted)
    assert open_run(folder.root).run.status == "interrupted"
    interrupted.watch = lambda _: None
    again = await carry_out(plan, folder, interrupted)
    require_whole(again, interrupted.weights, 4)
    assert interrupted.weights == server.weights
    assert not lived_on(again)


async def test_what_a_run_starts_from_is_loaded_again_until_an_update_has_shown_it(
    runnable, tmp_path: Path
) -> None:
    plan = runnable(*RL)
    saved = {"bt://loops:other/weights/u9": (["their batch"], 1)}
    path, named = next(iter(saved)), {"start": next(iter(saved))}
    _, server, kills = await photographed(plan, tmp_path, LoopsServer(saved=saved), **named)
    assert server.weights[0] == "their batch"
    for killed in kills[::4]:
        await carry_out(plan, killed.folder, killed.server, start=path)
        assert killed.server.weights == server.weights


@pytest.mark.parametrize(
    ("past", "left"),
    [
        (Past(recorded=3, kept=(3,)), Left("b", ("update-3", "update-3-life1"), ())),
        (
            Past(recorded=3, kept=(3, 4)),
            Left("b", ("update-3", "update-3-life1"), ("update-4", "update-4-life1")),
        ),
        (Past(recorded=3, kept=(3, 4, 5)), None),
        (Past(), Left("b")),
    ],
)
def test_what_is_left_is_told_by_the_keys_that_it_may_have(past: Past, left: Left | None) -> None:
    memory = Memory[Past](past=past, life=2, beginning="b")
    assert before(memory).left == left
    assert before(replace(memory, beginning=None)).left is None
