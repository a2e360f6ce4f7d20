"""Opening and releasing through the ledger, whatever is cut off or fails on the way."""

import logging
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.sandboxes.doubles import MemoryBackend
from trio.testing import MockClock

from loops_cookbook.config.sandbox import SandboxTable
from loops_cookbook.errors import EpisodeError, SandboxError
from loops_cookbook.journal import read_rows
from loops_cookbook.sandboxes.ledger import Ledger, open_entries
from loops_cookbook.sandboxes.source import SandboxSource

pytestmark = pytest.mark.anyio
TABLE = SandboxTable(backend="local", memory_mb=64)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sandboxes.jsonl"


def source(backend: MemoryBackend, ledger: Ledger | None = None, **settings: Any) -> SandboxSource:
    return SandboxSource(backend, TABLE, "run", ledger=ledger, **settings)


def held(path: Path) -> list[str]:
    return [each.entry.name for each in open_entries(path)]


async def test_a_sandbox_is_in_the_ledger_before_it_is_there(path: Path) -> None:
    class Looking(MemoryBackend):
        async def create(self, entry: Any, spec: Any) -> Any:
            assert held(path) == [entry.name]
            return await super().create(entry, spec)

    backend = Looking()
    with Ledger(path) as ledger:
        async with source(backend, ledger) as opening:
            sandbox = await opening.open("task a, try 0, main", {})
            assert held(path) == ["loops-run-1"]
            (opened,) = open_entries(path)
            assert (opened.entry.place, opened.entry.whose) == (
                "memory:loops-run-1",
                "task a, try 0, main",
            )
            await sandbox.release()
            assert held(path) == []
            await sandbox.release()
    assert [row["event"] for _, row in read_rows(path)] == ["opened", "released"]


async def test_a_create_that_is_cancelled_halfway_leaves_nothing_and_is_closed(path: Path) -> None:
    """The sandbox was made, and nobody was told of it."""
    backend = MemoryBackend(create_seconds=60)
    with Ledger(path) as ledger:
        async with source(backend, ledger) as opening:
            with anyio.move_on_after(5):
                await opening.open("", {})
    assert backend.there == {}
    assert held(path) == []


async def test_a_create_that_is_cancelled_and_not_undone_stays_in_the_ledger(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = MemoryBackend(create_seconds=60, removals_that_fail=1)
    with Ledger(path) as ledger:
        async with source(backend, ledger) as opening:
            with anyio.move_on_after(5):
                await opening.open("", {})
    assert held(path) == ["loops-run-1"]
    assert "loops cleanup" in caplog.text


async def test_a_release_that_failed_is_tried_again_when_the_run_ends(path: Path) -> None:
    backend = MemoryBackend(removals_that_fail=1)
    with Ledger(path) as ledger:
        async with source(backend, ledger) as opening:
            sandbox = await opening.open("", {})
            with pytest.raises(SandboxError, match="would not go"):
                await sandbox.release()
            assert held(path) == ["loops-run-1"]
        assert held(path) == []
    assert backend.there == {}


async def test_what_does_not_go_stays_in_the_ledger_and_is_told(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = MemoryBackend(removals_that_fail=9)
    with Ledger(path) as ledger, caplog.at_level(logging.WARNING):
        async with source(backend, ledger) as opening:
            await opening.open("", {})
    assert held(path) == ["loops-run-1"]
    assert "loops-run-1 would not go; `loops cleanup` tries again" in caplog.text


async def test_the_end_of_a_run_releases_what_is_open_also_when_it_is_cancelled(path: Path) -> None:
    backend = MemoryBackend(release_seconds=3)
    with Ledger(path) as ledger:
        with anyio.move_on_after(10):
            async with source(backend, ledger) as opening:
                for _ in range(3):
                    await opening.open("", {})
                await anyio.sleep_forever()
        assert anyio.current_time() < 20
    assert backend.there == {}
    assert held(path) == []


async def test_a_release_is_not_cut_by_a_cancellation(path: Path) -> None:
    backend = MemoryBackend(release_seconds=3)
    with Ledger(path) as ledger:
        opening = source(backend, ledger)
        sandbox = await opening.open("", {})
        with anyio.CancelScope() as scope:
            scope.cancel()
            await sandbox.release()
    assert held(path) == []


async def test_a_release_that_hangs_is_given_up_and_stays_in_the_ledger(path: Path) -> None:
    backend = MemoryBackend(release_seconds=3600)
    with Ledger(path) as ledger:
        opening = source(backend, ledger, release_seconds=5)
        sandbox = await opening.open("", {})
        began = anyio.current_time()
        with pytest.raises(SandboxError, match="not confirmed to be gone after 5 s"):
            await sandbox.release()
        assert anyio.current_time() - began == pytest.approx(5)
    assert held(path) == ["loops-run-1"]


async def test_a_run_that_goes_on_uses_no_name_twice(path: Path) -> None:
    for _ in range(2):
        with Ledger(path) as ledger:
            async with source(MemoryBackend(), ledger) as opening:
                await opening.open("", {})
    names = {row["name"] for _, row in read_rows(path)}
    assert len(names) == 2


async def test_a_sandbox_has_what_the_table_says_but_for_what_its_call_says() -> None:
    backend = MemoryBackend()
    async with source(backend) as opening:
        await opening.open("", {"disk_mb": 8, "network": True})
        await opening.open("", {})
    assert [(spec.memory_mb, spec.disk_mb, spec.network) for spec in backend.specs] == [
        (64, 8, True),
        (64, 256, False),
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"memory_gb": 1}, "memory_gb"),
        ({"memory_mb": "1"}, "memory_mb"),
        ({"memory_mb": 0}, "memory_mb"),
        ({"backend": "none"}, r"backend is the same for all sandboxes of a run"),
    ],
)
async def test_an_override_that_cannot_be_is_told(overrides: dict[str, object], said: str) -> None:
    backend = MemoryBackend()
    with pytest.raises(EpisodeError, match=said):
        await source(backend).open("", overrides)
    assert backend.there == {}


async def test_what_was_lost_is_remembered_also_when_that_is_swallowed() -> None:
    backend = MemoryBackend(lost=True)
    async with source(backend) as opening:
        sandbox = await opening.open("", {})
        assert sandbox.failure is None
        with pytest.raises(SandboxError):
            await sandbox.exec("true")
        assert "is lost" in str(sandbox.failure)
