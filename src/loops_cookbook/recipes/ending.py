"""How a run's end is told in its records, from the exception that ended it."""

from loops_cookbook.errors import LoopsError, NoLearningSignal
from loops_cookbook.records import RunStatus


def ending(error: BaseException) -> tuple[RunStatus, str]:
    """The status and the reason."""
    if isinstance(error, NoLearningSignal):
        return "stopped", str(error)
    if isinstance(error, LoopsError):
        return "failed", str(error)
    if isinstance(error, Exception):
        return "failed", f"a bug of loops-cookbook: {type(error).__name__}: {error}"
    return "interrupted", "stopped by a signal"
