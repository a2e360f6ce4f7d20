"""Whole runs of the SFT recipe on doubles: what is trained, what is told, how a run ends."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest
from tests.recipes.notebook import Notebook
from trio.testing import MockClock

from loops_cookbook.attempts import Fate
from loops_cookbook.errors import EngineDied, ServiceRefused, ServiceUnavailable
from loops_cookbook.learning.datums import Datum
from loops_cookbook.recipes.rules import adam_params
from loops_cookbook.recipes.sft import run_sft
from loops_cookbook.recipes.sft_plan import SFTPlan
from loops_cookbook.records import RunRow
from loops_cookbook.rundir.layout import new_run_folder
from loops_cookbook.rundir.write import RunWriter
from loops_cookbook.testing import Line, RecordingTrainer, ScriptedSampler, ScriptedService
from loops_cookbook.tokens import Logprobs

pytestmark = pytest.mark.anyio
MakeSFTPlan = Callable[..., SFTPlan]
END = 4
"""The id of `<end>` in the counting model's vocabulary."""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


def row_of(plan: SFTPlan) -> RunRow:
    return RunRow(
        run="r",
        started_at=0.0,
        recipe="sft",
        scope="local",
        model=plan.model.name,
        updates=len(plan.batches),
        attempts_per_update=None,
        tasks={},
        service={},
        versions={},
        config_path="train.toml",
        config={},
    )


async def run(plan: SFTPlan, service: ScriptedService) -> Notebook:
    notebook = Notebook()
    await run_sft(plan, service, notebook, row_of(plan))
    return notebook


def ids_of_row(plan: SFTPlan, place: int) -> bytes:
    return plan.train.rows[place].datums[0].input_ids.tobytes()


async def test_each_row_is_trained_exactly_once_in_each_epoch(make_sft_plan: MakeSFTPlan) -> None:
    plan = make_sft_plan("training.epochs=3")
    service = ScriptedService([])
    await run(plan, service)
    sent = Counter(d.input_ids.tobytes() for b in service.trainer.batches for d in b.batch)
    assert sent == {ids_of_row(plan, place): 3 for place in range(3)}
    assert [b.key for b in service.trainer.batches] == [f"update-{i}" for i in range(1, 7)]
    assert {b.loss.name for b in service.trainer.batches} == {"cross_entropy"}


async def test_only_replies_and_their_stop_tokens_carry_weight(make_sft_plan: MakeSFTPlan) -> None:
    service = ScriptedService([])
    await run(make_sft_plan(), service)
    for datum in (d for b in service.trainer.batches for d in b.batch):
        assert datum.weights is not None
        assert datum.weights.tolist() == [0.0] * (len(datum.weights) - 2) + [1.0, 1.0]
        assert datum.target_ids[-1] == END


async def test_every_update_is_told_and_counted(make_sft_plan: MakeSFTPlan) -> None:
    told = await run(make_sft_plan("training.epochs=2"), ScriptedService([]))
    assert [step.update for step in told.steps] == [1, 2, 3, 4]
    assert [step.metrics["epoch"] for step in told.steps] == pytest.approx([2 / 3, 1, 5 / 3, 2])
    assert [step.metrics["rows"] for step in told.steps] == [2, 1, 2, 1]
    assert all(step.metrics["loss"] == -1.0 for step in told.steps)
    assert told.ended == [("done", {"rows": 6, "tokens/read": 52, "tokens/trained": 12}, None)]


async def test_the_held_out_loss_is_the_mean_over_trained_tokens_and_told_before_and_after(
    make_sft_plan: MakeSFTPlan,
) -> None:
    service = ScriptedService([])
    told = await run(make_sft_plan("evaluation.every=0"), service)
    assert [(row.update, row.loss) for row in told.evaluations] == [
        (0, 1.0),
        (2, pytest.approx(1 / 3)),
    ]
    assert told.evaluations[0].reward_mean is None
    assert service.trainer.published == []


