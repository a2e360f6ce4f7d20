"""The names of everything in a run folder, and how one is made and held.

A folder is made once and never written over; its name tells when the run began, in UTC. One
process at a time writes a run: it holds the folder's lock, which the system lets go when that
process ends, however it ends. A copy of the folder has a lock of its own, which nobody holds; so
whoever writes a run leaves its claim in the lock, by which a copy is told from the folder itself.
"""

import fcntl
import json
import os
import re
import secrets
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from loops_cookbook.errors import RunFolderError, RunIsAlive

ORIGIN_FILE = "loops.json"
"""Beside the files of a model that was exported or fetched: where they come from."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run's records lie."""

    root: Path

    @property
    def run(self) -> Path:
        """What the run is, replaced whole at each update."""
        return self.root / "run.json"

    @property
    def steps(self) -> Path:
        """A row for each update."""
        return self.root / "steps.jsonl"

    @property
    def groups(self) -> Path:
        """A row for each settled group."""
        return self.root / "groups.jsonl"

    @property
    def rollouts(self) -> Path:
        """A row for each attempt whose fate is known."""
        return self.root / "rollouts.jsonl"

    @property
    def evaluations(self) -> Path:
        """A row for each evaluation of a set."""
        return self.root / "evaluations.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of the embedded engine's checkpoints."""
        return self.root / "checkpoints"

    @property
    def checkpoint_rows(self) -> Path:
        """A row for each checkpoint that is whole."""
        return self.root / "checkpoints.jsonl"

    @property
    def starts(self) -> Path:
        """A row for each group that was started."""
        return self.root / "starts.jsonl"

    @property
    def updates(self) -> Path:
        """The folder of batches as they were sent, until a checkpoint has them."""
        return self.root / "updates"

    @property
    def transcripts(self) -> Path:
        """The folder with a file for each attempt that `trace` keeps."""
        return self.root / "transcripts"

    @property
    def sandboxes(self) -> Path:
        """The ledger: what may have to be released."""
        return self.root / "sandboxes.jsonl"

    @property
    def log(self) -> Path:
        """What a person should know, with its time."""
        return self.root / "log.txt"

    @property
    def lock(self) -> Path:
        """Held by the process that writes the run."""
        return self.root / ".lock"


def run_root(path: Path) -> Path:
    """A run folder under its own name, by which services know the run; a link has another."""
    root = path.absolute()
    return root.resolve() if root.is_symlink() else root


def transcript_stem(group: int, attempt: int, *, evaluation: str = "") -> str:
    """The name of an attempt's file, which ends in `.json`; the evaluation's name is before it."""
    before = re.sub(r"[^\w.-]", "_", f"{evaluation}-") if evaluation else ""
    return f"{before}{group}-{attempt}"


def new_run_folder(output_dir: str | Path, cwd: Path, *, now: datetime | None = None) -> RunFolder:
    """Make `<cwd>/<output_dir>/<UTC yyyymmdd-hhmmss>-<4 hex>/`.

    Raises:
        RunFolderError: the folder cannot be made there.
    """
    parent = cwd / output_dir
    stamp = (now or datetime.now(UTC)).astimezone(UTC).strftime("%Y%m%d-%H%M%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            root = parent / f"{stamp}-{secrets.token_hex(2)}"
            try:
                root.mkdir()
            except FileExistsError:
                continue
            folder = RunFolder(root)
            folder.transcripts.mkdir()
            return folder
    except OSError as error:
        raise RunFolderError(
            f"no run folder can be made in {parent} ({error.strerror}): "
            "give access to it, or set output.output_dir to another place"
        ) from error


@dataclass(frozen=True, slots=True)
class Claim:
    """Where a run was written last: what its lock says of itself, and so does every copy of it."""

    host: str
    folder: str
    file: int
    """The number of the lock's own file on its disk. A copy has another; a folder that was moved on
    one disk has it still."""
    origin: "Claim | None" = None
    """Of a copy that was gone on with: where the run was written that it is a copy of, where that
    is another machine. The run may go on there as well."""

    @classmethod
    def on(cls, folder: RunFolder, file: int, origin: Self | None) -> Self:
        """The claim of this process on a folder whose lock it has open.

        Args:
            folder: the run's.
            file: the lock, open.
            origin: where the run was written that the folder holds a copy of.
        """
        elsewhere = None if origin is None or origin.is_of_this_machine else origin
        number = os.fstat(file).st_ino
        return cls(socket.gethostname(), str(folder.root.absolute()), number, elsewhere)

    @property
    def is_of_this_machine(self) -> bool:
        """Whether it can be seen from here if that folder is held."""
        return self.host == socket.gethostname()


_CLAIM = TypeAdapter(Claim)


@contextmanager
def locked(folder: RunFolder, *, claims: bool = False) -> Generator[Claim | None]:
    """Hold a run folder for this process; release it at the end of the block.

    Args:
        folder: what is held.
        claims: whether the run is written here from now on, as it is by whoever adds to it.

    Yields:
        Where the run was written that this folder holds a copy of; None where it is no copy.

    Raises:
        RunIsAlive: another process holds it, or the folder that it is a copy of.
        RunFolderError: it is not there, or this user may not write it.
    """
    try:
        file = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise RunFolderError(
            f"{folder.root} cannot be locked ({error.strerror}): it must be a run folder "
            "that this user may write"
        ) from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunIsAlive(
                f"{folder.root} is being written by process {_holder(file)}: "
                "wait until that run ends, or stop it"
            ) from error
        claim = _claim(file)
        origin = _origin(claim, file)
        if origin is not None and origin.is_of_this_machine:
            _refuse_copy_of_the_living(folder, file, Path(origin.folder))
        _sign(file, Claim.on(folder, file, origin) if claims else claim)
        yield origin
    finally:
        # The file stays: to remove it would let two processes lock two files of one name.
        os.close(file)


def origin_of(folder: RunFolder) -> Claim | None:
    """Where the run was written that a folder holds a copy of, for whoever holds the folder.

    None where it is no copy, or was one of a run of this machine, which has ended.
    """
    file = os.open(folder.lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _origin(_claim(file), file)
    finally:
        os.close(file)


def _origin(claim: Claim | None, file: int) -> Claim | None:
    if claim is None or claim.file != os.fstat(file).st_ino:
        return claim
    return claim.origin


def _refuse_copy_of_the_living(folder: RunFolder, file: int, original: Path) -> None:
    try:
        other = os.open(RunFolder(original).lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # gone, or another user's
        return
    try:
        if not os.path.sameopenfile(file, other):  # it is, where a copy was put back in its place
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunIsAlive(
            f"{folder.root} is a copy of {original}, which is being written by process "
            f"{_holder(other)}: wait until that run ends, or stop it"
        ) from error
    finally:
        os.close(other)


def _sign(file: int, claim: Claim | None) -> None:
    """Say who holds a lock, and keep or make its claim."""
    os.ftruncate(file, 0)
    signed = f"{os.getpid()}\n" + (f"{json.dumps(asdict(claim))}\n" if claim else "")
    os.pwrite(file, signed.encode(), 0)


def _holder(file: int) -> str:
    return _lines(file)[0]


def _claim(file: int) -> Claim | None:
    """None where it was left by a version without claims, or torn."""
    try:
        return _CLAIM.validate_json(_lines(file)[1])
    except (IndexError, ValidationError):
        return None


def _lines(file: int) -> list[str]:
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace").split("\n")
