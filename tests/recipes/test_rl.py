"""Whole runs of the recipe on doubles: what is trained, what is told, and how a run ends."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import numpy as np
import pytest
from trio.testing import MockClock

from loops_cookbook.attempts import Attempt, Fate
from loops_cookbook.errors import EngineDied, NoLearningSignal, ServiceUnavailable
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.records import (
    EvaluationRow,
    GroupRow,
    Level,
    RolloutRow,
    RunRow,
    RunStatus,
    StepRow,
)
from loops_cookbook.testing import Line, RecordingTrainer, ScriptedSampler, ScriptedService

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@dataclass
class Notebook:
    """A Recorder that keeps all it is told."""

    started: list[RunRow] = field(default_factory=list)
    attempts: list[tuple[str, Attempt]] = field(default_factory=list)
    groups: list[GroupRow] = field(default_factory=list)
    rollouts: list[RolloutRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    evaluations: list[EvaluationRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ended: list[tuple[RunStatus, dict[str, int], str | None]] = field(default_factory=list)

    def run_started(self, row: RunRow) -> None:
        self.started.append(row)

    def attempt_ended(self, attempt: Attempt, purpose: str) -> None:
        self.attempts.append((purpose, attempt))

    def group_settled(self, row: GroupRow) -> None:
        self.groups.append(row)

    def fates(self, rows: list[RolloutRow]) -> None:
        self.rollouts.extend(rows)

    def update(self, row: StepRow) -> None:
        self.steps.append(row)

    def evaluation(self, row: EvaluationRow) -> None:
        self.evaluations.append(row)

    def note(self, level: Level, text: str) -> None:
        self.notes.append(f"{level}: {text}")

    def run_ended(
        self, status: RunStatus, counts: dict[str, int], reason: str | None = None
    ) -> None:
        self.ended.append((status, dict(counts), reason))

    def fate_counts(self) -> Counter[Fate]:
        return Counter(row.fate for row in self.rollouts)


def row_of(plan: Plan) -> RunRow:
    return RunRow(
        run="a-run",
        started_at=0.0,
        recipe="rl",
        scope="local",
        model=plan.model.name,
        updates=plan.config.training.updates,
        attempts_per_update=8,
        tasks={"train": len(plan.tasks)},
        service={},
        versions={},
        config_path="train.toml",
        config={},
    )


class HalfRight:
    """The word of the prompt for every other call of that prompt, else nonsense."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    def __call__(self, prompt: str, call: int) -> str:
        self._calls[prompt] += 1
        word = prompt.split("<|user|>")[1].split("<|end|>")[0]
        return word if self._calls[prompt] % 2 else "no"


class BeesAreEasy(HalfRight):
    """As HalfRight, but one of the tasks is always solved."""

    def __call__(self, prompt: str, call: int) -> str:
        return "bee" if "bee" in prompt else super().__call__(prompt, call)


async def run(plan: Plan, service: ScriptedService) -> Notebook:
    notebook = Notebook()
    await run_rl(plan, service, notebook, row_of(plan))
    return notebook


async def test_each_update_trains_its_groups_and_the_next_samples_from_it(runnable) -> None:
    service = ScriptedService(HalfRight())
    notebook = await run(runnable(), service)

    assert [row.update for row in notebook.steps] == [1, 2, 3]
    assert service.trainer.published == [1, 2, 3]
    floors = [call.min_policy_version for call in service.sampler.calls]
    assert floors == [0] * 8 + [1] * 8 + [2] * 8
    assert notebook.fate_counts() == {Fate.TRAINED: 24}
    assert notebook.ended == [("done", notebook.ended[0][1], None)]
    assert not service.is_open


async def test_advantages_are_centred_in_each_group_and_only_sampled_tokens_carry_them(
    runnable,
) -> None:
    service = ScriptedService(HalfRight())
    await run(runnable(), service)

    for sent in service.trainer.batches:
        assert len(sent.batch) == 8
        firsts = [datum.advantages[np.flatnonzero(datum.advantages)[0]] for datum in sent.batch]
        assert sum(firsts[:4]) == pytest.approx(0)
        assert {abs(value) for value in firsts} == {0.5}
        for datum in sent.batch:
            assert np.all((datum.advantages != 0) == (datum.logprobs != 0))