class Looking(RecordingTrainer):
    """Looks at something whenever it scores rows."""

    def __init__(self, look: Callable[[], int]) -> None:
        super().__init__()
        self.seen: list[int] = []
        self._look = look

    async def score(self, batch: Sequence[Datum], *, key: str) -> tuple[Logprobs, ...]:
        self.seen.append(self._look())
        return await super().score(batch, key=key)


async def test_an_update_has_its_row_at_once_and_the_held_out_loss_joins_it(
    make_sft_plan: MakeSFTPlan, sft_project: Path
) -> None:
    """A kill while the rows were looked at once left a trained batch in no row."""
    plan, folder = make_sft_plan("evaluation.every=0"), new_run_folder("runs", sft_project)
    trainer = Looking(lambda: len(folder.steps.read_text().splitlines()))
    with RunWriter(folder) as writer:
        await run_sft(plan, ScriptedService([], trainer), writer, row_of(plan))
    rows = [json.loads(line) for line in folder.steps.read_text().splitlines()]
    assert trainer.seen == [0, 2]
    assert [row.get("eval/held_out/loss") for row in rows] == [None, pytest.approx(1 / 3)]


async def test_held_out_rows_are_looked_at_every_so_many_updates(
    make_sft_plan: MakeSFTPlan,
) -> None:
    told = await run(make_sft_plan("training.epochs=3", "evaluation.every=4"), ScriptedService([]))
    assert [row.update for row in told.evaluations] == [0, 4, 6]


async def test_without_held_out_rows_nothing_is_evaluated(make_sft_plan: MakeSFTPlan) -> None:
    plan = replace(make_sft_plan(), held_out=None)
    told = await run(plan, ScriptedService([]))
    assert told.evaluations == []
    assert len(told.steps) == 2


def replies(plan: SFTPlan, right_from: int) -> Callable[[str, int], Line]:
    """A policy that says what the held-out rows say, from a call on."""
    assert plan.held_out is not None
    asked = [row.asked[0] for row in plan.held_out.rows]
    spelt = ScriptedSampler([]).tokenizer.decode
    said = {spelt(each.prompt_ids.tolist()): each.said_ids.tolist() for each in asked}
    return lambda prompt, call: Line(ids=said[prompt] if call >= right_from else [0, END])


async def test_samples_are_scored_before_and_after_by_the_policy_of_that_time(
    make_sft_plan: MakeSFTPlan,
) -> None:
    plan = make_sft_plan("evaluation.samples=9", "evaluation.every=0")
    service = ScriptedService(ScriptedSampler(replies(plan, right_from=2)))
    told = await run(plan, service)
    assert [row.solve_rate for row in told.evaluations] == [0.0, 1.0]
    assert service.trainer.published == [1]
    calls = service.sampler.calls
    assert [call.min_policy_version for call in calls] == [0, 0, 1, 1]
    assert {call.params.temperature for call in calls} == {0.0}
    first = next(a for purpose, a in told.attempts if purpose == "held_out" and a.group == 0)
    assert first.task == "held_out.jsonl:1[1]"
    assert first.metadata == {"expected": "0"}
    assert first.calls[0].messages == ({"role": "user", "content": "shipped"},)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_trainer_that_fails_ends_the_run_and_no_batch_is_sent_again(
    make_sft_plan: MakeSFTPlan, number: int
) -> None:
    """Where a run stopped, later batches had gone out before and were trained a second time."""
    trainer = RecordingTrainer(failures={number: EngineDied("gone")})
    service, notebook = ScriptedService([], trainer), Notebook()
    plan = make_sft_plan()
    with pytest.raises(EngineDied):
        await run_sft(plan, service, notebook, row_of(plan))
    assert [batch.key for batch in trainer.batches] == ["update-1"][:number]
    assert [step.update for step in notebook.steps] == [1][:number]
    ((status, counts, reason),) = notebook.ended
    assert (status, reason) == ("failed", "gone")
    assert counts.get("rows", 0) == 2 * number


