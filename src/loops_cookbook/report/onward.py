"""How to go on from a run that is over, in one line: its policy by name, or what resumes it.

The name of a policy is what `loops eval`, `loops export` and `model.start_from` take. A run that
did not come to its end is resumed where it kept something: a checkpoint, or a batch. One that was
interrupted is resumed from its first weights too, where that is possible. The best checkpoint may
still be worse than what training began with, which is none; then that is said.
"""

from collections.abc import Iterable
from pathlib import Path

from loops_cookbook.errors import RunFolderError
from loops_cookbook.recipes.checkpoints import CheckpointRules, is_better, score_of
from loops_cookbook.records import EvaluationRow, RunStatus
from loops_cookbook.report.words import measure
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.read import RecordedRun, open_run
from loops_cookbook.rundir.references import kept_checkpoints
from loops_cookbook.rundir.rows import CheckpointRow, best_of
from loops_cookbook.rundir.updates import UpdateStore


def onward(root: Path, status: RunStatus, resume_command: str | None) -> str | None:
    """The line; None where there is nothing to go on from.

    Args:
        root: the run's folder, as its records are now.
        status: how it ended.
        resume_command: what goes on with it; None: nothing does.
    """
    try:
        run = open_run(root)
        kept, evaluations = kept_checkpoints(run), run.evaluations()
        has_more = bool(kept or UpdateStore(RunFolder(root).updates).kept())
        has_more = has_more or (status == "interrupted" and _begins_again(run))
    except RunFolderError:
        return None
    if status == "done":
        return _policy(root, kept, evaluations) if kept else None
    return f"go on with: {resume_command}" if resume_command and has_more else None


def _begins_again(run: RecordedRun) -> bool:
    """Whether a run that kept nothing goes on all the same, from the first weights."""
    if run.run.recipe == "sft":  # its batches follow from its rows
        return True
    if run.steps():
        return False
    # Starts are written where the trainer keeps anything at all.
    return bool(run.starts()) or not run.run.counts.get("attempts/started")


def _policy(root: Path, kept: list[CheckpointRow], evaluations: Iterable[EvaluationRow]) -> str:
    last = kept[-1]
    named = f"policy: {root}@{last.update}"
    best = best_of(kept)
    if best is None or best.score is None:
        return named
    rules = CheckpointRules(every=0, keep=1, is_loss=best.is_loss)
    score = f"{best.score_name} {measure(best.score)}"
    firsts = (score_of([row], is_loss=best.is_loss) for row in evaluations if row.update == 0)
    first = next((each for each in firsts if each and each.name == best.score_name), None)
    if first is not None and is_better(first.value, best.score, rules):
        score += f"; {measure(first.value)} before the first update"
    if best.update == last.update:
        return f"{named} (the best: {score})"
    return f"{named} (best {root}@{best.update}: {score})"