async def test_a_group_without_variance_is_replaced_and_never_trained(runnable) -> None:
    service = ScriptedService(BeesAreEasy())
    notebook = await run(runnable(), service)

    rejected = [row for row in notebook.groups if not row.usable]
    assert {row.task for row in rejected} == {"bee"}
    assert {row.reason for row in rejected} == {"no_variance"}
    assert [len(sent.batch) for sent in service.trainer.batches] == [8, 8, 8]
    assert notebook.fate_counts() == {Fate.TRAINED: 24, Fate.NO_VARIANCE: 4 * len(rejected)}


async def test_every_row_adds_up(runnable) -> None:
    notebook = await run(runnable(), ScriptedService(BeesAreEasy()))
    for row in notebook.steps:
        metrics = row.metrics
        parts = ("attempts/trained", "attempts/unused", "attempts/discarded")
        assert metrics["attempts/finished"] == sum(metrics[part] for part in parts)
    counts = notebook.ended[0][1]
    assert counts["attempts/started"] == counts["attempts/finished"] == len(notebook.rollouts)
    assert counts["attempts/in_flight"] == 0


async def test_a_run_that_cannot_learn_stops_and_says_so(runnable) -> None:
    """Every group rejected: no empty batch is sent, and no wait for ever."""
    service = ScriptedService(lambda prompt, call: "no")
    notebook = Notebook()
    plan = runnable("training.max_consecutive_unusable_groups=5", "training.groups_per_update=1")
    with pytest.raises(NoLearningSignal, match="5 groups in a row"):
        await run_rl(plan, service, notebook, row_of(plan))

    assert service.trainer.batches == []
    assert service.trainer.published == []
    assert notebook.ended[0][0] == "stopped"
    assert notebook.fate_counts()[Fate.NO_VARIANCE] == 20
    counts = notebook.ended[0][1]
    assert counts["attempts/started"] == counts["attempts/finished"] == len(notebook.rollouts)


async def test_tasks_that_run_out_leave_a_short_last_update(runnable) -> None:
    """A usable group that waits for another when the tasks end is trained, not dropped."""
    service = ScriptedService(BeesAreEasy())
    notebook = await run(runnable("training.epochs=1"), service)
    assert [len(sent.batch) for sent in service.trainer.batches] == [8, 4]
    assert notebook.fate_counts() == {Fate.TRAINED: 12, Fate.NO_VARIANCE: 4}


async def test_held_out_sets_are_evaluated_before_after_and_between(runnable) -> None:
    service = ScriptedService(HalfRight())
    plan = runnable(
        "evaluation.every=2",
        'evaluation.sets.words={tasks="tasks.jsonl", attempts=2, temperature=0.0}',
    )
    notebook = await run(plan, service)

    assert [(row.set, row.update) for row in notebook.evaluations] == [
        ("words", update) for update in (0, 2, 3)
    ]
    assert [row.policy_version for row in notebook.evaluations] == [0, 2, 3]
    assert all(row.reward_mean == 0.5 for row in notebook.evaluations)
    assert "eval/words/solve_rate" in notebook.steps[-1].metrics
    assert "eval/words/solve_rate" not in notebook.steps[0].metrics
    assert notebook.fate_counts() == {Fate.TRAINED: 24}
    greedy = [call for call in service.sampler.calls if call.params.temperature == 0]
    assert len(greedy) == 3 * 4 * 2


async def test_a_trainer_that_fails_ends_the_run_and_nothing_is_lost_unnamed(runnable) -> None:
    sampler = ScriptedSampler(HalfRight())
    trainer = RecordingTrainer(sampler, failures={1: ServiceUnavailable("the trainer is gone")})
    notebook = Notebook()
    plan = runnable()
    with pytest.raises(ServiceUnavailable):
        await run_rl(plan, ScriptedService(sampler, trainer), notebook, row_of(plan))

    assert [row.update for row in notebook.steps] == [1]
    assert notebook.fate_counts() == {Fate.TRAINED: 8, Fate.SURPLUS: 8}
    status, counts, reason = notebook.ended[0]
    assert status == "failed"
    assert reason == "the trainer is gone"
    assert counts["attempts/finished"] == 16


