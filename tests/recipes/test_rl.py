"""Whole runs of the recipe on doubles: what is trained, what is told, and how a run ends."""

import string
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.recipes.notebook import Notebook
from trio.testing import MockClock

from loops_cookbook.attempts import Attempt, Fate
from loops_cookbook.episodes import Episode, Grading, Sampling
from loops_cookbook.errors import (
    EngineDied,
    NoLearningSignal,
    NothingWorks,
    RunStopped,
    ServiceUnavailable,
)
from loops_cookbook.recipes.ending import Ending
from loops_cookbook.recipes.frame import Surroundings
from loops_cookbook.recipes.plan import AnyTask, Plan
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.records import (
    RunRow,
    RunStatus,
)
from loops_cookbook.services.gather import GatheringSampler
from loops_cookbook.testing import Line, RecordingTrainer, ScriptedSampler, ScriptedService
from loops_cookbook.testing.scripted import Script, Step

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


def fate_counts(notebook: Notebook) -> Counter[Fate]:
    return Counter(row.fate for row in notebook.rollouts)


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
    assert fate_counts(notebook) == {Fate.TRAINED: 24}
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


class CountsRequests(ScriptedSampler):
    """Keeps how many completions each request asked for, by its group."""

    def __init__(self, script: Script) -> None:
        super().__init__(script, seconds=1)
        self.requests: dict[str | None, list[int]] = {}

    async def sample(self, prompt_ids, params, *, n=1, affinity_key=None, **rest):
        self.requests.setdefault(affinity_key, []).append(n)
        return await super().sample(prompt_ids, params, n=n, affinity_key=affinity_key, **rest)


class Gathers(ScriptedService):
    @asynccontextmanager
    async def __call__(self) -> AsyncIterator["Gathers"]:
        async with super().__call__(), GatheringSampler(self.sampler) as sampler:
            self.sampler = sampler
            yield self


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_the_calls_of_a_group_leave_as_one_request(runnable, mode: str) -> None:
    """Also where groups start one by one, in the place of others that taught nothing."""
    sampler = CountsRequests(BeesAreEasy())
    service = Gathers(sampler, RecordingTrainer(sampler))
    notebook = await run(runnable(f'training.mode="{mode}"'), service)

    assert not all(row.usable for row in notebook.groups)
    groups = {f"train-{row.group}" for row in notebook.rollouts}
    assert sampler.requests == {key: [4] for key in groups}


async def test_a_group_without_variance_is_replaced_and_never_trained(runnable) -> None:
    service = ScriptedService(BeesAreEasy())
    notebook = await run(runnable(), service)

    rejected = [row for row in notebook.groups if not row.usable]
    assert {row.task for row in rejected} == {"bee"}
    assert {row.reason for row in rejected} == {"no_variance"}
    assert [len(sent.batch) for sent in service.trainer.batches] == [8, 8, 8]
    assert fate_counts(notebook) == {Fate.TRAINED: 24, Fate.NO_VARIANCE: 4 * len(rejected)}


async def test_replies_that_are_cut_are_a_warning_once(runnable) -> None:
    """Words of three letters, and no room for the token that ends them."""
    notebook = await run(runnable("sampling.max_tokens=3"), ScriptedService(HalfRight()))

    assert [row.metrics["turns/cut"] for row in notebook.steps] == [4, 4, 4]
    (warning,) = [note for note in notebook.notes if "cut at a token limit" in note]
    assert warning.startswith("warning: update 1: 4 of 8 replies were cut at a token limit")


async def test_every_row_adds_up(runnable) -> None:
    notebook = await run(runnable(), ScriptedService(BeesAreEasy()))
    for row in notebook.steps:
        metrics = row.metrics
        parts = ("attempts/trained", "attempts/unused", "attempts/discarded")
        assert metrics["attempts/finished"] == sum(metrics[part] for part in parts)
    counts = notebook.ended[0][1]
    assert counts["attempts/started"] == counts["attempts/finished"] == len(notebook.rollouts)
    assert counts["attempts/in_flight"] == 0


