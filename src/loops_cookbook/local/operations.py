"""The trainer's operations by their idempotency keys: asked once, answered as often as asked.

A key names one operation for as long as the store remembers it: the same key never opens a second
one, so nothing is executed twice. An operation ends once, with a result or an error, and its key
stays known for at least `keep_seconds`. Its answer is kept for as long within two bounds of all
answers together: beyond `told_bytes` the oldest go that somebody was told already, who may have
lost them but seldom asks again; beyond `max_bytes` the oldest of all. Waiting is on events; nothing
here polls.
"""

import json
from collections import deque
from dataclasses import dataclass, field

import anyio

KEEP_SECONDS = 3600.0
TOLD_BYTES = 32 * 1024 * 1024
MAX_BYTES = 256 * 1024 * 1024
"""Answers of a batch that was sent in parts wait for its last part."""


@dataclass(slots=True, eq=False)
class Operation:
    """One operation, waiting or ended."""

    id: str
    name: str
    ended: anyio.Event = field(default_factory=anyio.Event)
    ended_at: float = 0.0
    answer: bytes | None = None
    """What a poll is told, once it ended; None again when it had to make room."""
    is_told: bool = False
    """Whether somebody was told the answer."""

    @property
    def is_error(self) -> bool:
        """Whether it ended with an error."""
        return self.answer is not None and self.answer.startswith(_ERROR)


class Operations:
    """Every operation that a server was asked for lately."""

    def __init__(
        self,
        *,
        keep_seconds: float = KEEP_SECONDS,
        told_bytes: int = TOLD_BYTES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._keep_seconds = keep_seconds
        self._told_bytes = told_bytes
        self._max_bytes = max_bytes
        self._known: dict[str, Operation] = {}
        self._ended: deque[Operation] = deque()
        """Ended operations that are still known, oldest first."""
        self._held: dict[Operation, None] = {}
        """Those of them that still have an answer, oldest first."""
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
        operation.is_told = operation.is_told or operation.answer is not None
        return operation.answer

    def _end(self, operation: Operation, answer: bytes) -> None:
        assert not operation.ended.is_set()
        operation.answer = answer
        operation.ended_at = anyio.current_time()
        operation.ended.set()
        self._ended.append(operation)
        self._held[operation] = None
        self._held_bytes += len(answer)
        self._make_room(operation)

    def _forget_old(self) -> None:
        oldest = anyio.current_time() - self._keep_seconds
        while self._ended and self._ended[0].ended_at < oldest:
            operation = self._ended.popleft()
            del self._known[operation.id]
            self._drop_answer(operation)

    def _make_room(self, newest: Operation) -> None:
        """Drop answers until the bounds hold, though never the newest."""
        if self._held_bytes <= self._told_bytes:
            return
        others = [operation for operation in self._held if operation is not newest]
        for operation in sorted(others, key=lambda operation: not operation.is_told):
            bound = self._told_bytes if operation.is_told else self._max_bytes
            if self._held_bytes > bound:
                self._drop_answer(operation)

    def _drop_answer(self, operation: Operation) -> None:
        if operation in self._held:
            del self._held[operation]
            self._held_bytes -= len(operation.answer or b"")
            operation.answer = None


_ERROR = b'{"status":"error",'
