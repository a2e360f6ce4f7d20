"""The names of everything in a run folder, and how one is made and held.

A folder is made once and never written over; its name tells when the run began, in UTC. One
process at a time writes a run: it holds the folder's lock, which the system lets go when that
process ends, however it ends.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from loops_cookbook.errors import RunFolderError


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


@contextmanager
def locked(folder: RunFolder) -> Generator[None]:
    """Hold a run folder for this process; release it at the end of the block.

    Raises:
        RunFolderError: another process holds it, or it is not there.
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
            holder = os.pread(file, 20, 0).decode(errors="replace").strip()
            raise RunFolderError(
                f"{folder.root} is being written by process {holder}: "
                "wait until that run ends, or stop it"
            ) from error
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        # The file stays: to remove it would let two processes lock two files of one name.
        os.close(file)