@pytest.mark.parametrize("loss", ["cispo", "dppo"])
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_run_that_cannot_learn_stops_and_says_so(runnable, mode: str, loss: str) -> None:
    """Every group rejected: no empty batch is sent, no gradient of a pull alone, no long wait."""
    service = ScriptedService(lambda prompt, call: "no")
    notebook = Notebook()
    plan = runnable(
        "training.max_consecutive_unusable_groups=5",
        "training.groups_per_update=1",
        f'training.mode="{mode}"',
        f'training.loss="{loss}"',
    )
    with pytest.raises(NoLearningSignal, match=r"[567] groups in a row"):
        await run_rl(plan, service, notebook, row_of(plan))

    assert service.trainer.batches == []
    assert service.trainer.published == []
    assert notebook.ended[0][0] == "stopped"
    assert fate_counts(notebook)[Fate.NO_VARIANCE] in (20, 24, 28)  # async: as they settle
    counts = notebook.ended[0][1]
    assert counts["attempts/started"] == counts["attempts/finished"] == len(notebook.rollouts)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_tasks_that_run_out_leave_a_short_last_update(runnable, mode: str) -> None:
    """A usable group that waits for another when the tasks end is trained, not dropped."""
    service = ScriptedService(BeesAreEasy())
    notebook = await run(runnable("training.epochs=1", f'training.mode="{mode}"'), service)
    assert [len(sent.batch) for sent in service.trainer.batches] == [8, 4]
    assert fate_counts(notebook) == {Fate.TRAINED: 12, Fate.NO_VARIANCE: 4}


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
    assert all(row.fates == {"evaluated": 8} for row in notebook.evaluations)
    assert fate_counts(notebook) == {Fate.TRAINED: 24}
    greedy = [call for call in service.sampler.calls if call.params.temperature == 0]
    assert len(greedy) == 3 * 4 * 2


async def test_an_update_is_recorded_before_its_evaluation(runnable) -> None:
    """Its row came after it: a kill in between left attempts that were trained in no row."""
    plan = runnable("evaluation.every=1", 'evaluation.sets.words={tasks="tasks.jsonl", attempts=1}')
    notebook = await run(plan, ScriptedService(HalfRight()))
    evaluated = ["words"] * 4
    assert notebook.order == [
        *evaluated,
        *(each for update in (1, 2, 3) for each in (f"update {update}", *evaluated)),
    ]


async def test_sampling_goes_on_beside_an_evaluation_and_training_waits_for_it(runnable) -> None:
    """An evaluation is of one policy version, so nothing is published meanwhile."""

    def slow(prompt: str, call: int) -> Line:
        return Line(says(prompt, call), seconds=10)

    says = HalfRight()
    service = ScriptedService(slow)
    plan = runnable(
        "evaluation.every=1",
        'evaluation.sets.words={tasks="tasks.jsonl", attempts=4, temperature=0.5}',
        "training.updates=2",
        "concurrency.sampling=16",
    )
    await run(plan, service)
    purposes = [call.params.temperature for call in service.sampler.calls]
    first = [call.min_policy_version for call in service.sampler.calls]
    assert purposes[:16].count(1.0) == 8
    assert purposes[:16].count(0.5) == 8
    assert first == sorted(first)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_an_evaluation_that_hangs_at_the_end_does_not_hold_the_run(
    runnable, mode: str
) -> None:
    """The last update was done while evaluations were in flight, and the run never ended."""

    def hangs(prompt: str, call: int) -> Line:
        return Line("no", seconds=1e9) if is_last() else Line(says(prompt, call), seconds=1)

    def is_last() -> bool:
        return len(service.trainer.published) == 3

    says = HalfRight()
    service = ScriptedService(hangs)
    plan = runnable(
        f'training.mode="{mode}"',
        "evaluation.every=0",
        'evaluation.sets.one={tasks="tasks.jsonl", attempts=2}',
        'evaluation.sets.two={tasks="tasks.jsonl", attempts=2}',
    )
    notebook = await run(plan, service)
    assert notebook.ended[0][0] == "done"
    last = [row for row in notebook.evaluations if row.update == 3]
    assert [row.fates for row in last] == [{"discarded/no_reply": 8}] * 2


class Misspelt(Episode[AnyTask, None]):
    """Has a typo behind its first reply, and takes its time until then."""

    async def run(self, sample: Sampling) -> None:
        await sample.model.conversation().generate([{"role": "user", "content": "hello"}])
        raise AttributeError("'Task' object has no attribute 'wrod'")

    async def grade(self, grading: Grading) -> float:
        return 1.0


async def test_a_fault_in_every_attempt_ends_the_run_at_once_in_its_own_words(runnable) -> None:
    """It went on through the first evaluation and 20 groups, each attempt tried three times."""
    plan = runnable(
        'evaluation.sets.words={tasks="tasks.jsonl", attempts=500}', "concurrency.sampling=16"
    )
    plan = replace(plan, code=replace(plan.code, episode_class=Misspelt))
    sampler = ScriptedSampler(lambda prompt, call: "a", seconds=10)
    notebook = Notebook()
    with pytest.raises(NothingWorks, match=r"all 12 .* first 3 .*: 'Task' object has no .*in run"):
        await run_rl(plan, ScriptedService(sampler), notebook, row_of(plan))

    assert notebook.evaluations == []
    assert fate_counts(notebook).keys() <= {Fate.FAILED, Fate.CANCELLED}
    status, counts, reason = notebook.ended[0]
    assert (status, counts["attempts/discarded"]) == ("stopped", counts["attempts/finished"])
    assert reason is not None


