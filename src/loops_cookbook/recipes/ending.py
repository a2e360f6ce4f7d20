"""How a run's end is told: in its records, and to whoever must end the process after it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from loops_cookbook.errors import LoopsError, NoLearningSignal
from loops_cookbook.problems import said
from loops_cookbook.records import Recorder, RunStatus

EndProcess: TypeAlias = Callable[[RunStatus, Sequence[str]], None]
"""Ends the process at once, with how the run ended and why it must."""


def ending(error: BaseException) -> tuple[RunStatus, str]:
    """The status and the reason."""
    if isinstance(error, NoLearningSignal):
        return "stopped", str(error)
    if isinstance(error, LoopsError):
        return "failed", str(error)
    if isinstance(error, Exception):
        return "failed", f"a bug of loops-cookbook: {type(error).__name__}: {said(error)}"
    return "interrupted", "stopped by a signal"


class Ending:
    """The end of a run, told once it is known.

    Args:
        recorder: is told.
        end_process: see `Surroundings`; None: whatever holds the run is waited for.
    """

    def __init__(self, recorder: Recorder, end_process: EndProcess | None) -> None:
        self._recorder = recorder
        self._end_process = end_process
        self._told: tuple[RunStatus, str | None] = ("running", None)

    @property
    def on_stuck(self) -> Callable[[Sequence[str]], None] | None:
        """For the keeper: ends the process, where there is someone who can."""
        end_process = self._end_process
        if end_process is None:
            return None

        def stuck(jobs: Sequence[str]) -> None:
            status, reason = self._told
            why = [reason] if reason and status != "interrupted" else []
            end_process(status, [*why, f"ended without waiting for {'; '.join(jobs)}"])

        return stuck

    def tell(self, status: RunStatus, counts: Mapping[str, int], reason: str | None = None) -> None:
        """The run is over."""
        self._told = (status, reason)
        self._recorder.run_ended(status, counts, reason)

    def tell_blocked(self, why: str, counts: Mapping[str, int]) -> None:
        """For the watchdog: the event loop is held, so the process ends where someone can."""
        self.tell("failed", counts, why)
        if self._end_process is not None:
            self._end_process("failed", [why])
