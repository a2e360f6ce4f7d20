"""What SIGINT, SIGTERM and SIGHUP do to a command, and how long its end may take after them.

The first signal cancels the work, which releases what it holds. At the next one, or when the time
for that is over, the end is hurried: nothing is waited for any more, and what is known is written.
One more, or a little more time, ends the process. It ends at once where hurrying would be of no
use: the event loop is held by code that never awaits, or all that is left comes after the work.

SIGHUP (a closed terminal or connection) is nobody's haste: one that follows another signal, as the
shell's and the kernel's follow each other, changes nothing.

The rule is `next_step`. A `Stopper` has the handlers and the clock: a thread, which goes on while
the event loop does not. It lives until the process ends, which it bounds, once a signal has come.
"""

import asyncio
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from enum import Enum, auto
from functools import partial
from types import FrameType
from typing import Protocol

import anyio

from loops_cookbook.cli.exits import is_left

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

STOP_SECONDS = 20.0
"""For the whole end after SIGTERM, since schedulers send SIGKILL after 30 s, and after SIGHUP. Of
work that has no clock of its own, after SIGINT too."""
HURRY_SECONDS = 3.0
"""Of that, for an end that waits for nothing any more."""
HELD_SECONDS = 1.0
"""After which a loop that has not taken notice is known to be held."""
LAST_WORDS_SECONDS = 5.0
"""How long the last words may take to be told."""
AGAIN = "press Ctrl-C again to end now"
SAME_SECONDS = 0.1
"""Signals that are this close are one: a terminal sends it to `loops` and to what started it, which
passes it on."""


class Step(Enum):
    """What is done for the end."""

    CANCEL = auto()
    """Cancel the work, which then ends in order."""
    HURRY = auto()
    """Wait for nothing more in it."""
    LEAVE = auto()
    """End the process."""


def next_step(last: Step | None, *, works: bool, heeds: bool) -> Step:
    """What a signal does, and so does the end of the time that the step before was given.

    Args:
        last: the step before; None: this is the first signal.
        works: whether the work still goes on.
        heeds: whether the event loop has taken notice of the step before.
    """
    if not works:
        return Step.LEAVE
    if last is None:
        return Step.CANCEL
    return Step.HURRY if last is Step.CANCEL and heeds else Step.LEAVE


def end_seconds(number: signal.Signals, seconds: float) -> float:
    """How long the whole end may take, after this first signal."""
    return seconds if number == signal.SIGINT else min(seconds, STOP_SECONDS)


def seconds_for(step: Step, end_seconds: float) -> float:
    """How long a step may take, before the next one is taken."""
    match step:
        case Step.CANCEL:
            return max(0.0, end_seconds - HURRY_SECONDS)
        case Step.HURRY:
            return HURRY_SECONDS
        case Step.LEAVE:
            return math.inf


def stopping(number: signal.Signals, seconds: float, waits: str) -> str:
    """That a command ends, what it waits for, and for how long at most, for people."""
    what = "stopping" if number == signal.SIGINT else f"stopping ({number.name})"
    again = f"; {AGAIN}" if number == signal.SIGINT else ""
    return f"{what}{f': {waits}' if waits else ''}, at most {seconds:g} s{again}"


class Ended(Protocol):
    """Who is told of the steps to the end."""

    def cancelled(self, number: signal.Signals, seconds: float) -> None:
        """The work was cancelled, and has so long to end; on the event loop."""
        ...

    def held(self) -> None:
        """The event loop takes no notice of that; in a thread."""
        ...

    def hurry(self) -> None:
        """Nothing is to be waited for any more; on the event loop."""
        ...

    def last_words(self, number: signal.Signals) -> None:
        """The process ends when this returns; in a thread or on the event loop."""
        ...


