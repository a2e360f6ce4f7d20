"""The trainer's operations by their idempotency keys: asked once, answered as often as asked.

A key names one operation for as long as the store remembers it: the same key never opens a second
one. An operation ends once, with a result or an error, and keeps that for at least `keep_seconds`.
Two bounds hold memory: older operations are forgotten whole, and when results take more than
`max_bytes` the oldest lose their bodies first, while their keys stay known, so that nothing
is executed twice. Waiting is on events; nothing here polls.
"""

import json
from collections import deque
from dataclasses import dataclass, field

import anyio

KEEP_SECONDS = 3600.0
MAX_BYTES = 512 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Operation:
    """One operation, waiting or ended."""

    id: str
    name: str
    ended: anyio.Event = field(default_factory=anyio.Event)
    ended_at: float = 0.0
    answer: bytes | None = None
    """What a poll is told, once it ended; None again when memory ran out."""

    @property
    def is_error(self) -> bool:
        """Whether it ended with an error."""
        return self.answer is not None and self.answer.startswith(_ERROR)


class Operations:
    """Every operation that a server was asked for lately."""

    def __init__(self, *, keep_seconds: float = KEEP_SECONDS, max_bytes: int = MAX_BYTES) -> None:
        self._keep_seconds = keep_seconds
        self._max_bytes = max_bytes
        self._known: dict[str, Operation] = {}
        self._ended: deque[Operation] = deque()
        """Ended operations that are still known, oldest first."""
        self._held: deque[Operation] = deque()
        """Those of them that still have an answer."""
        self._held_bytes = 0

    def find(self, key: str) -> Operation | None:
        """The operation of a key, if it is remembered."""
        return self._known.get(key)

    def open(self, key: str, name: str) -> Operation:
        """Begin an operation under a key that is not known; its id is the key."""
        assert key not in self._known
        self._forget_old()
        self._known[key] = Operation(key, name)
        return self._known[key]

    def finish(self, operation: Operation, result: bytes) -> None:
        """End an operation with its result, a JSON object."""
        self._end(operation, b'{"status":"done","result":' + result + b"}")

    def fail(self, operation: Operation, message: str, error_class: str) -> None:
        """End an operation with an error."""
        told = json.dumps({"error": message, "error_class": error_class})
        self._end(operation, _ERROR + told[1:].encode())

    async def wait(self, operation: Operation, seconds: float) -> bytes | None:
        """The answer of an operation as soon as it has ended; None if it hasn't in that time."""
        with anyio.move_on_after(seconds):
            await operation.ended.wait()
        return operation.answer

    def _end(self, operation: Operation, answer: bytes) -> None:
        assert not operation.ended.is_set()
        operation.answer = answer
        operation.ended_at = anyio.current_time()
        operation.ended.set()
        self._ended.append(operation)
        self._held.append(operation)
        self._held_bytes += len(answer)
        while self._held_bytes > self._max_bytes and len(self._held) > 1:
            self._drop_answer(self._held.popleft())

    def _forget_old(self) -> None:
        oldest = anyio.current_time() - self._keep_seconds
        while self._ended and self._ended[0].ended_at < oldest:
            operation = self._ended.popleft()
            del self._known[operation.id]
            if self._held and self._held[0] is operation:
                self._drop_answer(self._held.popleft())

    def _drop_answer(self, operation: Operation) -> None:
        assert operation.answer is not None
        self._held_bytes -= len(operation.answer)
        operation.answer = None


_ERROR = b'{"status":"error",'
