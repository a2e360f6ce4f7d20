"""A run in Trackio, by its own package; imported in a tracker's process alone.

It goes by its name, so one that is there already is gone on with. Its step is the number of the
update; several rows may have one. How a run ended is an alert, as Trackio has nothing else for it.
"""

from collections.abc import Mapping
from typing import Any, cast

import trackio  # pyright: ignore[reportMissingImports]

from loops_cookbook.report.tracked import Begun, Tell, TrackedRun


def begin_trackio(begun: Begun, tell: Tell) -> TrackedRun:
    """Open a run of this name, or go on with it."""
    run = cast(Any, trackio).init(
        project=begun.project, name=begun.id, resume="allow", config=begun.config, embed=False
    )
    tell("info", f"`trackio show --project {begun.project!r}` shows the run {begun.id}")
    return TrackioRun(run)


class TrackioRun:
    """An open run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def describe(self, config: Mapping[str, object]) -> None:
        """Add to its config, which is sent with the first metrics."""
        self._run.config.update(config)

    def log(self, update: int, metrics: Mapping[str, float], *, is_whole: bool) -> None:
        """Add metrics to an update."""
        self._run.log(dict(metrics), step=update)

    def end(self, status: str, reason: str | None, counts: Mapping[str, int]) -> None:
        """Say how it ended, and wait until all is sent."""
        levels = cast(Any, trackio).AlertLevel
        level = levels.INFO if status == "done" else levels.ERROR
        self._run.alert(f"The run ended: {status}", text=reason, level=level)
        self._run.finish()
