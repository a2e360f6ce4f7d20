"""Evaluation alone: each policy is loaded, evaluated under its own name, and nothing is trained."""

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from tests.recipes.notebook import Notebook
from trio.testing import MockClock

from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.errors import ConfigError, ServiceRefused, ServiceUnavailable
from loops_cookbook.recipes.evaluate import (
    BASE,
    Candidate,
    comparisons,
    in_order,
    plan_evaluation,
    run_evaluation,
)
from loops_cookbook.recipes.plans import AnyPlan
from loops_cookbook.recipes.start import Start
from loops_cookbook.records import RunRow
from loops_cookbook.rundir.references import Located
from loops_cookbook.rundir.rows import CheckpointRow
from loops_cookbook.testing import Line, RecordingTrainer, ScriptedSampler, ScriptedService
from loops_cookbook.testing.scripted import Script

pytestmark = pytest.mark.anyio

SET = 'evaluation.sets.words={tasks="tasks.jsonl", attempts=2}'
RUN = RunRow(
    run="e",
    started_at=0.0,
    recipe="eval",
    scope="local",
    model="a/policy",
    updates=None,
    attempts_per_update=None,
    tasks={},
    service={},
    versions={},
    config_path="train.toml",
    config={},
)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


class LoadingTrainer(RecordingTrainer):
    """A trainer that keeps checkpoints; the sampler says the name of the last that was loaded."""

    def __init__(self, sampler: ScriptedSampler) -> None:
        super().__init__(sampler)
        self.loaded: list[tuple[str, bool]] = []

    async def save(self, name: str) -> str:
        return name

    async def load(self, path: str, *, with_optimizer: bool) -> int:
        self.loaded.append((path, with_optimizer))
        return 7 if with_optimizer else 0


def service_of(script: Script) -> tuple[ScriptedService, LoadingTrainer]:
    sampler = ScriptedSampler(script)
    trainer = LoadingTrainer(sampler)
    return ScriptedService(sampler, trainer), trainer


def here(update: int) -> Candidate:
    """A checkpoint whose files are on this machine."""
    path = f"bt://loops:r/weights/u{update}"
    row = CheckpointRow(update=update, name=f"u{update}", path=path, folder="c", at=0.0)
    return Candidate(f"r@{update}", Start("r", path, Located(RUN, Path("r"), row)))


def kept(path: str) -> Candidate:
    """A checkpoint that the service keeps."""
    return Candidate(path, Start(path, path, None))


async def evaluated(
    plan: AnyPlan, candidates: Sequence[Candidate], service: ScriptedService
) -> Notebook:
    notebook = Notebook()
    await run_evaluation(plan, candidates, service, notebook, RUN)
    return notebook


async def test_each_policy_meets_every_set_under_its_own_name(runnable) -> None:
    """The base policy first, for a trainer that has loaded a checkpoint has no way back."""
    says = {0: "no", 1: "ant", 2: "bee"}
    service, trainer = service_of(lambda prompt, call: says[len(trainer.loaded)])
    plan = runnable(SET, 'evaluation.sets.more={tasks="tasks.jsonl", attempts=1}')
    candidates = [here(2), Candidate(BASE, None), here(4)]
    notebook = await evaluated(plan, candidates, service)

    assert [row.policy for row in notebook.evaluations] == [
        *(BASE, BASE, "r@2", "r@2", "r@4", "r@4")
    ]
    rows = in_order(notebook.evaluations, candidates)
    assert [(row.set, row.policy, row.update) for row in rows] == [
        *(("words", "r@2", 2), ("words", BASE, 0), ("words", "r@4", 4)),
        *(("more", "r@2", 2), ("more", BASE, 0), ("more", "r@4", 4)),
    ]
    solved = {row.policy: [task.rewards[0] for task in row.tasks] for row in rows}
    assert solved == {"r@2": [1, 0, 0, 0], BASE: [0, 0, 0, 0], "r@4": [0, 1, 0, 0]}
    assert trainer.loaded == [
        ("bt://loops:r/weights/u2", False),
        ("bt://loops:r/weights/u4", False),
    ]
    assert trainer.batches == trainer.published == []
    assert [end[0] for end in notebook.ended] == ["done"]
    assert notebook.rollouts == []
    compared = comparisons(rows, candidates)
    assert [(each.set, each.first, each.second) for each in compared] == [
        *(("words", "r@2", BASE), ("words", "r@2", "r@4")),
        *(("more", "r@2", BASE), ("more", "r@2", "r@4")),
    ]