@pytest.mark.parametrize(
    "error", [ServiceRefused("too odd"), ServiceUnavailable("no answer"), KeyError("of their own")]
)
async def test_a_sample_that_fails_is_discarded_and_the_run_goes_on(
    make_sft_plan: MakeSFTPlan, error: Exception
) -> None:
    """One that a sampler refused ended a whole run; a fault of a user's own sampler, as our bug."""
    plan = make_sft_plan("evaluation.samples=2", "evaluation.every=0")
    right = replies(plan, right_from=0)
    script = lambda prompt, call: right(prompt, call) if call % 2 else error  # noqa: E731
    told = await run(plan, ScriptedService(ScriptedSampler(script)))
    assert [status for status, *_ in told.ended] == ["done"]
    counted = {"discarded/failed": 1, "evaluated": 1}
    assert [(row.fates, row.solve_rate) for row in told.evaluations] == [(counted, 1.0)] * 2
    failed = [attempt.discarded for _, attempt in told.attempts if attempt.discarded]
    assert [(each.fate, each.exception) for each in failed] == [
        (Fate.FAILED, type(error).__name__)
    ] * 2
    (warning,) = [note for note in told.notes if "discarded/failed" in note]
    assert f"{type(error).__name__}: {error}" in warning


async def test_samples_that_all_fail_leave_no_score(make_sft_plan: MakeSFTPlan) -> None:
    plan = make_sft_plan("evaluation.samples=2", "evaluation.every=0")
    sampler = ScriptedSampler(lambda *_: ServiceRefused("no"))
    told = await run(plan, ScriptedService(sampler))
    assert [list(row.metrics) for row in told.evaluations] == [["eval/held_out/loss"]] * 2


async def test_an_engine_that_dies_under_a_sample_ends_the_run(make_sft_plan: MakeSFTPlan) -> None:
    plan = make_sft_plan("evaluation.samples=2")
    service, notebook = ScriptedService(ScriptedSampler(lambda *_: EngineDied("gone"))), Notebook()
    with pytest.raises(EngineDied):
        await run_sft(plan, service, notebook, row_of(plan))
    assert [(status, reason) for status, _, reason in notebook.ended] == [("failed", "gone")]


async def test_an_update_that_was_applied_is_told_even_if_what_follows_is_cut(
    make_sft_plan: MakeSFTPlan,
) -> None:
    plan = make_sft_plan("evaluation.samples=2", "evaluation.every=1")
    right = replies(plan, right_from=0)
    script = lambda prompt, call: replace(right(prompt, call), seconds=0.0 if call < 2 else 99.0)  # noqa: E731
    notebook = Notebook()
    with anyio.move_on_after(5):
        await run_sft(plan, ScriptedService(ScriptedSampler(script)), notebook, row_of(plan))
    assert [step.update for step in notebook.steps] == [1]
    assert [status for status, *_ in notebook.ended] == ["interrupted"]


async def test_a_loss_that_is_no_number_ends_the_run_by_name(make_sft_plan: MakeSFTPlan) -> None:
    class RunAway(RecordingTrainer):
        async def score(self, batch: list[Datum], *, key: str):
            return tuple(np.full(len(d.input_ids), np.nan, np.float32) for d in batch)

    plan = make_sft_plan()
    with pytest.raises(ServiceRefused, match="a loss of nan: the weights have run away"):
        await run_sft(plan, ScriptedService([], RunAway()), Notebook(), row_of(plan))


async def test_the_rate_warms_up_and_falls_over_the_planned_updates(
    make_sft_plan: MakeSFTPlan,
) -> None:
    plan = make_sft_plan("training.epochs=3", "training.warmup=2")
    training = plan.config.training
    rates = [adam_params(training, u, planned=6).learning_rate for u in range(1, 7)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4])
