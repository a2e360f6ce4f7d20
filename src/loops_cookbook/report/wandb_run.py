"""A run in Weights & Biases, by its own package; imported in a tracker's process alone.

Every metric has the number of the update as its axis, which is also wandb's step as long as rows
come in order. Scores that come late, as after a run was resumed, would be dropped under a step that
is closed; they get a row of their own, with the right update in it.
"""

import os
from collections.abc import Mapping
from typing import Any, cast

import wandb  # pyright: ignore[reportMissingImports]

from loops_cookbook.report.tracked import Begun, Tell, TrackedRun


def begin_wandb(begun: Begun, tell: Tell) -> TrackedRun:
    """Open a run of this name, or go on with it."""
    sdk = cast(Any, wandb)
    settings = sdk.Settings(
        console="off",  # nothing is printed here that belongs to the run
        silent=True,
        disable_git=True,  # which would send a diff of whatever is tracked, a .env included
    )
    run = sdk.init(
        project=begun.project,
        id=begun.id,
        name=begun.id,
        resume="allow",
        dir=os.environ.get("WANDB_DIR") or begun.folder,
        config=begun.config,
        allow_val_change=True,
        settings=settings,
    )
    run.define_metric("update", hidden=True)
    run.define_metric("*", step_metric="update")
    if run.url:
        tell("info", f"the run is at {run.url}")
    elif run.offline:
        tell("info", f"offline; `wandb sync {os.path.dirname(run.dir)}` sends it")
    return WandbRun(run)


class WandbRun:
    """An open run."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def describe(self, config: Mapping[str, object]) -> None:
        """Add to its config."""
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, update: int, metrics: Mapping[str, float], *, is_whole: bool) -> None:
        """Add metrics to an update, which is shown once it is whole or the next one comes."""
        step = update if update >= self._run.step else None
        self._run.log({"update": update, **metrics}, step=step, commit=is_whole or step is None)

    def end(self, status: str, reason: str | None, counts: Mapping[str, int]) -> None:
        """Say how it ended, in its summary and its state, and wait until all is sent."""
        totals = {f"totals/{name}": count for name, count in counts.items()}
        self._run.summary.update({"status": status, "reason": reason, **totals})
        self._run.finish(exit_code=0 if status == "done" else 1)
