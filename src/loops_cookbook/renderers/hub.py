"""The small files of a model on the Hugging Face hub: cached, else fetched in bounded time.

What is cached is used as it is and the hub is not asked. A fetch runs in a child process that dies
at its clock, because a name that does not resolve and the hub client's own retries would hold this
one for most of a minute. The clock is the hub's alone: on a busy machine it may take longer than
that to bring the child to its first question. Offline (`HF_HUB_OFFLINE`) nothing is tried. Weights
are never fetched here.
"""

import functools
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REACH_SECONDS = 6.0
"""For the hub's first answer."""
FETCH_SECONDS = 120.0
"""For the files of a hub that answers."""
START_SECONDS = 60.0
"""For a child to import the hub's client: a second or two where the CPUs are free."""
BEGIN_CLOCK = "import signal; signal.setitimer(signal.ITIMER_REAL, {seconds})"
"""A line for a child, after its imports: it dies then, also in a call that heeds no Python."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_WITHOUT = ("*/*", "*.index.json")
_REACH = "HfApi().model_info(name)"
_FETCH = f"snapshot_download(name, allow_patterns={_FILES!r}, ignore_patterns={_WITHOUT!r})"
_CHILD = """
import sys
from huggingface_hub import HfApi, snapshot_download
name = sys.argv[1]
{begin_clock}
try:
    {call}
except Exception as error:
    said = " ".join(str(error).split()).split(". ")[0]
    sys.exit(f"{{type(error).__name__}}: {{said[:200]}}")
"""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A model whose files are neither cached nor to be had now."""

    name: str
    why: str
    """Part of a sentence: `no answer from the hub within 6 s`."""


def is_offline() -> bool:
    """Whether the hub client is told to ask nothing, in the words that it knows for it."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def cached(name: str) -> Path | None:
    """The folder in the local cache that holds a model's tokenizer, None where there is none."""
    if not _NAME.fullmatch(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    for file in ("tokenizer.json", "tokenizer_config.json"):
        path = try_to_load_from_cache(name, file)
        if isinstance(path, str):
            return Path(path).parent
    return None


@functools.cache
def snapshot(name: str, *, reach_seconds: float = REACH_SECONDS) -> Path | Unreachable:
    """The folder with a model's tokenizer and configs, asked of the hub once a process."""
    if not _NAME.fullmatch(name):
        return Unreachable(name, "it is neither a folder nor a name on the hub")
    folder = cached(name)
    if folder is not None:
        return folder
    if is_offline():
        return Unreachable(name, "HF_HUB_OFFLINE is set")
    problem = _child(_REACH, name, reach_seconds) or _child(_FETCH, name, FETCH_SECONDS)
    return cached(name) or Unreachable(name, problem or "the hub has no tokenizer for it")


def ran_out(returncode: int) -> bool:
    """Whether a child died at the clock that it had begun."""
    return returncode == -signal.SIGALRM


def _child(call: str, name: str, seconds: float) -> str | None:
    """Run one call of the hub client; None where it went well, else why not."""
    code = _CHILD.format(call=call, begin_clock=BEGIN_CLOCK.format(seconds=seconds))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, name],
            env=os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=START_SECONDS + seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the hub client did not start within {START_SECONDS:g} s"
    if ran_out(done.returncode):
        return f"no answer from the hub within {seconds:g} s"
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else "the hub client failed")
