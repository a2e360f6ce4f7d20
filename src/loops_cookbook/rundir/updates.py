"""Batches as they were sent to the trainer, kept until a checkpoint has them.

An update's file is written whole before the update is sent, so that after any kill each batch can
be sent again, under the key that it had: by a trainer that lives on it is then not applied twice,
and a trainer that was loaded from a checkpoint applies it as it did before. Arrays only, nothing
that could run.
"""

import io
import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loops_cookbook.errors import RunFolderError, RunStopped
from loops_cookbook.learning.datums import Datum

_STREAMS = ("input_ids", "target_ids", "logprobs", "advantages", "weights")
_SUFFIX = ".npz"


@dataclass(frozen=True, slots=True, eq=False)
class KeptUpdate:
    """All that an update is sent with."""

    update: int
    key: str
    """Names it at the trainer."""
    datums: tuple[Datum, ...]
    call: Mapping[str, object]
    """The loss and the optimizer's settings; plain JSON."""
    facts: Mapping[str, object]
    """What its records need and the trainer does not tell; plain JSON."""


class UpdateStore:
    """The folder `updates/` of a run.

    Args:
        folder: made when the first update is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, kept: KeptUpdate) -> None:
        """Write an update, whole or not at all.

        Raises:
            RunStopped: it cannot be written, for example because the disk is full.
        """
        path = self._path(kept.update)
        beside = path.with_name(f"{path.name}.tmp")
        try:
            self._folder.mkdir(exist_ok=True)
            beside.write_bytes(_encoded(kept))
            os.replace(beside, path)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()
            raise _stopped(path, "written", error) from error

    def read(self, update: int) -> KeptUpdate:
        """An update that was kept.

        Raises:
            RunFolderError: it is not there, or not as it was written.
        """
        path = self._path(update)
        try:
            return _decoded(path.read_bytes())
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise RunFolderError(
                f"{path} cannot be read as an update that was kept ({error}): without it the run "
                "cannot be resumed"
            ) from error

    def kept(self) -> list[int]:
        """The updates that are there, in order."""
        if not self._folder.is_dir():
            return []
        names = (p.stem for p in self._folder.iterdir() if p.suffix == _SUFFIX)
        return sorted(int(name) for name in names if name.isdecimal())

    def forget(self, update: int) -> None:
        """Forget an update that is not known to be applied, and shall not be applied again.

        Raises:
            RunStopped: it stays, and is applied when the run goes on.
        """
        path = self._path(update)
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise _stopped(path, "deleted", error) from error

    def drop(self, last: int) -> None:
        """Forget every update up to this one, which a checkpoint has; one that stays harms none."""
        for update in self.kept():
            if update <= last:
                with suppress(OSError):
                    self._path(update).unlink()

    def _path(self, update: int) -> Path:
        return self._folder / f"{update:06}{_SUFFIX}"


def _stopped(path: Path, what: str, error: OSError) -> RunStopped:
    return RunStopped(
        f"{path} cannot be {what} ({error.strerror or error}): make room for it or give access to "
        "its folder, then resume"
    )


def _encoded(kept: KeptUpdate) -> bytes:
    lengths = [len(datum.input_ids) for datum in kept.datums]
    arrays: dict[str, npt.NDArray[np.generic]] = {"lengths": np.array(lengths, np.int64)}
    for name in _STREAMS:
        streams = [getattr(datum, name) for datum in kept.datums]
        if streams and streams[0] is not None:
            arrays[name] = np.concatenate(streams)
    told = {
        "update": kept.update,
        "key": kept.key,
        "call": kept.call,
        "facts": kept.facts,
    }
    arrays["told"] = np.frombuffer(json.dumps(told).encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _decoded(content: bytes) -> KeptUpdate:
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        told = json.loads(arrays["told"].tobytes())
        ends = np.cumsum(arrays["lengths"])
        streams = {
            name: np.split(arrays[name], ends[:-1]) for name in _STREAMS if name in arrays.files
        }
    return KeptUpdate(
        update=told["update"],
        key=told["key"],
        datums=_datums(streams, len(ends)),
        call=told["call"],
        facts=told["facts"],
    )


def _datums(streams: Mapping[str, Sequence[npt.NDArray[np.generic]]], n: int) -> tuple[Datum, ...]:
    def rows() -> Iterable[Datum]:
        for index in range(n):
            row = {name: stream[index] for name, stream in streams.items()}
            yield Datum(**row)  # pyright: ignore[reportArgumentType]

    return tuple(rows())
