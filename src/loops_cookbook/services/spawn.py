"""The embedded engine as a child process: started, watched, and ended with the `with` block.

The child is a session of its own, so Ctrl-C in the terminal does not reach it, and it ends by
itself when this process is gone, however that ended. Its API key is random and handed over in
the environment; its stderr goes to a log file. When it ends too soon, every call that waits for
it and every later one ends at once with `EngineDied`, which says how it ended and its last words.
"""

import json
import logging
import os
import secrets
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import BinaryIO, cast
from urllib.parse import quote

import anyio
import anyio.abc
from anyio.streams.buffered import BufferedByteReceiveStream

from loops_cookbook.errors import EngineDied, MissingExtra, ModelError, UsageError
from loops_cookbook.services.base import Sampler, Trainer
from loops_cookbook.services.command import API_KEY_VARIABLE, STAGES, EngineOptions
from loops_cookbook.services.direct import HttpSampler
from loops_cookbook.services.extras import LOCAL, is_installed
from loops_cookbook.services.gather import GatheringSampler, loop_settled
from loops_cookbook.services.heartbeat import Pulse, beating, beside
from loops_cookbook.services.http import HttpCheckpointer
from loops_cookbook.services.transport import open_transport

logger = logging.getLogger(__name__)

START_SECONDS = 600.0
"""For loading a model."""
FIRST_TOLD_SECONDS = 10.0
"""Of a start, after which it is told how far that is; then whenever as long again has gone by."""
SILENT_SECONDS = 60.0
"""Of an engine that hangs; a machine that is overloaded answers late."""
END_SECONDS = 5.0
"""Between asking the child to end and killing it."""
LOG_END = 65536
"""Bytes of its log that are looked through for what it said last."""
LAST_WORDS = 3
"""Lines of its log that tell how it ended."""


@dataclass(frozen=True, slots=True)
class LocalService:
    """The embedded engine as a `Service`."""

    trainer: Trainer
    sampler: Sampler
    description: Mapping[str, str | int]
    temperature_in_loss: bool = True


@asynccontextmanager
async def local_engine(
    options: EngineOptions,
    *,
    run_id: str,
    log_path: Path,
    settle: Callable[[], Awaitable[None]] = loop_settled,
    silent_seconds: float = SILENT_SECONDS,
) -> AsyncGenerator[LocalService]:
    """Start the embedded engine, with fresh weights to train; end it with the block.

    Args:
        options: the model and how to hold it.
        run_id: names the run on the wire.
        log_path: where the engine's stderr goes, appended.
        settle: when equal samples leave as one request; see `GatheringSampler`. A deterministic
            engine gets each by itself.
        silent_seconds: after which an engine that answers nothing is taken to hang.

    Raises:
        MissingExtra: what it needs is not installed; nothing was started.
        ModelError: it refused the model.
        EngineDied: it ended, hung, or did not serve in time.
    """
    if not is_installed(LOCAL):
        raise MissingExtra("the embedded engine (scope local)", "local")
    key = secrets.token_urlsafe(32)
    began = anyio.current_time()
    logger.info("starting the embedded engine on %s (log: %s)", options.model_name, log_path)
    async with (
        child_server(options.command(), api_key=key, log_path=log_path) as child,
        open_transport(child.url, api_key=key, guard=child.guard) as transport,
        _gathering(options, HttpSampler(transport, run_id=run_id), settle) as sampler,
    ):
        health = f"/health?base_model={quote(options.model_name, safe='')}"
        await transport.call("submit", "GET", health)
        trainer = HttpCheckpointer(transport, model=options.model_name, run_id=run_id)
        await trainer.init_trainer(options.lora_rank)
        seconds = anyio.current_time() - began
        logger.info("the embedded engine serves, %.1f s after its start", seconds)
        described = {"url": child.url, "run_id": run_id, "log": str(log_path), **child.engine}
        pulse = Pulse(health, every_seconds=silent_seconds / 6)
        async with beating(transport, pulse, partial(_kill_if_silent, child, silent_seconds)):
            yield LocalService(trainer, sampler, described)


def _kill_if_silent(child: "Child", limit: float, seconds: float) -> None:
    """Its event loop answers while the engine computes; one that does not will not come back."""
    if seconds >= limit:
        child.kill(f"the embedded engine hung: it has not answered for {seconds:.0f} s")


@asynccontextmanager
async def _gathering(
    options: EngineOptions, sampler: Sampler, settle: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Sampler]:
    """The sampler that a run is handed."""
    if options.deterministic:
        yield sampler
        return
    async with GatheringSampler(sampler, settle=settle) as gathering:
        yield gathering


@asynccontextmanager
async def child_server(
    command: Sequence[str],
    *,
    api_key: str,
    log_path: Path,
    start_seconds: float = START_SECONDS,
    end_seconds: float = END_SECONDS,
) -> AsyncGenerator["Child"]:
    """Run a command that serves and says so in one JSON line on stdout, `{"url": ...}`.

    Args:
        command: what to run; it finds the API key in the environment.
        api_key: not in the command line, which others can read.
        log_path: gets its stderr, appended.
        start_seconds: until it must serve.
        end_seconds: that it is given to end by itself, before it is killed.

    Raises:
        ModelError: it ended with status 2 before it served: it refused what it was asked.
        EngineDied: it ended otherwise, or did not serve within `start_seconds`.
    """
    with _log(log_path) as log:
        log_start = log.tell()
        process = await anyio.open_process(
            command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=log,
            env={**_environment(), API_KEY_VARIABLE: api_key},
            start_new_session=True,
        )
    child = Child(process, log_path, log_start)
    async with beside(child.watch):
        try:
            await child.wait_ready(start_seconds)
            yield child
        finally:
            await child.end(end_seconds)


