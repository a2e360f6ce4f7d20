"""Heavy work in worker processes, so that the event loop stays free and a clock can end it.

`Workers.run` calls a function in a process of its own and gives what it returned. A call that is
cancelled is killed at once, with every process that it started. Workers are started when
they are first needed, at most one for each CPU, serve call after call, and end with the `with`
block. The clock of a call that waits for one stands still.
"""

import inspect
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Self, TypeVar, TypeVarTuple, cast

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from loops_cookbook.clock import room_in
from loops_cookbook.episodes.worker import LENGTH_BYTES, Answer, framed
from loops_cookbook.errors import AttemptFault, EpisodeError
from loops_cookbook.problems import found, one_line, said

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_SCRIPT = Path(__file__).with_name("worker.py")
_REAP_SECONDS = 5.0
"""How long to wait for a killed process; only one stuck in the kernel takes so long."""


class Workers:
    """Worker processes, for the length of a `with` block.

    Args:
        limit: how many may run at once; the number of CPUs by default.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit or os.cpu_count() or 1
        self._slots: anyio.CapacityLimiter | None = None
        self._idle: list[_Worker] = []

    async def __aenter__(self) -> Self:
        self._slots = anyio.CapacityLimiter(self._limit)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._slots = None
        while self._idle:
            await self._idle.pop().kill()

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call `function(*args)` in a worker process.

        Args:
            function: one that stands at the top of a module which can be imported.
            args: what it is given; they, and what it returns, pass through pickle.

        Raises:
            EpisodeError: the function, an argument or the result cannot be passed, or the run
                is over.
            AttemptFault: the worker process died.
            Exception: whatever the function raised.
        """
        if self._slots is None:
            raise EpisodeError("compute() was called while no run is open: call it from an Episode")
        _require_function(function)
        request = _request(function, args)
        async with room_in(self._slots):
            process = await self._pop_idle() or await _Worker.start()
            try:
                reply = await process.ask(request)
            except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
                status = await process.kill()
                raise AttemptFault(
                    f"the worker process of compute({_name(function)}) died with exit status "
                    f"{status}: it crashed or ran out of memory"
                ) from error
            except BaseException:
                await process.kill()
                raise
            self._idle.append(process)
        return cast(T, _result(_name(function), reply))

    async def _pop_idle(self) -> "_Worker | None":
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            await process.kill()
        return None


class _Worker:
    """One worker process and its pipes."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._requests = cast(ByteSendStream, process.stdin)
        self._answers = BufferedByteReceiveStream(cast(ByteReceiveStream, process.stdout))
        self._is_new = True

    @classmethod
    async def start(cls) -> "_Worker":
        # A session of its own: Ctrl-C does not reach it, and one signal reaches all it starts.
        # -P: nothing beside the script may pose as a module of the standard library.
        return cls(
            await anyio.open_process(
                [sys.executable, "-P", str(_SCRIPT)],
                stdin=PIPE,
                stdout=PIPE,
                stderr=None,
                start_new_session=True,
            )
        )

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: bytes) -> bytes:
        if self._is_new:
            self._is_new = False
            await self._requests.send(framed(pickle.dumps(sys.path)))
        await self._requests.send(framed(request))
        length = int.from_bytes(await self._answers.receive_exactly(LENGTH_BYTES), "big")
        return await self._answers.receive_exactly(length)

    async def kill(self) -> int | None:
        """End the process and all it started; its exit status."""
        with anyio.move_on_after(_REAP_SECONDS, shield=True):
            if self.is_alive:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.aclose()
        return self._process.returncode


def _require_function(function: object) -> None:
    if not callable(function):
        raise EpisodeError(
            f"compute() was given {found(function)}: give it a function from the top of a module, "
            "and after it what the function is given"
        )
    if inspect.iscoroutinefunction(function):
        raise EpisodeError(
            f"compute({_name(function)}) was given an async function, and a worker process has no "
            "event loop: give it a plain one"
        )


def _request(function: Callable[..., object], args: tuple[object, ...]) -> bytes:
    try:
        return pickle.dumps((function, args), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle lets through whatever an object's own hooks raise
        raise EpisodeError(
            f"compute({_name(function)}) cannot be passed to a worker process: "
            f"{said(error)}; use a function from the top of a module, and arguments that "
            "can be pickled"
        ) from error


def _result(name: str, reply: bytes) -> object:
    kind, value, text = cast(Answer, pickle.loads(reply))
    match kind:
        case "returned":
            return value
        case "raised":
            error = cast(Exception, value)
            error.add_note(_whereabouts(name, text))
            raise error
        case "failed":
            last = text.strip().splitlines()[-1]
            fault = AttemptFault(f"compute({name}) raised {last}")
            fault.add_note(_whereabouts(name, text))
            raise fault
        case "unknown":
            raise EpisodeError(
                f"a worker process cannot import what compute({name}) was given ({one_line(text)}):"
                " define it at the top of a module beside the config"
            )
        case "unsendable":
            raise EpisodeError(
                f"what compute({name}) returned cannot be passed back ({one_line(text)}): return "
                "numbers, strings, lists, dicts or arrays"
            )


def _whereabouts(name: str, text: str) -> str:
    """A note: the line of the worker process that raised, then the whole of its traceback."""
    frames = _FRAME.findall(text)
    at = "{}:{} in {}".format(*frames[-1]) if frames else "an unknown line"
    return f"in the worker process of compute({name}), at {at}\n{text}"


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