async def test_a_checkpoint_that_a_service_keeps_is_loaded_whole_and_published(runnable) -> None:
    """At step 0, where training without the optimizer begins, a service serves the base model."""
    service, trainer = service_of(lambda prompt, call: "ant")
    paths = ["bt://loops:r/weights/u7", "bt://loops:s/weights/u7"]
    notebook = await evaluated(runnable(SET), [kept(path) for path in paths], service)
    assert trainer.loaded == [(path, True) for path in paths]
    assert trainer.published == [1, 2]
    assert [(row.update, row.policy_version) for row in notebook.evaluations] == [(7, 1), (7, 2)]
    floors = [call.min_policy_version for call in service.sampler.calls]
    assert floors == [1] * 8 + [2] * 8


async def test_a_trainer_that_cannot_load_is_named(runnable) -> None:
    notebook = Notebook()
    service = ScriptedService(lambda prompt, call: "ant")
    with pytest.raises(ServiceRefused, match="r@2: the trainer has no `load`"):
        await run_evaluation(runnable(SET), [here(2)], service, notebook, RUN)
    assert notebook.ended[0][0] == "failed"


async def test_a_sampler_that_never_answers_does_not_hold_it(runnable) -> None:
    service, _ = service_of(lambda prompt, call: Line("no", seconds=1e9))
    notebook = await evaluated(runnable(SET), [Candidate(BASE, None)], service)
    assert [row.fates for row in notebook.evaluations] == [{"discarded/no_reply": 8}]
    assert notebook.ended[0][0] == "done"


async def test_attempts_of_different_tasks_sample_at_once(runnable) -> None:
    service, _ = service_of(lambda prompt, call: Line("no", seconds=10))
    plan = runnable(SET, "concurrency.sampling=8")
    began = anyio.current_time()
    await evaluated(plan, [Candidate(BASE, None)], service)
    assert service.sampler.most_under_way == 8
    assert anyio.current_time() - began < 20  # of the virtual clock


async def test_what_ended_before_it_was_cancelled_stays_recorded(runnable) -> None:
    service, trainer = service_of(
        lambda prompt, call: Line("ant", seconds=1e9 if trainer.loaded else 1)
    )
    notebook = Notebook()
    with anyio.move_on_after(50):
        candidates = [Candidate(BASE, None), here(2)]
        await run_evaluation(runnable(SET), candidates, service, notebook, RUN)
    assert [row.policy for row in notebook.evaluations] == [BASE]
    assert notebook.ended[0][0] == "interrupted"
    assert not service.is_open


async def test_a_service_that_fails_ends_it_with_that_word(runnable) -> None:
    def says(prompt: str, call: int) -> Exception:
        return ServiceUnavailable("the sampler is gone")

    service, trainer = service_of(says)

    async def gone(path: str, *, with_optimizer: bool) -> int:
        raise ServiceUnavailable("the trainer is gone")

    trainer.load = gone
    notebook = Notebook()
    with pytest.raises(ServiceUnavailable, match="the trainer is gone"):
        await run_evaluation(runnable(SET), [here(2)], service, notebook, RUN)
    assert notebook.ended == [("failed", {}, "the trainer is gone")]


async def test_held_out_rows_are_scored_anew_for_each_policy(make_sft_plan) -> None:
    """Two checkpoints of one update asked under one key were one operation, with one answer."""
    service, trainer = service_of(lambda prompt, call: Line(ids=[18, 4]))
    plan = make_sft_plan("evaluation.samples=2")
    notebook = await evaluated(plan, [here(2), kept("bt://loops:s/weights/u2")], service)
    assert len(set(trainer.scored)) == 2
    assert [row.policy for row in notebook.evaluations] == ["r@2", "bt://loops:s/weights/u2"]
    assert all(row.loss == 1.0 for row in notebook.evaluations)
    assert [dict(row.row_losses) for row in notebook.evaluations] == [
        {"held_out.jsonl:1": 1.0, "held_out.jsonl:2": 1.0}
    ] * 2
    assert [sum(row.fates.values()) for row in notebook.evaluations] == [2, 2]


def planned(*overrides: str) -> AnyPlan:
    loaded = load_config("train.toml", overrides)
    return plan_evaluation(loaded, read_environment(loaded.directory), {}, None)


@pytest.mark.usefixtures("project")
def test_a_config_without_a_set_says_what_to_add() -> None:
    with pytest.raises(ConfigError, match=r"add \[evaluation.sets.held_out\]"):
        planned()


def test_rows_to_train_on_are_not_needed(sft_project: Path) -> None:
    (sft_project / "train.jsonl").unlink()
    planned("training.batch_size=1000")
    text = (sft_project / "train.toml").read_text()
    (sft_project / "train.toml").write_text(text.replace('held_out = "held_out.jsonl"', ""))
    with pytest.raises(ConfigError, match=r"name a file of them in data\.held_out"):
        planned()
