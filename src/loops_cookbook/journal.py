"""Files that survive a kill: rows appended whole, files replaced whole, folders made whole.

A row is one JSON object on one line, written by one call to the end of the file, so that
whatever prefix of the bytes survives, reading it gives a prefix of the rows. A last line that
a kill tore is passed over by `read_rows` and cut off by the next `Journal`; a last line that is
a whole object and lacks only its newline is kept by both. One process writes a file at a time.

JSON has no number that is not finite: NaN and the infinities are written as null.
"""

import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Self, TypeAlias, cast

from pydantic_core import to_json

from loops_cookbook.errors import RunFolderError, RunStopped

Row: TypeAlias = dict[str, object]
"""One line of a journal, as JSON reads it."""

_MODE = 0o666  # what the umask leaves of it, as for any file that a program makes
_CHUNK = 65_536
_DEEPEST = 100


class Journal:
    """A file of rows, open for appending; a context manager.

    Args:
        path: created if it is not there; a torn last line is cut off.
        fsync: whether a row is on the disk, and not only in the system's memory, when
            `append` returns. Needed to survive a crash of the machine, not of the process.

    Raises:
        RunStopped: the file cannot be opened.
    """

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        self._path = path
        self._fsync = fsync
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
        except OSError as error:
            raise _cannot_write(path, error) from error
        try:
            _mend(self._file)
            if fsync:
                to_disk(path.parent)
        except BaseException:
            os.close(self._file)
            raise

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Write rows to the end: all of them, or none where an error is raised.

        Raises:
            RunStopped: the file cannot be written, for example because the disk is full.
        """
        lines = "".join(f"{encode(row)}\n" for row in rows)
        size = os.fstat(self._file).st_size
        try:
            _write_all(self._file, utf8(lines))
            if self._fsync:
                os.fsync(self._file)
        except BaseException as error:
            os.ftruncate(self._file, size)  # or the next row would be glued to half a row
            if isinstance(error, OSError):
                raise _cannot_write(self._path, error) from error
            raise

    def amend(self, more: Mapping[str, object]) -> None:
        """Add keys to the end of the last row: all of them, or none where an error is raised.

        Raises:
            RunStopped: the file cannot be written, for example because the disk is full.
        """
        size = os.fstat(self._file).st_size
        assert size, "there is no row yet"
        if not more:
            return
        added, place = utf8(f",{encode(more)[1:]}\n"), size - len("}\n")
        # Appending files write at their end alone, whatever the place.
        file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            written = os.pwrite(file, added, place)
            while written < len(added):  # see `_write_all`
                written += os.pwrite(file, added[written:], place + written)
            if self._fsync:
                os.fsync(file)
        except OSError as error:
            os.pwrite(file, b"}\n", place)  # or the row would be torn, and cut off by the next
            os.ftruncate(file, size)
            raise _cannot_write(self._path, error) from error
        finally:
            os.close(file)

    def close(self) -> None:
        """Close the file; nothing is buffered, so nothing is lost without it."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def write_atomically(path: Path | str, text: str, *, fsync: bool = False) -> None:
    """Replace a file, or make it: a reader sees the old content or the new, never a part.

    Raises:
        RunStopped: the file cannot be written, for example because the disk is full.
    """
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        try:
            _write_new(beside, utf8(text), fsync=fsync)
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(beside)
            raise
        if fsync:
            to_disk(Path(path).parent)
    except OSError as error:
        raise _cannot_write(path, error) from error


