"""What a run writes so that it can go on after a kill: starts, batches, checkpoints.

A group's start is written before any of its attempts begins, a batch before it is sent, a
checkpoint's row once its files are whole; the row is on the disk when `checkpointed` returns, and
so is all that the run recorded before it. From these and the rows of the recorder `rundir.past`
tells where the run stood, whenever it was killed.
"""

import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Self

from loops_cookbook.journal import Journal, to_disk
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.rows import CheckpointRow, StartRow
from loops_cookbook.rundir.updates import KeptUpdate, UpdateStore

_SCHEME = "bt://loops:"


class SavePoints:
    """The files of one run, open as long as the `with` block lasts.

    Every method may raise `RunStopped`, when the disk takes no more.

    Args:
        folder: of a run that this process writes.
        now: Unix time.
    """

    def __init__(self, folder: RunFolder, *, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._now = now
        self.updates = UpdateStore(folder.updates)
        """Batches as they were sent."""
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            self._starts = opened.enter_context(Journal(self._folder.starts))
            self._rows = opened.enter_context(Journal(self._folder.checkpoint_rows, fsync=True))
            self._open = opened.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def started(self, serial: int, task: str, *, policy_version: int, update: int) -> None:
        """Write that a group is being started; see `StartRow`."""
        at = self._now()
        row = StartRow(
            serial=serial, task=task, policy_version=policy_version, update=update, at=at
        )
        self._starts.append([row.to_json()])

    def keep(self, sent: KeptUpdate) -> None:
        """Write a batch that is about to be sent."""
        self.updates.keep(sent)

    def checkpointed(self, row: CheckpointRow) -> None:
        """Write that a checkpoint is whole; the batches that it has are no longer kept."""
        folder = self._folder
        recorded = (folder.rollouts, folder.groups, folder.steps, folder.evaluations)
        for path in (folder.starts, *recorded):
            with suppress(FileNotFoundError):
                to_disk(path)
        self._rows.append([row.to_json()])
        self.updates.drop(row.update)

    def folder_of(self, path: str) -> str | None:
        """Where a checkpoint lies in the run folder, by the engine's name of it; None elsewhere."""
        if not path.startswith(_SCHEME):
            return None
        folder = self._folder.checkpoints / path.removeprefix(_SCHEME)
        return str(folder.relative_to(self._folder.root)) if folder.is_dir() else None

    def remove(self, rows: Iterable[CheckpointRow]) -> None:
        """Delete the files of checkpoints; what cannot be deleted stays, and is tried again."""
        for row in rows:
            if row.folder is None:
                continue
            folder = self._folder.root / row.folder
            hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
            with suppress(OSError):  # renamed first: no reader ever finds a part of one
                folder.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)