async def test_a_trainer_that_fails_ends_the_run_and_nothing_is_lost_unnamed(runnable) -> None:
    sampler = ScriptedSampler(HalfRight())
    trainer = RecordingTrainer(sampler, failures={1: ServiceUnavailable("the trainer is gone")})
    notebook = Notebook()
    plan = runnable()
    with pytest.raises(ServiceUnavailable):
        await run_rl(plan, ScriptedService(sampler, trainer), notebook, row_of(plan))

    assert [row.update for row in notebook.steps] == [1]
    assert fate_counts(notebook) == {Fate.TRAINED: 8, Fate.SURPLUS: 8}
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
    assert fate_counts(notebook) == {Fate.TRAINED: 8}
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


@pytest.mark.parametrize("seconds", [1, 6, 16, 26, 36])
async def test_a_run_that_is_cut_short_counts_what_has_no_row_as_in_flight(
    runnable, seconds: float
) -> None:
    """A process that a blocked event loop ended had counts of its last update, not of its rows."""
    says = HalfRight()
    service = ScriptedService(
        lambda prompt, call: Line("no" if call < 4 else says(prompt, call), seconds=5.0)
    )
    notebook, plan = Notebook(), runnable("training.updates=100")
    ending = Ending(notebook)
    around = Surroundings(ending=ending)
    async with anyio.create_task_group() as group:
        group.start_soon(run_rl, plan, service, notebook, row_of(plan), around)
        await anyio.sleep(seconds)
        rows = len(notebook.rollouts)
        ending.cut_short()
        group.cancel_scope.cancel()
    status, counts, _ = notebook.ended[0]
    assert status == "interrupted"
    assert counts["attempts/finished"] == rows
    assert counts["attempts/started"] == rows + counts["attempts/in_flight"]
    assert counts["attempts/in_flight"] > 0


async def test_a_cancelled_run_keeps_what_it_has_and_names_the_rest(runnable) -> None:
    says = HalfRight()
    service = ScriptedService(lambda prompt, call: Line(says(prompt, call), seconds=10.0))
    notebook = Notebook()
    plan = runnable()
    with anyio.move_on_after(15):
        await run_rl(plan, service, notebook, row_of(plan))

    assert [row.update for row in notebook.steps] == [1]
    assert fate_counts(notebook) == {Fate.TRAINED: 8, Fate.CANCELLED: 8}
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


ASYNC = 'training.mode="async"'


def slow_trainer(script: Script, seconds: float) -> ScriptedService:
    sampler = ScriptedSampler(script)
    return ScriptedService(sampler, RecordingTrainer(sampler, seconds=seconds))


def write_tasks(project: Path, words: list[str]) -> None:
    """A task for each group: half of the replies to a prompt are right, not half of a group's."""
    lines = "".join(f'{{"name": "{word}", "word": "{word}"}}\n' for word in words)
    (project / "tasks.jsonl").write_text(lines)


async def test_in_async_mode_sampling_goes_on_while_the_trainer_works(runnable, project) -> None:
    write_tasks(project, [f"{word}s" for word in string.ascii_lowercase[:12]])
    says = HalfRight()
    service = slow_trainer(lambda prompt, call: Line(says(prompt, call), seconds=1), seconds=50)
    notebook = await run(runnable(ASYNC, "training.updates=6"), service)

    ages = [row.metrics["policy/staleness_max"] for row in notebook.steps]
    assert ages == [0, 1, 2, 2, 2, 2]
    assert max(row.metrics["attempts/in_flight"] for row in notebook.steps) <= 3 * 8
    assert fate_counts(notebook) == {Fate.TRAINED: 48}
    busy = anyio.current_time()
    assert busy == pytest.approx(6 * 100 + 1, abs=1)  # the trainer never waits after the first


