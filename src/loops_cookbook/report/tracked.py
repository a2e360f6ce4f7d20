"""What a tracker's process knows of a run, and what each tracker's package is asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Tell: TypeAlias = Callable[[str, str], None]
"""Says a text of a level to the run."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What a tracker is told of a run when it begins, or goes on."""

    project: str
    id: str
    folder: str
    """For what the tracker keeps of its own."""
    config: dict[str, object]


class TrackedRun(Protocol):
    """A run that a tracker has open."""

    def describe(self, config: Mapping[str, object]) -> None:
        """Add to its config."""
        ...

    def log(self, update: int, metrics: Mapping[str, float], *, is_whole: bool) -> None:
        """Add metrics to an update; `is_whole`: no more of it is expected."""
        ...

    def end(self, status: str, reason: str | None, counts: Mapping[str, int]) -> None:
        """Say how it ended, and close it; waits until all is sent."""
        ...
