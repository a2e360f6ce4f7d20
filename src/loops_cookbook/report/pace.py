"""How long the updates to come may take, by those that came last.

What is sampled beside an evaluation is in the time of that, and not of the update that trains on
it. So updates with an evaluation before them tell nothing of training alone; where all of them
have one, the time from row to row does tell how long both take.
"""

from collections import deque

from loops_cookbook.report.words import duration

_REMEMBERED = 10


class Pace:
    """The pace of a run. Times are those of a clock that never goes back."""

    def __init__(self) -> None:
        self._alone: deque[float] = deque(maxlen=_REMEMBERED)
        """Seconds of updates without an evaluation beside their sampling."""
        self._whole: deque[float] = deque(maxlen=_REMEMBERED)
        """Seconds from the row before, of updates with one."""
        self._told_at: float | None = None
        self._is_beside = False

    def evaluating(self) -> None:
        """Know that an evaluation is at work."""
        self._is_beside = True

    def updated(self, at: float, seconds: float | None, *, is_sampled: bool) -> None:
        """Take in an update.

        Args:
            at: when its row came.
            seconds: what it took; None: that is not known.
            is_sampled: whether it was trained on what was sampled for it.
        """
        before, self._told_at = self._told_at, at
        is_beside, self._is_beside = self._is_beside and is_sampled, False
        if not is_beside:
            self._alone.extend([] if seconds is None else [seconds])
        elif before is not None:
            self._whole.append(at - before)

    def left(self, updates: int, *, are_evaluated: bool) -> str:
        """How long so many updates may take; empty where that is not known.

        Args:
            updates: how many are to come.
            are_evaluated: whether evaluations come between them.
        """
        seconds = self._alone or self._whole
        if not seconds or updates <= 0:
            return ""
        told = duration(sum(seconds) / len(seconds) * updates)
        return f"about {told} {'of training ' if are_evaluated and self._alone else ''}left"