@contextmanager
def whole_folder(folder: Path) -> Generator[Path]:
    """Make a folder: it takes its place, synced to the disk, once the block ends well.

    What is yielded is an empty folder of another name beside it, to be filled; the folders above
    are made.

    Raises:
        OSError: it cannot be made, or its place is taken by then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    beside.mkdir()
    try:
        yield beside
        for path in (*beside.rglob("*"), beside):
            to_disk(path)
        if os.path.lexists(folder):  # a rename would take the place of an empty folder
            raise FileExistsError(errno.EEXIST, "it is there already", str(folder))
        beside.rename(folder)
        to_disk(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def file_above(folder: Path) -> Path | None:
    """The file that a folder would have to be made in; None where there is none."""
    there = next((path for path in folder.parents if path.exists()), None)
    return None if there is None or there.is_dir() else there


def to_disk(path: Path) -> None:
    """Wait until a file is on the disk, or a folder: a file's name is there when its folder is.

    Raises:
        OSError: it is not there, or the disk takes no more.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Every whole row of a file with its line number, from 1; none where there is no file.

    Raises:
        RunFolderError: a line before the last is not a JSON object, which no kill explains; or the
            file cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(
            f"{path}: cannot be read ({error.strerror}): see that it is a file, and that this user "
            "may read it"
        ) from error
    lines = content.split(b"\n")
    torn = lines.pop()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _row(line)
        if row is None:
            raise RunFolderError(
                f"{path}:{number} is not a JSON object, and it is not the last line, which a kill "
                "may tear: the file was changed or damaged, mend or remove that line"
            )
        yield number, row
    row = _row(torn)
    if row is not None:
        yield len(lines) + 1, row


def encode(value: object) -> str:
    """One line of JSON, valid whatever the value holds.

    Dataclasses become objects, numpy scalars and arrays numbers and lists, sets lists; what JSON
    cannot hold becomes its `repr`: a record is for reading, and must not end the run that it
    records.
    """
    try:  # at a quarter of the cost of `json`; it refuses half a surrogate pair, and some depths
        return to_json(value, inf_nan_mode="null", fallback=_default).decode()
    except ValueError:
        return _encode_anything(value)


def utf8(text: str) -> bytes:
    """Text as bytes; half a surrogate pair, which has no UTF-8, as JSON's escape for it.

    Models write such halves, and names of files hold them.
    """
    return text.encode(errors="backslashreplace")


def _encode_anything(value: object) -> str:
    try:
        return _JSON.encode(value)
    except (TypeError, ValueError, RecursionError):
        return _JSON.encode(_plain(value, 0))


def _default(value: object) -> object:
    try:
        return _unfolded(value)
    except Exception:  # user code: it may come in a message, and raise where it is looked at
        return f"<{type(value).__name__} that cannot be written>"


def _unfolded(value: object) -> object:
    to_list = getattr(value, "tolist", None)
    if callable(to_list):
        return to_list()
    if isinstance(value, Mapping):
        return dict(cast(Mapping[object, object], value))
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in fields(value)}
    return repr(value)


_JSON = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, default=_default, separators=(",", ":")
)


def _plain(value: object, depth: int) -> object:
    """The value with everything replaced that JSON cannot hold."""
    if depth > _DEEPEST:
        return "..."
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        pairs = cast(Mapping[object, object], value).items()
        return {str(key): _plain(inner, depth + 1) for key, inner in pairs}
    if isinstance(value, list | tuple):
        return [_plain(inner, depth + 1) for inner in cast(Iterable[object], value)]
    return _plain(_default(value), depth + 1)


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line.decode())
    except ValueError:
        return None
    return cast(Row, row) if isinstance(row, dict) else None


def _mend(file: int) -> None:
    """Give a whole last line its newline, or cut a torn one off."""
    size = os.fstat(file).st_size
    tail = b""
    start = size
    while start > 0 and b"\n" not in tail:
        step = min(_CHUNK, start)
        start -= step
        tail = os.pread(file, step, start) + tail
    last = tail[tail.rfind(b"\n") + 1 :]
    if not last:
        return
    if _row(last) is not None:
        _write_all(file, b"\n")
    else:
        os.ftruncate(file, size - len(last))


def _write_new(path: str, content: bytes, *, fsync: bool) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
    try:
        _write_all(file, content)
        if fsync:
            os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, content: bytes) -> None:
    """One `write`; more only where the system took a part of it, as a disk that fills does."""
    written = os.write(file, content)
    while written < len(content):
        written += os.write(file, content[written:])


def _cannot_write(path: Path | str, error: OSError) -> RunStopped:
    return RunStopped(
        f"{path} cannot be written ({error.strerror or error}), so rows are missing in the run's "
        "folder: make room for it or give access to it, then go on with --resume, which writes "
        "them (an evaluation starts again)"
    )
