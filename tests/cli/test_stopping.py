"""The first signal ends work in order, the next one at once, whatever the event loop does."""

import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint

from loops_cookbook.cli.stopping import (
    HELD_SECONDS,
    HURRY_SECONDS,
    LAST_WORDS_SECONDS,
    SAME_SECONDS,
    SIGNALS,
    STOP_SECONDS,
    Step,
    end_seconds,
    next_step,
    open_stopper,
    seconds_for,
)


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """The handlers of this process, which goes on."""
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("last", "works", "heeds", "step"),
    [
        (None, True, False, Step.CANCEL),
        (Step.CANCEL, True, True, Step.HURRY),
        (Step.CANCEL, True, False, Step.LEAVE),
        (Step.HURRY, True, True, Step.LEAVE),
        (None, False, False, Step.LEAVE),
        (Step.CANCEL, False, True, Step.LEAVE),
        (Step.LEAVE, True, True, Step.LEAVE),
    ],
)
def test_each_signal_is_a_step_further(
    last: Step | None, works: bool, heeds: bool, step: Step
) -> None:
    """A second Ctrl-C changed nothing, and a loop that was held took no notice of any."""
    assert next_step(last, works=works, heeds=heeds) is step


@pytest.mark.parametrize("stop_seconds", [1.0, 15.0, 310.0])
def test_a_scheduler_that_kills_after_30_s_finds_nobody_left(stop_seconds: float) -> None:
    """After SIGTERM an end took the release clock and more, and records were cut by the kill."""
    seconds = end_seconds(signal.SIGTERM, stop_seconds)
    assert end_seconds(signal.SIGHUP, stop_seconds) == seconds
    assert seconds <= STOP_SECONDS
    assert seconds + HELD_SECONDS + LAST_WORDS_SECONDS < 30
    assert end_seconds(signal.SIGINT, stop_seconds) == stop_seconds


@pytest.mark.parametrize("seconds", [HURRY_SECONDS, 12.0, 40.0])
def test_the_steps_together_take_no_longer_than_the_end_may(seconds: float) -> None:
    assert sum(seconds_for(step, seconds) for step in (Step.CANCEL, Step.HURRY)) == seconds


class Told:
    """Keeps what it is told; in the place of the process's end it lets the work end."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_over = threading.Event()

    def cancelled(self, number: signal.Signals, seconds: float) -> None:
        self.calls.append(f"cancelled by {number.name}")

    def held(self) -> None:
        self.calls.append("held")

    def hurry(self) -> None:
        self.calls.append("hurry")

    def last_words(self, number: signal.Signals) -> None:
        self.calls.append("last words")

    def leave(self, status: int) -> None:
        self.calls.append(f"left with {status}")
        self.is_over.set()


def press(number: signal.Signals = signal.SIGINT) -> None:
    time.sleep(1.1 * SAME_SECONDS)
    os.kill(os.getpid(), number)


def stopped(told: Told, work: Callable[[], Awaitable[None]], *, seconds: float = 60) -> None:
    """Do work under a stopper, which is closed in the end."""
    with open_stopper(told, seconds, leave=told.leave) as stopper:
        anyio.run(partial(stopper.until_stopped, work))
    stopper.close()


async def release_for_ever(told: Told, *, presses: int) -> None:
    try:
        press()
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            for _ in range(presses - 1):
                await anyio.sleep(0.01)  # the loop takes notice
                press()
            await anyio.to_thread.run_sync(told.is_over.wait)


def test_the_third_ends_the_process_where_hurrying_was_of_no_use() -> None:
    told = Told()
    stopped(told, lambda: release_for_ever(told, presses=3))
    assert told.calls == ["cancelled by SIGINT", "hurry", "last words", "left with 130"]


def test_an_end_that_takes_too_long_is_hurried_without_another_signal() -> None:
    told = Told()
    told.hurry = told.is_over.set  # type: ignore[method-assign]
    stopped(told, lambda: release_for_ever(told, presses=1), seconds=HURRY_SECONDS + 0.2)
    assert told.calls == ["cancelled by SIGINT"]


def test_two_signals_at_once_are_one() -> None:
    """A program that passes Ctrl-C on, which the terminal sent to both, made of it two."""
    told = Told()

    async def work() -> None:
        press()
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep_forever()

    stopped(told, work)
    assert told.calls == ["cancelled by SIGINT"]


def test_a_hangup_after_another_signal_changes_nothing() -> None:
    """Shell and kernel each send one when a terminal is closed, and that is nobody's haste."""
    told = Told()

    async def work() -> None:
        press(signal.SIGHUP)
        try:
            await anyio.sleep_forever()
        finally:
            press(signal.SIGHUP)

    stopped(told, work)
    assert told.calls == ["cancelled by SIGHUP"]


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """`nohup` starts a program so."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    told = Told()

    async def work() -> None:
        press(signal.SIGHUP)
        await checkpoint()

    stopped(told, work)
    assert told.calls == []
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_loop_that_is_held_is_left_at_the_second_signal(number: signal.Signals) -> None:
    """`time.sleep` in a coroutine held a run against every signal but SIGKILL."""
    told = Told()

    async def hold() -> None:
        press(number)
        press(number)
        told.is_over.wait()  # which holds the loop

    stopped(told, hold)
    assert told.calls[:2] == ["last words", f"left with {128 + number}"]


def test_after_the_work_a_signal_ends_the_process() -> None:
    told = Told()

    with open_stopper(told, 60, leave=told.leave) as stopper:
        anyio.run(partial(stopper.until_stopped, checkpoint))
        press()
        assert told.is_over.wait(10)
    stopper.close()
    assert told.calls == ["last words", "left with 130"]


def test_work_that_no_signal_ended_leaves_the_handlers_that_were_there() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    told = Told()
    stopped(told, checkpoint)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert told.calls == []
