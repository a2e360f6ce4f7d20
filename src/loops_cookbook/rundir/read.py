"""A run folder back as typed rows, also while the run goes on or after it was killed.

A torn last line is passed over, and so are keys that a later version added. A folder with a
newer schema is refused: what its rows mean is not known here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from loops_cookbook.attempts import Scalar
from loops_cookbook.errors import RunFolderError
from loops_cookbook.journal import Row, read_rows
from loops_cookbook.problems import found, nearest, shown
from loops_cookbook.records import (
    SCHEMA_VERSION,
    EvaluationRow,
    GroupRow,
    RolloutRow,
    RunRow,
    StepRow,
    Transcript,
)
from loops_cookbook.rundir.layout import ORIGIN_FILE, RunFolder
from loops_cookbook.rundir.rows import CheckpointRow, StartRow
from loops_cookbook.rundir.transcripts import nan_for_null, transcript_of

T = TypeVar("T")

_RUN = TypeAdapter(RunRow)
_STEP = TypeAdapter(StepRow)
_GROUP = TypeAdapter(GroupRow)
_ROLLOUT = TypeAdapter(RolloutRow)
_EVALUATION = TypeAdapter(EvaluationRow)
_CHECKPOINT = TypeAdapter(CheckpointRow)
_START = TypeAdapter(StartRow)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a run left so far. Its methods read the files when they are called.

    Each raises `RunFolderError` for a row that is damaged or is not of its kind.
    """

    folder: RunFolder
    run: RunRow

    def steps(self) -> tuple[StepRow, ...]:
        """A row for each update, in order."""
        return _typed(self.folder.steps, _step)

    def groups(self) -> tuple[GroupRow, ...]:
        """A row for each settled group, as they were settled."""
        return _typed(self.folder.groups, _GROUP.validate_python)

    def rollouts(self) -> tuple[RolloutRow, ...]:
        """A row for each attempt whose fate is known."""
        return _typed(self.folder.rollouts, rollout_row)

    def evaluations(self) -> tuple[EvaluationRow, ...]:
        """A row for each evaluation of a set, in order."""
        return read_evaluations(self.folder)

    def starts(self) -> tuple[StartRow, ...]:
        """A row for each group that was started, as they were started."""
        return _typed(self.folder.starts, _START.validate_python)

    def checkpoints(self) -> tuple[CheckpointRow, ...]:
        """A row for each checkpoint that was saved, in order; those not kept included."""
        return _typed(self.folder.checkpoint_rows, _CHECKPOINT.validate_python)

    def transcript(self, name: str) -> Transcript:
        """The transcript whose file in `transcripts/` has this name."""
        path = self.folder.transcripts / name
        return _valid(path, transcript_of, _object(path))


def open_run(root: Path, *, is_wanted: Callable[[RecordedRun], bool] | None = None) -> RecordedRun:
    """Read what a run is.

    Args:
        root: its folder.
        is_wanted: which of the runs in a folder that holds some is named as what may be meant;
            None: any.

    Raises:
        RunFolderError: it is no run folder, its records are of a newer schema, or no run's.
    """
    folder = RunFolder(root)
    if not folder.run.is_file():
        raise RunFolderError(_no_run(root, is_wanted))
    row = _object(folder.run)
    _require_schema(folder.run, row)
    return RecordedRun(folder, _valid(folder.run, _RUN.validate_python, row))


def _require_schema(path: Path, row: Row) -> None:
    if "schema" not in row:
        raise RunFolderError(
            f"{path} has no schema, so no run wrote it as it is: it was changed or damaged, or is "
            "another program's"
        )
    schema = row["schema"]
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise RunFolderError(
            f"{path} has schema {found(schema)}, which is no number of one: it was changed or "
            "damaged"
        )
    if schema > SCHEMA_VERSION:
        raise RunFolderError(
            f"{path} has schema {schema}, and this version of loops-cookbook reads schemas up to "
            f"{SCHEMA_VERSION}: install a newer version"
        )