async def test_a_publish_that_fails_leaves_its_attempts_trained_once(runnable) -> None:
    """The optimizer step was taken: to call its attempts surplus would be a lie."""

    class Unpublished(RecordingTrainer):
        async def publish(self, *, key: str) -> int:
            raise ServiceUnavailable("not published")

    sampler = ScriptedSampler(HalfRight())
    notebook = Notebook()
    plan = runnable()
    with pytest.raises(ServiceUnavailable):
        await run_rl(plan, ScriptedService(sampler, Unpublished(sampler)), notebook, row_of(plan))
    assert notebook.fate_counts() == {Fate.TRAINED: 8}
    assert notebook.ended[0][1]["attempts/trained"] == 8


async def test_an_engine_that_dies_ends_the_run_at_once(runnable) -> None:
    says = HalfRight()

    def dies(prompt: str, call: int) -> str | Exception:
        return EngineDied("it is gone") if call == 3 else says(prompt, call)

    notebook = Notebook()
    plan = runnable()
    with pytest.raises(EngineDied):
        await run_rl(plan, ScriptedService(dies), notebook, row_of(plan))
    assert notebook.ended[0][0] == "failed"
    counts = notebook.ended[0][1]
    assert counts["attempts/started"] == counts["attempts/finished"] == len(notebook.rollouts)


async def test_a_cancelled_run_keeps_what_it_has_and_names_the_rest(runnable) -> None:
    says = HalfRight()
    service = ScriptedService(lambda prompt, call: Line(says(prompt, call), seconds=10.0))
    notebook = Notebook()
    plan = runnable()
    with anyio.move_on_after(15):
        await run_rl(plan, service, notebook, row_of(plan))

    assert [row.update for row in notebook.steps] == [1]
    assert notebook.fate_counts() == {Fate.TRAINED: 8, Fate.CANCELLED: 8}
    assert notebook.ended[0][0] == "interrupted"
    ended = Counter((attempt.group, attempt.index) for _, attempt in notebook.attempts)
    assert set(ended.values()) == {1}
    assert len(ended) == 16


async def test_failed_attempts_are_never_zeros(runnable) -> None:
    """Infrastructure that fails for 5 of 8 attempts leaves a mean over the 3 others."""
    failures = iter([True, True, False, False, True, True, False, True])

    def flaky(prompt: str, call: int) -> str | Exception:
        word = prompt.split("<|user|>")[1].split("<|end|>")[0]
        return ServiceUnavailable("down") if next(failures) else word if call == 2 else "no"

    plan = runnable(
        "training.max_rollout_retries=0",
        "training.updates=1",
        "training.groups_per_update=1",
        "training.group_size=8",
    )
    notebook = await run(plan, ScriptedService(flaky))
    row = notebook.steps[0]
    assert row.metrics["attempts/discarded/failed"] == 5
    assert row.metrics["attempts/failed/ServiceUnavailable"] == 5
    assert row.metrics["attempts/trained"] == 3
    assert row.metrics["reward/mean"] == pytest.approx(1 / 3)
    assert {r.reward for r in notebook.rollouts if r.fate is Fate.FAILED} == {None}
    (note,) = notebook.notes
    assert "discarded/failed: run: ServiceUnavailable: down" in note


async def test_tasks_that_run_out_without_one_usable_group_are_no_success(runnable) -> None:
    """With `epochs` and every group rejected the run said "done after 0 updates", status 0."""
    notebook = Notebook()
    plan = runnable("training.epochs=1")
    with pytest.raises(NoLearningSignal, match="no group of 4 could be trained on"):
        await run_rl(plan, ScriptedService(lambda prompt, call: "no"), notebook, row_of(plan))
    assert notebook.ended[0][0] == "stopped"


async def test_a_run_is_recorded_before_its_service_is_there(runnable) -> None:
    """A kill while the engine started left a folder that nothing could read."""
    notebook = Notebook()

    @asynccontextmanager
    async def never() -> AsyncIterator[ScriptedService]:
        assert len(notebook.started) == 1
        raise ServiceUnavailable("not today")
        yield ScriptedService([])

    plan = runnable()
    with pytest.raises(ServiceUnavailable):
        await run_rl(plan, never, notebook, row_of(plan))
    assert notebook.ended[0][0] == "failed"
