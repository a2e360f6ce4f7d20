"""Code of a user that is cut from outside, and that may take no notice.

A cancelled scope cancels in every turn of the event loop what is in it, and code that catches that
and waits again would take the whole of a CPU. So a `Block` is two scopes: the outer one is cut, and
once the code is known to ignore that, the inner one keeps the cut away, but for a moment each
second. The inner one also shields the end of a block, which must release what it holds.

Scopes close in the order in which they were opened. What the code opened and left open, such as a
client with a task group in it, is closed with the block, and stands on it.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import anyio
from anyio.lowlevel import checkpoint

from loops_cookbook.clock import STRAY, is_cancelled
from loops_cookbook.rollouts.faults import StrayCancellation
from loops_cookbook.rollouts.left_open import (
    LeftOpen,
    blamed_on,
    close_within,
    death_within,
    entered_within,
    leaves_in_order,
)

REMINDER_SECONDS = 1.0
"""Between two cancellations of code that ignores them."""


class Block:
    """A `with` block that others can cut; leaving it is quiet about its own cuts."""

    def __init__(self) -> None:
        self.left_open: Sequence[LeftOpen] = ()
        """What the code in it left open, once it is over."""
        self._cut = anyio.CancelScope()
        self._calm = type(self._cut)()  # which spares it another search for the event loop
        self._is_releasing = False
        self._is_over = False
        self._end: anyio.Event | None = None

    @property
    def was_cut(self) -> bool:
        """It was cut before its release, also where it took no notice."""
        return self._cut.cancel_called

    @property
    def release_was_cut(self) -> bool:
        """Its release was cut, also where that took no notice."""
        return self._calm.cancel_called

    def __enter__(self) -> Self:
        self._cut.__enter__()
        self._calm.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        self._is_over = True
        if self._end is not None:
            self._end.set()
        try:
            return self._leave(kind, error, traceback)
        except RuntimeError:  # scopes in it are open
            self.left_open = close_within(self._calm)
            if not self.left_open:
                raise
            if leaves_in_order():
                return self._leave(kind, error, traceback)
            is_cancellation = isinstance(error, anyio.get_cancelled_exc_class())
            was_cut = self.was_cut or self.release_was_cut
            return is_cancellation and was_cut and not is_cancelled()

    def was_entered_within(self, what: object) -> bool | None:
        """Whether it was entered while this was open; None where that cannot be known."""
        return entered_within(self._cut, what)

    def death_in(self, method: str) -> Exception | None:
        """What ended a group that code holds open in it, where this method kept that to itself."""
        cause = death_within(self._calm)
        return None if cause is None else blamed_on(cause, StrayCancellation(STRAY), method)

    def cut(self) -> None:
        """Cancel what is in it, or its release once that has begun."""
        if not self._is_over:
            (self._calm if self._is_releasing else self._cut).cancel()

    def release(self) -> None:
        """What is left of it is its release: of no cut from before, and of none around it."""
        self._is_releasing = self._calm.shield = True

    async def remind(self) -> None:
        """Cancel now and then what ignores a cut, its own or one around it, until it ends.

        Its release is left alone: it has a cut of its own.
        """
        self._end = end = self._end or anyio.Event()
        try:
            while self._may_be_reminded:
                self._calm.shield = True
                with anyio.move_on_after(REMINDER_SECONDS):
                    await end.wait()
                if self._may_be_reminded:
                    self._calm.shield = False
                    await checkpoint()
        finally:
            if not self._is_over:
                self._calm.shield = True

    def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        try:
            is_quiet = self._calm.__exit__(kind, error, traceback)
        except BaseException as rest:  # of a group in which there were cancellations too
            self._cut.__exit__(type(rest), rest, rest.__traceback__)
            raise
        if is_quiet:
            kind = error = traceback = None
        return bool(self._cut.__exit__(kind, error, traceback) or is_quiet)

    @property
    def _may_be_reminded(self) -> bool:
        return not (self._is_over or self._is_releasing)
