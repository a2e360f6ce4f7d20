"""Held-out sets: run under the run's own limits, scored, recorded, never trained on.

A set is evaluated by exactly one policy version, so no weights are published meanwhile; training
attempts may go on, and share the slots. It ends, since each of its attempts does by its clocks.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import anyio

from loops_cookbook.attempts import Attempt, Fate, Group
from loops_cookbook.recipes.plan import PlannedSet
from loops_cookbook.recipes.scores import EvaluationFacts, evaluation_row
from loops_cookbook.recipes.tally import told_of_cuts
from loops_cookbook.records import EvaluationRow, Recorder
from loops_cookbook.rollouts.scheduler import run_set
from loops_cookbook.rollouts.stall import Narrator
from loops_cookbook.rollouts.trial import AttemptContext


def is_due(update: int, *, every: int, last: int | None) -> bool:
    """Whether the sets are evaluated after this update (0: before the first).

    Args:
        update: how many updates the policy has had.
        every: updates between two evaluations; 0: only before the first and after the last.
        last: the number of the last update; None where that is not known beforehand.
    """
    return update == 0 or update == last or (every > 0 and update % every == 0)


class Evaluations:
    """The evaluations of a run, or of several policies, one after another.

    Args:
        sets: what to evaluate.
        context: what the training attempts share; only the sampling terms differ here.
        recorder: told of each attempt and each set.
        narrator: told what is waited for.
    """

    def __init__(
        self,
        sets: Sequence[PlannedSet],
        context: AttemptContext,
        recorder: Recorder,
        narrator: Narrator,
    ) -> None:
        self._sets = sets
        self._context = context
        self._recorder = recorder
        self._narrator = narrator
        self._losses: set[tuple[str, Fate, str | None]] = set()
        """The ways in which attempts at each set were lost so far."""
        self._cut: set[str] = set()
        """The sets whose replies were told to be cut."""

    async def run(
        self,
        *,
        update: int,
        policy_version: int,
        policy: str | None = None,
        done: Sequence[EvaluationRow] = (),
    ) -> list[EvaluationRow]:
        """Run every set on the policy that is served, one after another, and record each.

        Args:
            update: how many updates the policy has had.
            policy_version: the version to sample from.
            policy: what it is called, where it is not that of a run.
            done: the rows of sets that were evaluated after this update before.

        Returns:
            A row for each set, in the config's order.
        """
        rows = {row.set: row for row in done}
        for held_out in self._sets:
            if held_out.name in rows:
                continue
            began = anyio.current_time()
            groups = await self._groups(held_out, policy_version)
            facts = EvaluationFacts(
                set=held_out.name,
                update=update,
                policy_version=policy_version,
                groups=groups,
                solved_at=held_out.solved_at,
                at=time.time(),
                seconds=anyio.current_time() - began,
                policy=policy,
            )
            rows[held_out.name] = evaluation_row(facts)
            self._recorder.evaluation(rows[held_out.name])
            self._tell_cuts(held_out, groups, rows[held_out.name])
        return [rows[held_out.name] for held_out in self._sets]

    async def _groups(self, held_out: PlannedSet, policy_version: int) -> list[Group]:
        name, attempts, ended = held_out.name, held_out.attempts, 0

        def end(attempt: Attempt) -> None:
            nonlocal ended
            ended += 1
            self._recorder.attempt_ended(attempt, name)
            self._tell_loss(attempt, name)

        def told() -> str:
            of = len(held_out.tasks) * attempts
            return f"the evaluation of {name}: {ended} of {of} attempts have ended"

        terms = replace(self._context.terms, params=held_out.params, purpose=name)
        context = replace(self._context, terms=terms, on_end=end)
        with self._narrator.waiting_for(told):
            return await run_set(
                context, held_out.tasks, attempts=attempts, policy_version=policy_version
            )

    def _tell_cuts(self, held_out: PlannedSet, groups: Sequence[Group], row: EvaluationRow) -> None:
        """Say once of each set that its replies are cut: its scores are of what was left."""
        attempts = [attempt for group in groups for attempt in group.attempts]
        cuts = told_of_cuts(
            sum(len(attempt.trajectory.turns) for attempt in attempts),
            sum(attempt.trajectory.cut_turns for attempt in attempts),
            max_tokens=held_out.params.max_tokens,
            enough=bool(row.solve_rate) or len({a.reward for a in attempts} - {None}) > 1,
            limit=f"evaluation.sets.{held_out.name}.max_tokens, sampling.max_tokens",
        )
        if cuts is not None and held_out.name not in self._cut:
            self._cut.add(held_out.name)
            self._recorder.note("warning", f"{held_out.name}: {cuts}")

    def _tell_loss(self, attempt: Attempt, name: str) -> None:
        """Say why of the first attempt that is lost in each way; its transcript has it too."""
        lost = attempt.discarded
        if lost is None or lost.fate is Fate.CANCELLED:
            return
        if (kind := (name, lost.fate, lost.exception)) not in self._losses:
            self._losses.add(kind)
            self._recorder.note(
                "warning",
                f"an attempt at {attempt.task!r} of {name} is {lost.fate}: {lost.detail}; more of "
                "this kind are only counted",
            )
