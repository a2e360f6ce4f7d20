"""An image to test with, made of programs of this machine: no registry has to be reached."""

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from loops_cookbook.errors import SandboxUnavailable
from loops_cookbook.sandboxes.engine import engine_here

NAME = "loops-cookbook-test"
_PROGRAMS = (
    *("bash", "sh", "env", "head", "mktemp", "mkdir", "cat", "mv", "chmod", "rm", "ps", "grep"),
    *("sleep", "ls", "touch", "true", "false", "ln", "mkfifo", "truncate", "wc", "tr", "yes"),
    *("setsid", "nohup", "id", "sort", "dd", "readlink", "echo", "date", "stat", "seq"),
)
_FOLDERS = {"bin": 0o755, "etc": 0o755, "usr": 0o755, "tmp": 0o1777, "proc": 0o755, "sys": 0o755}
_FILES = {
    "etc/passwd": "root:x:0:0::/:/bin/sh\napp:x:1000:1000::/:/bin/sh\n",
    "etc/group": "root:x:0:\napp:x:1000:\n",
}


@cache
def made_or_skip() -> None:
    """Give the image to the engine that answers."""
    try:
        engine = engine_here()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    subprocess.run(
        [engine.program, "import", "--change", "ENV FROM_IMAGE=yes", "-", NAME],
        input=tar_of(_PROGRAMS),
        capture_output=True,
        check=True,
    )
    _skip_where_none_starts(engine.program)


def _skip_where_none_starts(program: str) -> None:
    """An engine may answer and be unable to start any container, as inside of some containers."""
    limits = ("--network", "none", "--memory", "64m", "--pids-limit", "64")
    tried = subprocess.run(
        [program, "run", "--rm", *limits, NAME, "sh", "-c", ":"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip(f"{program} answers, and starts no container: {tried.stderr.strip()[-300:]}")


def tar_of(programs: tuple[str, ...]) -> bytes:
    """A root file system: programs, the libraries that they load, and a second user."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for name, mode in _FOLDERS.items():
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            tar.addfile(folder)
        libraries: set[str] = set()
        for name in programs:
            if path := shutil.which(name, path="/usr/bin:/bin"):
                tar.add(Path(path).resolve(), arcname=f"bin/{name}")
                libraries |= set(_libraries_of(path))
        for library in sorted(libraries):
            tar.add(Path(library).resolve(), arcname=library.lstrip("/"))
        for name, text in _FILES.items():
            file = tarfile.TarInfo(name)
            file.size = len(text)
            tar.addfile(file, io.BytesIO(text.encode()))
    return written.getvalue()


def _libraries_of(program: str) -> Iterator[str]:
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    return (found[1] for found in re.finditer(r"(/\S+) \(", told.stdout))
