"""How to go on from a run that is over, in one line: its policy by name, or what resumes it.

The name of a policy is what `loops eval`, `loops export` and `model.start_from` take. A run that
did not come to its end is resumed where it kept something: a checkpoint, or a batch.
"""

from pathlib import Path

from loops_cookbook.errors import RunFolderError
from loops_cookbook.recipes.checkpoints import CheckpointRules, best_of
from loops_cookbook.records import RunStatus
from loops_cookbook.report.words import measure
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.read import open_run
from loops_cookbook.rundir.references import kept_checkpoints
from loops_cookbook.rundir.rows import CheckpointRow
from loops_cookbook.rundir.updates import UpdateStore


def onward(root: Path, status: RunStatus, resume_command: str | None) -> str | None:
    """The line; None where there is nothing to go on from.

    Args:
        root: the run's folder, as its records are now.
        status: how it ended.
        resume_command: what goes on with it; None: nothing does.
    """
    try:
        kept = kept_checkpoints(open_run(root))
    except RunFolderError:
        return None
    if status == "done":
        return _policy(root, kept) if kept else None
    has_more = bool(kept or UpdateStore(RunFolder(root).updates).kept())
    return f"go on with: {resume_command}" if resume_command and has_more else None


def _policy(root: Path, kept: list[CheckpointRow]) -> str:
    last = kept[-1]
    named = f"policy: {root}@{last.update}"
    is_loss = any((row.score_name or "").endswith("/loss") for row in kept)
    best = best_of(kept, CheckpointRules(every=0, keep=1, is_loss=is_loss))
    if best is None or best.score is None:
        return named
    score = f"{best.score_name} {measure(best.score)}"
    if best.update == last.update:
        return f"{named} (the best: {score})"
    return f"{named} (best {root}@{best.update}: {score})"
