"""Held-out sets: run under the run's own limits, scored, recorded, never trained on."""

import time
from collections.abc import Sequence
from dataclasses import replace

import anyio

from loops_cookbook.attempts import Attempt
from loops_cookbook.recipes.plan import PlannedSet
from loops_cookbook.recipes.scores import EvaluationFacts, evaluation_row
from loops_cookbook.records import EvaluationRow, Recorder
from loops_cookbook.rollouts.scheduler import run_set
from loops_cookbook.rollouts.trial import AttemptContext


def is_due(update: int, *, every: int, last: int | None) -> bool:
    """Whether the sets are evaluated after this update (0: before the first).

    Args:
        update: how many updates the policy has had.
        every: updates between two evaluations; 0: only before the first and after the last.
        last: the number of the last update; None where that is not known beforehand.
    """
    return update == 0 or update == last or (every > 0 and update % every == 0)


async def evaluate(
    sets: Sequence[PlannedSet],
    context: AttemptContext,
    recorder: Recorder,
    *,
    update: int,
    policy_version: int,
) -> list[EvaluationRow]:
    """Run every set on the policy that is served, one after another, and record each.

    Args:
        sets: what to evaluate.
        context: what the training attempts share; only the sampling terms differ here.
        recorder: told of each attempt and each set.
        update: how many updates the policy has had.
        policy_version: the version to sample from.
    """
    rows: list[EvaluationRow] = []
    for held_out in sets:
        began = anyio.current_time()
        groups = await run_set(
            _context_of(held_out, context, recorder),
            held_out.tasks,
            attempts=held_out.attempts,
            policy_version=policy_version,
        )
        facts = EvaluationFacts(
            set=held_out.name,
            update=update,
            policy_version=policy_version,
            groups=groups,
            solved_at=held_out.solved_at,
            at=time.time(),
            seconds=anyio.current_time() - began,
        )
        row = evaluation_row(facts)
        recorder.evaluation(row)
        rows.append(row)
    return rows


def _context_of(
    held_out: PlannedSet, context: AttemptContext, recorder: Recorder
) -> AttemptContext:
    def ended(attempt: Attempt) -> None:
        recorder.attempt_ended(attempt, held_out.name)

    terms = replace(context.terms, params=held_out.params, purpose=held_out.name)
    return replace(context, terms=terms, on_end=ended)
