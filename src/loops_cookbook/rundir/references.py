"""What a person calls a checkpoint: a run folder, `RUN_DIR@<update>`, or a service's own path.

A run folder alone means its last checkpoint. One that was not kept is not there to be named.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loops_cookbook.errors import RunFolderError
from loops_cookbook.problems import shown
from loops_cookbook.records import RunRow
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.read import RecordedRun, open_run
from loops_cookbook.rundir.rows import CheckpointRow, best_of

SCHEMES = ("bt://", "tinker://")
"""How the paths of services begin."""

_MOST_TOLD = 5
"""Checkpoints that a message names, the best besides."""


@dataclass(frozen=True, slots=True)
class Located:
    """A checkpoint of a run on this machine."""

    run: RunRow
    root: Path
    """The run folder."""
    row: CheckpointRow

    @property
    def folder(self) -> Path | None:
        """Its files; None where a service keeps them."""
        return None if self.row.folder is None else self.root / self.row.folder


def is_service_path(reference: str) -> bool:
    """Whether a reference is a path that only a service knows."""
    return reference.startswith(SCHEMES)


def locate(reference: str, *, beside: Path | None = None) -> Located:
    """Find the checkpoint that a reference means.

    Args:
        reference: `RUN_DIR` or `RUN_DIR@<update>`.
        beside: the folder that a relative path begins in; None: the working directory.

    Raises:
        RunFolderError: there is no such run, or it has no such checkpoint.
    """
    name, update = parted(reference)
    if not name.strip():
        raise RunFolderError(f"{reference!r} names no run: write RUN_DIR or RUN_DIR@UPDATE")
    root = (beside or Path.cwd()) / Path(name).expanduser()
    _require_number(root)
    run = open_run(root, is_wanted=_has_checkpoint)
    kept = kept_checkpoints(run)
    if not kept:
        raise RunFolderError(f"{shown(root)} {_why_none(run)}")
    chosen = [row for row in kept if update in (None, row.update)]
    if not chosen:
        was_saved = update in {row.update for row in run.checkpoints()}
        why = ", which was saved and not kept (training.keep)" if was_saved else ""
        raise RunFolderError(
            f"{shown(root)} has no checkpoint of update {update}{why}: it has {_told(kept)}"
        )
    return Located(run.run, root, chosen[-1])


def _has_checkpoint(run: RecordedRun) -> bool:
    return bool(kept_checkpoints(run))


def _require_number(root: Path) -> None:
    """Refuse what stands after the @ behind a run folder and is no update, such as `@best`."""
    name, at, after = root.name.rpartition("@")
    run = root.with_name(name) if name else root
    if not at or not RunFolder(run).run.is_file() or root.exists():
        return
    recorded = open_run(run)
    kept = kept_checkpoints(recorded)
    raise RunFolderError(
        f"{shown(root)}: after the last @ stands the number of an update, and {after!r} is none: "
        f"{shown(run)} {f'has {_told(kept)}' if kept else _why_none(recorded)}"
    )


def _told(kept: Sequence[CheckpointRow]) -> str:
    """Checkpoints as they are named, the newest and the best of them where they are many."""
    best = best_of(kept)
    named = [row for row in kept if row is best or row in kept[-_MOST_TOLD:]]
    left = len(kept) - len(named)
    words = [f"{left:,} older ones"] if left else []
    for row in named:
        is_best = f" (the best by {row.score_name})" if row is best and len(kept) > 1 else ""
        words.append(f"@{row.update}{is_best}")
    return ", ".join(words)


def _why_none(run: RecordedRun) -> str:
    """That a run has no checkpoint, and what to name instead of it."""
    if run.run.recipe == "eval":
        policies = dict.fromkeys(row.policy or "" for row in run.evaluations())
        named = [each for each in policies if is_service_path(each) or parted(each)[1] is not None]
        such = f"what it evaluated, {', '.join(named)}" if named else "the folder of a run"
        return f"is of `loops eval`, which saves no checkpoint: name {such}"
    if run.checkpoints():
        return "has no checkpoint any more: those that it saved were deleted; name another run"
    return "has no checkpoint: name a run that saved one (training.checkpoint_every)"


def kept_checkpoints(run: RecordedRun) -> list[CheckpointRow]:
    """The checkpoints that are still there, the oldest first; the newest of each update."""
    rows = {row.update: row for row in run.checkpoints()}
    return [row for _, row in sorted(rows.items()) if _is_there(run.folder, row)]


def _is_there(folder: RunFolder, row: CheckpointRow) -> bool:
    return row.folder is None or (folder.root / row.folder).is_dir()


def parted(reference: str) -> tuple[str, int | None]:
    """The run folder that a reference names, and the update, where it names one."""
    name, at, update = reference.rpartition("@")
    return (name, int(update)) if at and update.isdecimal() else (reference, None)