class Stopper:
    """Ends the work of a command by signals; made by `open_stopper`."""

    def __init__(self, ended: Ended, seconds: float, leave: Callable[[int], None]) -> None:
        self.number: signal.Signals | None = None
        """The first signal that came."""
        self._ended = ended
        self._seconds = seconds
        self._leave = leave
        self._step: Step | None = None
        self._signalled_at = self._held_at = self._until = math.inf
        """When the last signal came; when the loop is known to be held, where it takes no notice;
        when the next step is taken without a signal."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """While it has work."""
        self._heeded = threading.Event()
        """The last step is done, on the loop."""
        self._saying, self._said = threading.Lock(), threading.Event()
        """The last words are said by whoever comes first, once."""
        # This kind alone may be put into by a handler at any moment.
        self._received = queue.SimpleQueue[tuple[signal.Signals | None, threading.Event]]()

    async def until_stopped(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work; the first signal cancels it."""
        self._working = anyio.CancelScope()
        self._loop = asyncio.get_running_loop()
        try:
            with self._working:
                await work()
        finally:
            self._loop = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the thread takes it, to which this one gives way until it has.

        Code that never lets go of the interpreter runs handlers at times, and no other thread.
        """
        taken = threading.Event()
        self._received.put((signal.Signals(number), taken))
        taken.wait(HELD_SECONDS + LAST_WORDS_SECONDS)
        if self._until < math.inf and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            signal.signal(signal.SIGALRM, self._give_way)
            signal.setitimer(signal.ITIMER_REAL, max(0.001, self._until - time.monotonic()))

    def _give_way(self, *_: object) -> None:
        """Let the thread leave in time, for the same reason, where no other signal comes."""
        if not self._heeded.is_set():
            time.sleep(HELD_SECONDS + LAST_WORDS_SECONDS)

    def close(self) -> None:
        """Take no more signals."""
        self._received.put((None, threading.Event()))

    def look(self) -> None:
        """Take signals as they come, and steps as their time comes; the thread."""
        while True:
            at = min(self._held_at, self._until)
            wait = None if at == math.inf else max(0.0, at - time.monotonic())
            try:
                number, taken = self._received.get(timeout=wait)
            except queue.Empty:
                self._look_at_the_clock(time.monotonic())
                continue
            if number is None:
                return
            if self._heeded.is_set():
                taken.set()
            if self._is_another(number):
                self._signalled_at = time.monotonic()
                self.number = self.number or number
                self._take()
            taken.set()

    def _is_another(self, number: signal.Signals) -> bool:
        """Whether it asks for one step more."""
        if number == signal.SIGHUP and self.number is not None:
            return False
        return abs(time.monotonic() - self._signalled_at) > SAME_SECONDS

    def _look_at_the_clock(self, now: float) -> None:
        if now >= self._until:
            self._take()
        elif now >= self._held_at:
            self._held_at = math.inf
            if self._loop is not None and not self._heeded.is_set():
                self._ended.held()

    def _take(self) -> None:
        """Take the next step."""
        assert self.number is not None, "the first step is a signal's"
        now, heeds = time.monotonic(), self._heeded.is_set()
        step = self._step = next_step(self._step, works=self._loop is not None, heeds=heeds)
        seconds = end_seconds(self.number, self._seconds)
        self._held_at = now + HELD_SECONDS if step is Step.CANCEL else math.inf
        self._until = now + seconds_for(step, seconds)
        if step is Step.LEAVE:
            self._end(128 + self.number, by_the_loop=heeds)
            return
        self._heeded.clear()
        self._on_the_loop(partial(self._heed, step, self.number, seconds))

    def _heed(self, step: Step, number: signal.Signals, seconds: float) -> None:
        self._heeded.set()
        if self._loop is None:  # the work has ended meanwhile
            return
        if step is Step.HURRY:
            self._ended.hurry()
        else:
            self._working.cancel()
            self._ended.cancelled(number, seconds)

    def _on_the_loop(self, do: Callable[[], None]) -> None:
        if (loop := self._loop) is not None:
            with suppress(RuntimeError):  # it has been closed meanwhile
                loop.call_soon_threadsafe(do)

    def _end(self, status: int, *, by_the_loop: bool) -> None:
        """Have the last words said, by the loop where it turns, for it may be writing; leave."""
        self._held_at = self._until = math.inf
        if by_the_loop and self._loop is not None:
            self._on_the_loop(self._say_last)
            self._said.wait(HELD_SECONDS)
        threading.Thread(target=self._say_last, daemon=True).start()
        self._said.wait(LAST_WORDS_SECONDS)
        self._leave(status)

    def _say_last(self) -> None:
        assert self.number is not None, "a signal came"
        if self._saying.acquire(blocking=False):
            try:
                self._ended.last_words(self.number)
            finally:
                self._said.set()


@contextmanager
def open_stopper(
    ended: Ended, seconds: float, *, leave: Callable[[int], None] = os._exit
) -> Generator[Stopper]:
    """Take signals within the block, and after it until the process ends, if there was one.

    Args:
        ended: is told of each step.
        seconds: how long the end may take.
        leave: ends the process with a status.
    """
    stopper = Stopper(ended, seconds, leave)
    taken = [number for number in SIGNALS if not is_left(number)]
    before = {number: signal.signal(number, stopper.receive) for number in taken}
    threading.Thread(target=stopper.look, name="stopper", daemon=True).start()
    try:
        yield stopper
    finally:
        if stopper.number is None:
            for number, handler in before.items():
                signal.signal(number, handler)
            stopper.close()
