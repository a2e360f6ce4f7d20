"""One process of this machine, run to its end: its output up to a limit, its time bounded.

The end of a process is learnt from the kernel (a pidfd), not from its pipes, so that a child it
left behind with an open stdout holds nobody up. What cannot be told in time is killed with its
process group, also where the call is cancelled; no process outlives the call but those that the
command itself left in the background.

Where the process is only a messenger of one elsewhere, it may be long in learning that the other
has ended. Then both outputs close with an *ending*, which the other writes: a word that nobody
guesses, the status, and a full stop.
"""

import os
import re
import select
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import anyio

_CHUNK = 65_536
_LEFT_IN_PIPE = 1 << 20
"""The most that a pipe can hold when its writer has ended."""
_STATUS_BYTES = 4
"""Of an ending: the status, and the full stop."""
_LINGER_SECONDS = 0.2
"""How long a messenger that has delivered may take to leave."""
_REAP_SECONDS = 10.0
"""How long to wait for a killed process; only one stuck in the kernel takes so long."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended, and the first bytes of what it wrote."""

    status: int
    """128 + n where signal n ended it."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False
    told_its_end: bool = False
    """The status is that of the ending."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a process may take, and what it is given."""

    seconds: float
    """From its first byte on stdout."""
    output: int
    """Bytes kept of each of stdout and stderr."""
    stdin: bytes = b""
    first_byte_seconds: float = 60.0
    """Until that first byte, or its end."""


@dataclass(frozen=True, slots=True)
class Messenger:
    """What is different about a process that speaks for one elsewhere."""

    ending: bytes
    """The word of the ending."""
    begun: Callable[[bytes], None]
    """Told of the first bytes on stdout. The call cannot be cancelled before, since what is begun
    elsewhere could not be ended."""


async def run_process(
    argv: Sequence[str],
    bounds: Bounds,
    *,
    env: Mapping[str, str] | None = None,
    messenger: Messenger | None = None,
) -> Ended:
    """Run a program of this machine until it ends or its time is up.

    The program says by its first byte that it has come to its work: a busy machine may take long
    to bring it there, and that is not the work's time.

    Raises:
        OSError: it cannot be started.
    """
    ending = messenger.ending if messenger else b""
    with ExitStack() as opened:
        stdout, stderr = (opened.enter_context(_Output(bounds.output, ending)) for _ in range(2))
        given = opened.enter_context(tempfile.TemporaryFile())
        given.write(bounds.stdin)
        given.seek(0)
        process = subprocess_of(
            argv, stdin=given.fileno(), stdout=stdout.writer, stderr=stderr.writer, env=env
        )
        try:
            shielded = messenger is not None
            with anyio.move_on_after(bounds.first_byte_seconds, shield=shielded) as clock:

                def begins(first: bytes) -> None:
                    clock.deadline = anyio.current_time() + bounds.seconds
                    if messenger:
                        messenger.begun(first)
                        clock.shield = False

                stdout.on_first = begins
                await _collected(process, stdout, stderr)
        finally:
            await _end(process)
        for output in (stdout, stderr):
            output.drain()
        return Ended(
            status=_status(process) if stdout.status is None else stdout.status,
            stdout=bytes(stdout.kept),
            stderr=bytes(stderr.kept),
            timed_out=clock.cancelled_caught,
            truncated=stdout.is_truncated or stderr.is_truncated,
            told_its_end=stdout.status is not None,
        )


async def _collected(
    process: subprocess.Popen[bytes], stdout: "_Output", stderr: "_Output"
) -> None:
    """Read until a process has ended, or both outputs have had their ending."""
    async with anyio.create_task_group() as readers:

        async def said_its_end() -> None:
            await stdout.ended.wait()
            await stderr.ended.wait()
            with anyio.move_on_after(_LINGER_SECONDS):
                await exited(process)  # by itself, if it can
            readers.cancel_scope.cancel()

        readers.start_soon(said_its_end)
        for output in (stdout, stderr):
            output.close_writer()
            readers.start_soon(output.collect)
        await exited(process)
        readers.cancel_scope.cancel()


def subprocess_of(
    argv: Sequence[str],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a program in a session and process group of its own, out of reach of a Ctrl-C.

    It must be started by the event loop's thread: some die with the thread that started them.
    """
    return subprocess.Popen(
        argv,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        cwd="/",
        pass_fds=pass_fds,
        start_new_session=True,
    )


async def exited(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process has ended, and reap it."""
    if process.poll() is None:
        watched = os.pidfd_open(process.pid)
        try:
            await anyio.wait_readable(watched)
        finally:
            os.close(watched)
        process.wait()


def has_ended(pidfd: int) -> bool:
    """Whether the process behind a pidfd has ended."""
    poll = select.poll()  # `select` knows no numbers above 1023, and there may be that many
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with its group, unless it has ended by itself."""
    if process.poll() is not None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with anyio.move_on_after(_REAP_SECONDS, shield=True):
        await exited(process)


def _status(process: subprocess.Popen[bytes]) -> int:
    code = process.poll()
    return 128 + signal.SIGKILL if code is None else 128 - code if code < 0 else code


class _Output:
    """The reading end of a pipe: the first bytes are kept, the others are read and dropped."""

    def __init__(self, limit: int, ending: bytes = b"") -> None:
        self.kept = bytearray()
        self.is_truncated = False
        self.on_first: Callable[[bytes], None] | None = None
        """Told of the first bytes."""
        self.ended = anyio.Event()
        """Its ending was read; what comes after it is of no interest."""
        self.status: int | None = None
        """What the ending says."""
        self._limit = limit
        self._ending = ending
        self._unsure = b""
        """The last bytes, which may be the beginning of the ending."""
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)

    def __enter__(self) -> "_Output":
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._reader)
        self.close_writer()

    def close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    async def collect(self) -> None:
        """Read until every writer has closed."""
        while True:
            await anyio.wait_readable(self._reader)
            if not self._take():
                return

    def drain(self) -> None:
        """Read what the ended command left in the pipe, and no more."""
        left = _LEFT_IN_PIPE
        with suppress(BlockingIOError):
            while left > 0 and (count := self._take()):
                left -= count
        self._keep(self._unsure)
        self._unsure = b""

    def _take(self) -> int:
        chunk = os.read(self._reader, _CHUNK)
        if chunk and self.on_first is not None:
            self.on_first(chunk)
            self.on_first = None
        if not self.ended.is_set():
            self._read(self._unsure + chunk)
        return len(chunk)

    def _read(self, content: bytes) -> None:
        if not self._ending:
            self._keep(content)
        elif found := re.search(re.escape(self._ending) + rb"(\d{1,3})\.", content):
            self._keep(content[: found.start()])
            self._unsure = b""
            self.status = int(found[1])
            self.ended.set()
        else:
            sure = max(0, len(content) - len(self._ending) - _STATUS_BYTES)
            self._keep(content[:sure])
            self._unsure = content[sure:]

    def _keep(self, content: bytes) -> None:
        room = self._limit - len(self.kept)
        self.kept += content[:room]
        self.is_truncated |= len(content) > room