def read_evaluations(folder: RunFolder) -> tuple[EvaluationRow, ...]:
    """A row for each evaluation of a set, in order.

    Raises:
        RunFolderError: one is damaged.
    """
    return _typed(folder.evaluations, _EVALUATION.validate_python)


def _no_run(root: Path, is_wanted: Callable[[RecordedRun], bool] | None) -> str:
    """What is there instead of a run's folder, as far as it shows, and which run may be meant."""
    where = shown(root)
    if not root.exists():
        beside = [run.name for run in runs_below(root.parent) if run.parent == root.parent]
        near = nearest(root.name, beside) or next(iter(beside), None)
        such = "" if near is None else f", such as {shown(root.with_name(near))}"
        return f"there is no folder {where}: name the folder of a run{such}"
    if not root.is_dir():
        of = f"the run, {shown(root.parent)}" if RunFolder(root.parent).run.is_file() else "a run"
        return f"{where} is a file: name the folder of {of}"
    if within := runs_below(root):
        such = next((run for run in within if is_wanted is None or _is(run, is_wanted)), within[0])
        return f"{where} holds {_runs(len(within))} and is none: name one, such as {shown(such)}"
    if (root / ORIGIN_FILE).is_file():
        return (
            f"{where} is what `loops export` wrote: name the run that it is from, or the folder as "
            "model.name where it is a whole model"
        )
    if RunFolder(root).transcripts.is_dir():
        return (
            f"{where} has no run.json: its run has not begun, or was killed before it did, and "
            "nothing of it is there; name the folder of another run"
        )
    return f"{where} has no run.json: name the folder of a run, which holds one from its start on"


def _runs(number: int) -> str:
    return "a run" if number == 1 else f"{number:,} runs"


def runs_below(folder: Path) -> list[Path]:
    """The run folders in a folder, else in the folders in it, the newest first."""
    files = [*folder.glob("*/run.json")] or [*folder.glob("*/*/run.json")]
    return sorted((file.parent for file in files), key=lambda run: run.name, reverse=True)


def _is(root: Path, wanted: Callable[[RecordedRun], bool]) -> bool:
    try:
        return wanted(open_run(root))
    except RunFolderError:
        return False


def _typed(path: Path, read: Callable[[Row], T]) -> tuple[T, ...]:
    return tuple(_valid(f"{path}:{number}", read, row) for number, row in read_rows(path))


def _valid(where: object, read: Callable[[Row], T], row: Row) -> T:
    try:
        return read(row)
    except (ValueError, LookupError, OverflowError) as error:
        fault = repr(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            fault = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise RunFolderError(
            f"{where} is not a record of its kind ({fault}): it was changed or damaged"
        ) from error


def _object(path: Path) -> Row:
    try:
        value = json.loads(path.read_bytes().decode())
    except FileNotFoundError as error:
        raise RunFolderError(f"{path} is not there: list its folder for what is") from error
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be read ({error.strerror}): see that this user may read it"
        ) from error
    except ValueError as error:
        raise RunFolderError(
            f"{path} cannot be read as JSON ({error}): it was changed or damaged"
        ) from error
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is not a JSON object: it was changed or damaged")
    return cast(Row, value)


def _step(row: Row) -> StepRow:
    apart = ("update", "at", "totals")
    numbers = {name: value for name, value in row.items() if name not in apart and _number(value)}
    metrics = nan_for_null(cast("dict[str, Scalar | None]", numbers))
    return _STEP.validate_python({**{k: row[k] for k in apart if k in row}, "metrics": metrics})


def _number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def rollout_row(row: Row) -> RolloutRow:
    """A row of `rollouts.jsonl`.

    Raises:
        ValueError: it is none.
    """
    metadata = row.get("metadata")
    if isinstance(metadata, dict):
        row = {**row, "metadata": nan_for_null(cast("dict[str, Scalar | None]", metadata))}
    return _ROLLOUT.validate_python(row)
