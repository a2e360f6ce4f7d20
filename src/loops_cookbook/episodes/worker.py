"""The far end of `compute`: calls functions, one after another, for the process that started it.

It runs as a script, by its path, and imports nothing of this package, so that it starts in
milliseconds. On its first two descriptors pass frames: eight bytes of length, then a pickle. The
first frame in is the other process's `sys.path`; each later one is a function and its
arguments, and is answered by one frame out (`Answer`). When the other process is gone, so is this
one, with every process that a function started.
"""

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import BinaryIO, Literal, TypeAlias, cast

LENGTH_BYTES = 8

Answer: TypeAlias = tuple[
    Literal["returned", "raised", "failed", "unknown", "unsendable"], object, str
]
"""What came of a call, with its value and a text for people: `returned` a value, `raised` an
exception; `failed`: it raised one that cannot be pickled; `unknown`: the function cannot be
imported here; `unsendable`: what it returned cannot be pickled."""


def framed(payload: bytes) -> bytes:
    """A payload as it goes through a pipe."""
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def answer(request: bytes) -> bytes:
    """Call the function that a request names; the pickled `Answer`."""
    try:
        function, arguments = cast(
            tuple[Callable[..., object], tuple[object, ...]], pickle.loads(request)
        )
    except Exception as error:
        return _pickled(("unknown", None, f"{type(error).__name__}: {error}"))
    try:
        value = function(*arguments)
    except BaseException as error:  # SystemExit too: it ends the function, not the worker
        return _raised(error)
    try:
        return _pickled(("returned", value, ""))
    except Exception as error:
        return _pickled(("unsendable", None, f"{type(error).__name__}: {error}"))


def main() -> None:
    """Serve until the pipe in closes."""
    requests, answers = _own_pipes()
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # Functions run in the main thread, where signals work; so reading goes on beside them.
    threading.Thread(target=_read, args=(requests, inbox), daemon=True).start()
    sys.path[:] = cast(list[str], pickle.loads(inbox.get()))
    while True:
        answers.write(framed(answer(inbox.get())))
        answers.flush()


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes, moved where neither a function's prints nor the programs it runs reach them."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _read(requests: BinaryIO, inbox: "queue.SimpleQueue[bytes]") -> None:
    while True:
        length = requests.read(LENGTH_BYTES)
        payload = requests.read(int.from_bytes(length, "big"))
        if len(length) < LENGTH_BYTES:
            _end()
        inbox.put(payload)


def _end() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _raised(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    if isinstance(error, Exception):
        try:
            raised = _pickled(("raised", error, text))
            pickle.loads(raised)  # some exceptions can be pickled and not read back
        except Exception:
            return _pickled(("failed", None, text))
        return raised
    return _pickled(("failed", None, text))


def _pickled(answer: Answer) -> bytes:
    return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main()
