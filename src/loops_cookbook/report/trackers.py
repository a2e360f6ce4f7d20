"""Recorders that mirror a run's numbers to an experiment tracker: Weights & Biases, Trackio.

Every metric of each update and the scores of its evaluations are sent under the number of the
update, and with them the config and how the run ended. Each tracker works in a process of its own,
so nothing that it does, or fails to do, is felt by the run; `steps.jsonl` has it all, whatever
became of the tracker.

What a tracker calls the run stands in the run's folder before the first metric is sent. A folder
that has it already is gone on with: under the same name, and without the rows that it had.
"""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import TypeAdapter

from loops_cookbook.attempts import Attempt
from loops_cookbook.config.shared import OutputTable
from loops_cookbook.errors import MissingExtra, RunFolderError
from loops_cookbook.journal import read_rows, write_atomically
from loops_cookbook.recipes.evaluation import is_due
from loops_cookbook.records import (
    TRAIN,
    EvaluationRow,
    GroupRow,
    Level,
    Recorder,
    RolloutRow,
    RunRow,
    RunStatus,
    StepRow,
)
from loops_cookbook.report.tracker_process import FINISH_SECONDS, Note, TrackerProcess
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.services.extras import is_installed

TRACKERS = ("wandb", "trackio")
"""Each is the name of a module, of an extra, and of a key of `[output]` before `_project`."""

IDS_FILE = "trackers.json"
"""In the run's folder: what each tracker calls the run."""

_IDS = TypeAdapter(dict[str, str])


def require_trackers(output: OutputTable) -> None:
    """Refuse a project whose tracker is not installed.

    Raises:
        MissingExtra: what to install.
    """
    for name in projects(output):
        if not is_installed((name,)):
            raise MissingExtra(f"output.{name}_project", name)


def projects(output: OutputTable) -> dict[str, str]:
    """The project that is asked for, by tracker."""
    asked = {name: cast(str | None, getattr(output, f"{name}_project")) for name in TRACKERS}
    return {name: project for name, project in asked.items() if project is not None}


@contextmanager
def open_trackers(
    output: OutputTable,
    folder: RunFolder,
    note: Note,
    *,
    finish_seconds: float = FINISH_SECONDS,
) -> Generator[tuple[Recorder, ...]]:
    """A Recorder for each project that is asked for, for the length of the block; often none.

    Args:
        output: which projects.
        folder: of the run; one that was tracked before goes on under the same name.
        note: told what a tracker says, and why one is given up.
        finish_seconds: for each to send what is left, at the end of the block.

    Raises:
        RunFolderError: the folder does not say how it was tracked.
    """
    asked = projects(output)
    if not asked:
        yield ()
        return
    before = _ids(folder.root / IDS_FILE)
    ids = {name: before.get(name, folder.root.name) for name in asked}
    write_atomically(folder.root / IDS_FILE, json.dumps(before | ids) + "\n")
    with ExitStack() as stack:
        trackers: list[Recorder] = []
        for name, project in asked.items():
            process = stack.enter_context(TrackerProcess(name, note, finish_seconds))
            sent = _last_update(folder) if name in before else -1
            trackers.append(Tracker(process, Tracked(project, ids[name], folder.root, sent)))
        yield tuple(trackers)


@dataclass(frozen=True, slots=True)
class Tracked:
    """A run as its tracker knows it."""

    project: str
    id: str
    folder: Path
    """For what the tracker keeps of its own."""
    sent: int = -1
    """The last update whose row it was sent by a process before this one."""


class Tracker:
    """A Recorder that says in a tracker's words what is worth a curve, and leaves out the rest.

    Args:
        process: where it is sent.
        tracked: what it is sent as.
    """

    def __init__(self, process: TrackerProcess, tracked: Tracked) -> None:
        self._process = process
        self._tracked = tracked
        self._row: RunRow | None = None
        self._awaited: set[str] = set()
        """Evaluation sets whose scores belong to the update that was sent last."""

    def run_started(self, row: RunRow) -> None:
        """Open the run under its name, with its config; told again, add what the service is."""
        if self._row is None:
            self._send(
                "begin",
                project=self._tracked.project,
                id=self._tracked.id,
                folder=str(self._tracked.folder),
                config={**row.config, "run": _facts(row)},
            )
            self._awaited = _sets(row)  # before the first update
        else:
            self._send("describe", config={"run": _facts(row)})
        self._row = row

    def update(self, row: StepRow) -> None:
        """Send the metrics of an update that the tracker does not have."""
        assert self._row is not None, "a run starts first"
        if row.update <= self._tracked.sent:
            return
        self._awaited = _sets(self._row) if _is_evaluated(row.update, self._row) else set()
        self._log(row.update, row.metrics)

    def evaluation(self, row: EvaluationRow) -> None:
        """Send the scores of a set, under the number of the update that it was after."""
        self._awaited.discard(row.set)
        self._log(row.update, row.metrics)

    def run_ended(
        self, status: RunStatus, counts: Mapping[str, int], reason: str | None = None
    ) -> None:
        """Send how it ended, and with what counts."""
        if self._row is not None:
            self._send("end", status=status, reason=reason, counts=dict(counts))

    def group_settled(self, row: GroupRow) -> None:
        """Nothing is sent of it; what the pipe did not take before is."""
        self._process.push()

    def attempt_ended(self, attempt: Attempt, purpose: str) -> None:
        """Nothing is sent of it."""

    def fates(self, rows: Sequence[RolloutRow]) -> None:
        """Nothing is sent of them."""

    def note(self, level: Level, text: str) -> None:
        """Nothing is sent of it."""

    def _log(self, update: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            is_whole = not self._awaited
            self._send("log", update=update, metrics=dict(metrics), is_whole=is_whole)

    def _send(self, what: str, **said: object) -> None:
        self._process.send({"do": what, **said})


def _facts(row: RunRow) -> dict[str, object]:
    """What a run is beside its config."""
    return {
        "name": row.run,
        "scope": row.scope,
        "model": row.model,
        "versions": dict(row.versions),
        "service": dict(row.service),
    }


def _sets(row: RunRow) -> set[str]:
    return set(row.tasks) - {TRAIN}


def _is_evaluated(update: int, row: RunRow) -> bool:
    table = cast(Mapping[str, object], row.config.get("evaluation") or {})
    return is_due(update, every=cast(int, table.get("every", 0)), last=row.updates)


def _ids(path: Path) -> dict[str, str]:
    try:
        return _IDS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunFolderError(
            f"{path} does not say how the run was tracked, as a JSON object with a name for each "
            "tracker: mend it, or remove it to track the run anew"
        ) from error


def _last_update(folder: RunFolder) -> int:
    return max((cast(int, row.get("update", -1)) for _, row in read_rows(folder.steps)), default=-1)
