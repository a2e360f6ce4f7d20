"""The ledger of a run's sandboxes: `sandboxes.jsonl`, on the disk before a sandbox is asked for.

Each sandbox has one row that says it is about to be made, by whom and for what, and one that says
it is confirmed to be gone. What has the first and not the second may still be there: that is what
`loops cleanup` reads.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from loops_cookbook.errors import RunFolderError
from loops_cookbook.journal import Journal, Row, read_rows
from loops_cookbook.sandboxes.base import Entry

_OPENED, _RELEASED = "opened", "released"


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that makes a run's sandboxes."""

    host: str
    pid: int
    boot: str
    """Which start of the machine: another one has nothing left of what ran in this."""

    @classmethod
    def this_process(cls) -> Self:
        """The process that asks."""
        return cls(socket.gethostname(), os.getpid(), boot_id())


@dataclass(frozen=True, slots=True)
class OpenEntry:
    """A sandbox that was not confirmed to be gone."""

    entry: Entry
    owner: Owner
    at: float
    """Unix time of the row."""


class Ledger:
    """Writes a run's ledger; a context manager. One process writes it at a time.

    Raises:
        RunStopped: the file cannot be opened.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self.written = sum(1 for _ in read_rows(path))
        """Rows so far, those of an earlier process included."""
        self._journal = Journal(path, fsync=True)
        self._owner = asdict(Owner.this_process())
        self._now = now

    def opens(self, entry: Entry) -> None:
        """Write that a sandbox is about to be made.

        Raises:
            RunStopped: it cannot be written.
        """
        self._append({"event": _OPENED, **asdict(entry), "owner": self._owner, "at": self._now()})

    def released(self, entry: Entry) -> None:
        """Write that a sandbox is confirmed to be gone."""
        self._append({"event": _RELEASED, "name": entry.name, "at": self._now()})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._journal.close()

    def _append(self, row: Mapping[str, object]) -> None:
        self._journal.append([row])
        self.written += 1


def open_entries(path: Path) -> tuple[OpenEntry, ...]:
    """What a ledger says may still be there, in the order in which it was asked for.

    Raises:
        RunFolderError: a row is damaged.
    """
    left: dict[str, OpenEntry] = {}
    for number, row in read_rows(path):
        match row:
            case {"event": "opened"}:
                opened = _opened(row, f"{path}:{number}")
                left[opened.entry.name] = opened
            case {"event": "released", "name": str(name)}:
                left.pop(name, None)
            case _:
                raise RunFolderError(
                    f"{path}:{number} is not a row of a ledger: it was changed or damaged; mend or "
                    "remove that line"
                )
    return tuple(left.values())


def kinds_in(path: Path) -> frozenset[str]:
    """The backends that a run had sandboxes of, whatever became of them."""
    kinds = (row.get("backend") for _, row in read_rows(path))
    return frozenset(kind for kind in kinds if isinstance(kind, str))


def boot_id() -> str:
    """What is different after each start of this machine; empty where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


_ENTRY = TypeAdapter(Entry)
_OWNER = TypeAdapter(Owner)


def _opened(row: Row, where: str) -> OpenEntry:
    try:
        at = row["at"]
        if not isinstance(at, int | float):
            raise ValueError("at is no number")
        return OpenEntry(_ENTRY.validate_python(row), _OWNER.validate_python(row["owner"]), at)
    except (ValidationError, LookupError, ValueError) as error:
        raise RunFolderError(
            f"{where} does not name a sandbox ({str(error).splitlines()[0]}): it was changed or "
            "damaged; mend or remove that line"
        ) from error
