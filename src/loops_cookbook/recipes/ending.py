"""How a run's end is told: in its records, and to whoever must end the process after it.

A run that is interrupted releases what it holds, within a bound. Where it is cut short before that
is over, its records are told the same: what was not settled then stays in flight.
"""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from loops_cookbook.errors import LoopsError, NoLearningSignal, RunStopped
from loops_cookbook.problems import said
from loops_cookbook.records import Recorder, RunStatus
from loops_cookbook.rollouts.keeper import Keeper, stuck

EndProcess: TypeAlias = Callable[[RunStatus, Sequence[str]], None]
"""Ends the process at once, with how the run ended and why it must."""


def ending(error: BaseException, number: signal.Signals | None = None) -> tuple[RunStatus, str]:
    """The status and the reason.

    Args:
        error: what ended it.
        number: the signal that came, where that is known.
    """
    if isinstance(error, NoLearningSignal):
        return "stopped", str(error)
    if isinstance(error, LoopsError):
        return "failed", str(error)
    if isinstance(error, Exception):
        return "failed", f"a bug of loops-cookbook: {type(error).__name__}: {said(error)}"
    if number is not None:
        return "interrupted", f"stopped by {number.name}"
    if isinstance(error, asyncio.CancelledError):  # as a signal does too, which is known then
        return "interrupted", "its tasks were cancelled, and by no signal"
    return "interrupted", "stopped by a signal"


class Ending:
    """The end of a run, told once it is known, and cut short where that is asked for.

    Args:
        recorder: is told.
        end_process: ends the process where the run cannot end; None: whatever holds the run is
            waited for.
    """

    def __init__(self, recorder: Recorder, end_process: EndProcess | None = None) -> None:
        self.counts: Callable[[], Mapping[str, int]] = dict
        """The run's counts as they are now, also where nothing is settled any more."""
        self.keeper: Keeper | None = None
        """Of the run's jobs."""
        self.number: signal.Signals | None = None
        """The signal that interrupts the run, once one has come."""
        self._recorder = recorder
        self._end_process = end_process
        self._told: tuple[RunStatus, str | None] = ("running", None)

    @property
    def on_stuck(self) -> Callable[[Sequence[str]], None] | None:
        """For the keeper: ends the process, where there is someone who can."""
        end_process = self._end_process
        if end_process is None:
            return None

        def on_stuck(jobs: Sequence[str]) -> None:
            status, reason = self._told
            # Of a signal the command tells.
            why = [reason] if reason and status != "interrupted" else []
            end_process(status, [*why, _without(jobs)])

        return on_stuck

    @property
    def is_interrupted(self) -> bool:
        """Whether it is told to be over before its work was, though nothing failed."""
        return self._told[0] == "interrupted"

    def tell(self, status: RunStatus, reason: str | None = None) -> None:
        """The run is over."""
        self._told = (status, reason)
        self._recorder.run_ended(status, self.counts(), reason)

    def tell_error(self, error: BaseException) -> None:
        """The run is over by an exception, as which a signal comes too.

        That it cannot be written in `run.json` does not take its place.
        """
        try:
            self.tell(*ending(error, self.number))
        except RunStopped as unwritten:
            self._recorder.note("warning", str(unwritten))

    def tell_blocked(self, why: str) -> None:
        """For the watchdog: the event loop is held, so the process ends where someone can."""
        self.tell("failed", why)
        if self._end_process is not None:
            self._end_process("failed", [why])

    def hurry(self) -> None:
        """Wait no longer for the run's jobs; on the event loop."""
        if self.keeper is not None:
            self.keeper.hurry()

    def cut_short(self) -> Sequence[str]:
        """The process ends here: tell of the interruption what is not told yet.

        Returns:
            What it ends without.
        """
        if self._told[0] == "running":
            self.tell_error(KeyboardInterrupt())
        keeper = self.keeper
        jobs = [] if keeper is None else [job for job in keeper.jobs if job.phase != "waiting"]
        return [_without(stuck(jobs))] if jobs else []


def _without(jobs: Sequence[str]) -> str:
    return f"ended without waiting for {'; '.join(jobs)}"