async def test_the_version_of_every_token_is_recorded_where_an_attempt_holds_two(
    runnable, project
) -> None:
    (project / "twice.py").write_text(
        (project / "spelling.py")
        .read_text()
        .replace("class Spell(", "class Twice(")
        .replace(
            "        self.said",
            "        await sample.model.conversation().generate("
            "[{'role': 'user', 'content': 'then'}])\n        self.said",
        )
    )

    def late(prompt: str, call: int) -> Line:
        return Line(says(prompt, call), seconds=60 if "then" in prompt else 1)

    says = HalfRight()
    service = slow_trainer(late, seconds=20)
    plan = runnable(ASYNC, 'episode.class="twice:Twice"', "training.updates=4")
    notebook = await run(plan, service)

    crossed = [row for row in notebook.rollouts if len(row.policy_versions) == 2]
    assert crossed
    for _, attempt in notebook.attempts:
        versions = [turn.sampled.policy_version for turn in attempt.trajectory.turns]
        assert versions == sorted(versions)
        (row,) = [
            r for r in notebook.rollouts if (r.group, r.attempt) == (attempt.group, attempt.index)
        ]
        assert row.policy_versions == tuple(sorted(set(versions)))


async def test_slow_tasks_keep_their_share_and_none_is_dropped_for_its_age(
    runnable, project
) -> None:
    """Async runs that threw slow samples away trained on quick tasks alone."""

    def dogs_are_slow(prompt: str, call: int) -> Line:
        return Line(says(prompt, call), seconds=50 if "dog" in prompt else 1)

    words = [f"{animal}{number}" for animal in ("ant", "bee", "cat", "dog") for number in range(4)]
    write_tasks(project, words)
    says = HalfRight()
    service = slow_trainer(dogs_are_slow, seconds=5)
    plan = runnable(ASYNC, "training.updates=8", "training.max_staleness=3")
    notebook = await run(plan, service)

    assert Counter(row.task for row in notebook.groups) == dict.fromkeys(words, 1)
    assert fate_counts(notebook) == {Fate.TRAINED: 64}


@pytest.mark.parametrize("what", ["the sampler", "the recorder"])
async def test_what_fails_beside_a_trainer_at_work_ends_the_run_within_seconds(
    runnable, what: str
) -> None:
    """A task in the background that died left the trainer's loop waiting for ever."""

    def fails(prompt: str, call: int) -> Line | Exception:
        if what == "the sampler" and call == 20:
            return EngineDied("the engine is gone")
        return Line(says(prompt, call), seconds=5)

    class FullDisk(Notebook):
        def attempt_ended(self, attempt: Attempt, purpose: str) -> None:
            super().attempt_ended(attempt, purpose)
            if what == "the recorder" and len(self.attempts) == 20:
                raise RunStopped("no space left")

    says = HalfRight()
    notebook = FullDisk()
    plan = runnable(ASYNC)
    with pytest.raises((EngineDied, RunStopped)):
        await run_rl(plan, slow_trainer(fails, seconds=1e6), notebook, row_of(plan))
    assert anyio.current_time() < 60
    assert notebook.ended[0][0] == "failed"


async def test_batches_that_were_full_are_trained_before_a_rule_stops_an_async_run(
    runnable,
) -> None:
    calls: Counter[str] = Counter()

    def dries_up(prompt: str, call: int) -> Line:
        calls[prompt] += 1  # the first group of each of the four tasks teaches
        return Line(says(prompt, call) if calls[prompt] <= 4 else "no", seconds=1)

    says = HalfRight()
    service = slow_trainer(dries_up, seconds=50)
    notebook = Notebook()
    plan = runnable(
        ASYNC,
        "training.max_staleness=1",
        "training.updates=9",
        "training.max_consecutive_unusable_groups=4",
    )
    with pytest.raises(NoLearningSignal, match="4 groups in a row"):
        await run_rl(plan, service, notebook, row_of(plan))
    assert [row.update for row in notebook.steps] == [1, 2]
    assert fate_counts(notebook)[Fate.TRAINED] == 16


async def test_why_a_process_must_end_is_told_with_how_the_run_ended(runnable, project) -> None:
    """A run whose tries ignore cancellation ended without its reason."""
    told: list[tuple[RunStatus, list[str]]] = []
    until = anyio.Event()

    def end_process(status: RunStatus, why: list[str]) -> None:
        told.append((status, why))
        until.set()

    class Stubborn(ScriptedSampler):
        async def sample(self, *args, **kwargs):
            while not until.is_set():
                try:
                    await until.wait()
                except anyio.get_cancelled_exc_class():
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(1)
            raise ServiceUnavailable("late")

    sampler = Stubborn([])
    notebook = Notebook()
    plan = runnable("training.updates=1", "training.max_consecutive_unusable_groups=1")
    with pytest.raises(NoLearningSignal):
        await run_rl(
            plan,
            ScriptedService(sampler, RecordingTrainer(sampler)),
            notebook,
            row_of(plan),
            Surroundings(ending=Ending(notebook, end_process)),
        )
    ((status, (reason, stuck)),) = told
    assert status == "stopped"
    assert reason.startswith("1 groups in a row taught nothing")
    assert stuck.startswith("ended without waiting for attempt ")