class Child:
    """A server in a process of its own; made by `child_server`."""

    def __init__(self, process: anyio.abc.Process, log_path: Path, log_start: int) -> None:
        self._process = process
        self._log_path = log_path
        self._log_start = log_start
        self._death: str | None = None
        self._killed: str | None = None
        """Why it was ended, where that was not at its end."""
        self._waiting: set[anyio.CancelScope] = set()
        self.url = ""
        self.engine: Mapping[str, str | int] = {}
        """What the engine says of itself."""

    @contextmanager
    def guard(self) -> Generator[None]:
        """Around a call: it ends with `EngineDied` as soon as the process does."""
        if self._death is not None:
            raise EngineDied(self._death)
        scope = anyio.CancelScope()
        self._waiting.add(scope)
        try:
            with scope:
                yield
        finally:
            self._waiting.discard(scope)
        if self._death is not None and scope.cancelled_caught:
            raise EngineDied(self._death)

    def kill(self, why: str) -> None:
        """End the process at once; its death is then told in these words."""
        self._killed = f"{why}{self._hint()}"
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def watch(self) -> None:
        """Wait for the process to end, and end the calls that wait for it."""
        await self._process.wait()
        self._death = self._killed or self._told()
        for scope in self._waiting:
            scope.cancel()

    async def wait_ready(self, seconds: float) -> None:
        """Read the line that says where it serves."""
        assert self._process.stdout is not None
        line = b""
        with anyio.move_on_after(seconds) as starting:
            try:
                line = await self._first_line(BufferedByteReceiveStream(self._process.stdout))
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.DelimiterNotFound):
                await self._process.wait()
        if starting.cancelled_caught:
            raise EngineDied(
                f"the embedded engine did not serve within {seconds:.0f} s{self._hint()}"
            )
        if not line and self._process.returncode == UsageError.exit_status:
            raise ModelError(self._last_words(1) or self._told())
        if not line:
            raise EngineDied(self._told())
        try:
            ready = cast(dict[str, object], json.loads(line))
            self.url = str(ready["url"])
        except (ValueError, TypeError, KeyError) as error:
            raise EngineDied(
                f"the embedded engine began with {line!r}, not with its ready line"
            ) from error
        engine = cast(dict[str, object], ready.get("engine", {}))
        self.engine = {k: v if isinstance(v, str | int) else str(v) for k, v in engine.items()}

    async def _first_line(self, stream: BufferedByteReceiveStream) -> bytes:
        """What it says once it serves; until then it is told what it is doing."""
        waited = wait = FIRST_TOLD_SECONDS
        while True:
            with anyio.move_on_after(wait):
                return await stream.receive_until(b"\n", 65536)
            doing = self._last_said(lambda line: f" {STAGES}: " in line).partition(": ")[2]
            logger.info("the embedded engine starts, %.0f s so far: %s", waited, doing or "silent")
            waited, wait = waited * 2, waited

    async def end(self, seconds: float = END_SECONDS) -> None:
        """Ask the process to end, by the end of its stdin and a signal, then make it; bounded, and
        never cancelled."""
        assert self._process.stdin is not None
        with anyio.CancelScope(shield=True):
            await self._process.stdin.aclose()
            for way in (signal.SIGTERM, signal.SIGKILL):
                if self._process.returncode is None:
                    with suppress(ProcessLookupError):
                        os.killpg(self._process.pid, way)
                with anyio.move_on_after(seconds):
                    await self._process.wait()
            with anyio.move_on_after(seconds):
                await self._process.aclose()

    def _told(self) -> str:
        status = self._process.returncode
        assert status is not None
        how = f"exit status {status}"
        if status < 0:
            how = signal.Signals(-status).name
        memory = ", often the sign of too little memory" if -status == signal.SIGKILL else ""
        return f"the embedded engine ended with {how}{memory}{self._hint()}"

    def _hint(self) -> str:
        words = self._last_words()
        last = f"; its last words: {words}" if words else ""
        return f"{last} (see {self._log_path})"

    def _last_words(self, count: int = LAST_WORDS) -> str:
        # What it says in passing is no reason to end.
        return self._last_said(lambda line: " INFO " not in line, count)

    def _last_said(self, counts: Callable[[str], bool], count: int = 1) -> str:
        """The last lines of its log that count."""
        with suppress(OSError), self._log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - LOG_END))
            lines = log.read().decode(errors="replace").splitlines()
            said = [line.strip() for line in lines if line.strip() and counts(line)]
            return " / ".join(said[-count:])
        return ""


def _environment() -> dict[str, str]:
    """This process's, without the keys of services that are no business of the child."""
    return {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}


def _log(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")
