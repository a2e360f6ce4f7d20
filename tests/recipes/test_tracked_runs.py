"""Whole runs with the real packages of the trackers, offline, read back from what they wrote."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.recipes.test_rl import HalfRight, row_of
from tests.recipes.test_sft import row_of as sft_row_of

from loops_cookbook.config.shared import OutputTable
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.recipes.sft import run_sft
from loops_cookbook.recorders import Fanout
from loops_cookbook.records import StepRow
from loops_cookbook.report.trackers import open_trackers
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.read import open_run
from loops_cookbook.rundir.write import RunWriter
from loops_cookbook.testing import ScriptedSampler, ScriptedService

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

KEY = "0123456789abcdef0123456789abcdef01234567"
TRACKERS = ("wandb", "trackio")
Rows = dict[int, dict[str, float]]
"""The metrics of each update."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=TRACKERS)
def tracker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip(request.param)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return request.param


class Tracked:
    """A folder whose run is recorded and tracked, and what the tracker made of it."""

    def __init__(self, tracker: str, folder: RunFolder) -> None:
        self.folder = folder
        self.notes: list[tuple[str, str]] = []
        self._tracker = tracker
        self._output = OutputTable.model_validate({f"{tracker}_project": "a-project"})

    async def run(self, work: Any) -> None:
        with (
            RunWriter(self.folder) as writer,
            open_trackers(
                self._output, self.folder, lambda *said: self.notes.append(said), finish_seconds=60
            ) as trackers,
        ):
            await work(Fanout((writer, *trackers)))

    @property
    def recorded(self) -> Rows:
        """What is in the run's own records."""
        run = open_run(self.folder.root)
        rows: Rows = {}
        for evaluation in run.evaluations():
            rows.setdefault(evaluation.update, {}).update(evaluation.metrics)
        for step in run.steps():
            rows.setdefault(step.update, {}).update(step.metrics)
        return rows

    @property
    def read_back(self) -> tuple[Rows, dict[str, Any]]:
        """The metrics and the config that the tracker has."""
        if self._tracker == "trackio":
            return read_trackio(self.folder.root.name)
        return read_wandb(self.folder.root)


def read_trackio(name: str) -> tuple[Rows, dict[str, Any]]:
    # In a process of its own, since it settles where its data lies when it is imported.
    program = f"""
import json
from trackio import Api
from trackio.sqlite_storage import SQLiteStorage
(run,) = Api().runs("a-project")
rows = SQLiteStorage.get_logs("a-project", {name!r})
print(json.dumps([run.name, run.config, rows, [alert["title"] for alert in run.alerts()]]))
"""
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    told, config, logged, alerts = json.loads(said.stdout.splitlines()[-1])
    assert told == name
    rows: Rows = {}
    for row in logged:
        rows.setdefault(row.pop("step"), {}).update(row)
        row.pop("timestamp")
    for row in rows.values():
        row.pop("timestamp", None)
    return rows, config | {"ended": alerts}


def read_wandb(root: Path) -> tuple[Rows, dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    rows: Rows = {}
    config: dict[str, Any] = {"ended": []}
    for file in sorted(root.glob("wandb/offline-run-*/run-*.wandb")):
        for data in leveldb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                items = record.history.item
                row = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}
                assert row["_step"] == row["update"]
                update = int(row.pop("update"))
                told = {name: value for name, value in row.items() if name[0] != "_"}
                rows.setdefault(update, {}).update(told)
            elif record.HasField("run"):
                assert (record.run.project, record.run.run_id) == ("a-project", root.name)
                items = record.run.config.update
                config |= {i.key: json.loads(i.value_json) for i in items if i.key}
            elif record.HasField("exit"):
                config["ended"].append(record.exit.exit_code)
    return rows, config


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB, whose parts have 7 bytes before.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md; wandb begins a file with
    7 bytes of its own.
    """
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32_768 - at % 32_768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last of its parts
            yield whole
            whole = b""


EVALUATED = (
    "evaluation.every=2",
    "evaluation.sets.held_out.tasks='tasks.jsonl'",
    "evaluation.sets.held_out.attempts=2",
    "evaluation.sets.again.tasks='tasks.jsonl'",
)


async def test_what_a_run_writes_is_what_the_tracker_has(
    runnable: Any, project: Path, tracker: str
) -> None:
    plan = runnable("training.updates=5", *EVALUATED)
    tracked = Tracked(tracker, new_run_folder("runs", project))
    sets = {held_out.name: 4 for held_out in plan.sets}
    config = plan.config.model_dump(mode="json", by_alias=True)
    row = replace(row_of(plan), tasks={"train": 4, **sets}, config=config)
    service = ScriptedService(ScriptedSampler(HalfRight()))
    await tracked.run(lambda recorder: run_rl(plan, service, recorder, row))
    rows, told = tracked.read_back
    assert set(rows) == {0, 1, 2, 3, 4, 5}
    assert {"eval/held_out/pass_at_2", "eval/again/reward_mean"} <= rows[4].keys() & rows[5].keys()
    assert rows == tracked.recorded
    assert {key: told[key] for key in config} == config
    assert told["run"]["model"] == "a/policy"
    assert told["ended"] in ([0], ["The run ended: done"])
    assert [level for level, _ in tracked.notes] == ["info"]


async def test_a_run_that_goes_on_is_the_same_run_there(
    make_sft_plan: Any, sft_project: Path, tracker: str
) -> None:
    plan, tracked = make_sft_plan(), Tracked(tracker, new_run_folder("runs", sft_project))
    config = plan.config.model_dump(mode="json", by_alias=True)
    row = replace(sft_row_of(plan), tasks={"train": 3, "held_out": 2}, config=config)

    async def go_on(recorder: Fanout) -> None:
        steps, (trackers,) = open_run(tracked.folder.root).steps(), recorder.recorders[1:]
        trackers.run_started(row)
        for step in steps:  # that a caller tells again
            trackers.update(replace(step, metrics={"loss": -99.0}))
        trackers.update(StepRow(update=3, at=0.0, metrics={"loss": 7.0}))
        trackers.run_ended("done", {})

    await tracked.run(lambda recorder: run_sft(plan, ScriptedService([]), recorder, row))
    before, _ = tracked.read_back
    assert before == tracked.recorded
    assert set(before) == {0, 1, 2}
    await Tracked(tracker, tracked.folder).run(go_on)
    after, _ = tracked.read_back
    assert after == {**before, 3: {"loss": 7.0}}


async def test_no_key_is_in_a_record(runnable: Any, project: Path, tracker: str) -> None:
    plan = runnable()
    tracked = Tracked(tracker, new_run_folder("runs", project))
    service = ScriptedService(ScriptedSampler(HalfRight()))
    await tracked.run(lambda recorder: run_rl(plan, service, recorder, row_of(plan)))
    files = [path for path in tracked.folder.root.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