@dataclass(frozen=True)
class Chance:
    """What may happen in a run, drawn at random."""

    seconds: list[float]
    replies: list[str]
    """`right`, `wrong`, `down` (a model call that fails) or `dies` (the engine ends)."""
    trainer_seconds: float
    trainer_fails_at: int | None

    def service(self) -> ScriptedService:
        sampler = ScriptedSampler(self._step)
        failures = {}
        if self.trainer_fails_at is not None:
            failures = {self.trainer_fails_at: ServiceUnavailable("the trainer is away")}
        trainer = RecordingTrainer(sampler, seconds=self.trainer_seconds, failures=failures)
        return ScriptedService(sampler, trainer)

    def _step(self, prompt: str, call: int) -> Step:
        reply = self.replies[call % len(self.replies)]
        if reply == "down":
            return ServiceUnavailable("down")
        if reply == "dies" and call > 10:
            return EngineDied("gone")
        word = prompt.split("<|user|>")[1].split("<|end|>")[0]
        return Line(
            word if reply == "right" else "no", seconds=self.seconds[call % len(self.seconds)]
        )


chances = st.builds(
    Chance,
    seconds=st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0, 40.0]), min_size=1, max_size=7),
    replies=st.lists(
        st.sampled_from(["right", "wrong", "right", "wrong", "right", "wrong", "down", "dies"]),
        min_size=2,
        max_size=11,
    ),
    trainer_seconds=st.sampled_from([0.0, 3.0, 30.0]),
    trainer_fails_at=st.none() | st.integers(0, 4),
)


@pytest.fixture
def any_plan(runnable) -> Plan:
    return runnable(
        "training.group_size=2",
        "training.max_rollout_retries=0",
        "training.max_consecutive_unusable_groups=6",
    )


def with_training(plan: Plan, changes: dict[str, object]) -> Plan:
    config = plan.config
    training = config.training.model_copy(update=changes)
    changed = config.model_copy(update={"training": training})
    return replace(plan, loaded=replace(plan.loaded, config=changed))


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    chance=chances,
    mode=st.sampled_from(["sync", "async"]),
    bound=st.integers(0, 3),
    groups=st.integers(1, 3),
    length=st.sampled_from([{"updates": 4}, {"updates": None, "epochs": 2}]),
)
def test_no_group_is_too_old_or_dropped_and_each_has_one_end_whatever_happens(
    any_plan: Plan, chance: Chance, mode: str, bound: int, groups: int, length: dict[str, int]
) -> None:
    changes = {"mode": mode, "max_staleness": bound, "groups_per_update": groups, **length}
    plan = with_training(any_plan, changes)
    notebook = Notebook()

    async def main() -> None:
        with suppress(RunStopped):
            await run_rl(plan, chance.service(), notebook, row_of(plan))

    clock = MockClock(autojump_threshold=0)
    anyio.run(main, backend="trio", backend_options={"clock": clock})

    status, counts, _ = notebook.ended[0]
    fates = {(row.group, row.attempt): row.fate for row in notebook.rollouts}
    assert len(fates) == len(notebook.rollouts) == counts["attempts/started"]
    assert counts["attempts/in_flight"] == 0
    by_group = {serial: {f for (s, _), f in fates.items() if s == serial} for serial, _ in fates}
    trained = [serial for serial, ends in by_group.items() if Fate.TRAINED in ends]
    rows = {row.serial: row for row in notebook.groups}
    assert len(rows) == len(notebook.groups)
    assert sorted(trained) == [s for s in sorted(rows) if Fate.TRAINED in by_group[s]]
    # Trained in the order in which they started, so many an update, none older than the bound.
    updates = [rows[serial].update for serial in sorted(trained)]
    assert updates == sorted(updates)
    per_update = Counter(updates)
    assert all(per_update[row.update] == row.metrics["groups/usable"] for row in notebook.steps)
    for serial in trained:
        age = rows[serial].update - 1 - rows[serial].policy_version
        assert 0 <= age <= (bound if mode == "async" else 0)
    if status == "done":  # nothing is dropped or wasted
        assert not {Fate.SURPLUS, Fate.CANCELLED} & set(fates.values())
        usable = [row.serial for row in notebook.groups if row.usable]
        assert sorted(usable) == sorted(trained)
