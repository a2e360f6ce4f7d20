"""Which checkpoints are saved, which stay, and what the best is chosen by."""

from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.errors import EngineDied, ServiceError, ServiceRefused
from loops_cookbook.recipes.checkpoints import (
    CheckpointRules,
    Checkpoints,
    Score,
    Standing,
    is_due,
    score_of,
    superseded,
)
from loops_cookbook.records import EvaluationRow
from loops_cookbook.rollouts.stall import Narrator
from loops_cookbook.rundir.rows import CheckpointRow, best_of
from loops_cookbook.testing import RecordingTrainer


def row(update: int, score: float | None = None, *, of: str = "reward_mean") -> CheckpointRow:
    name = None if score is None else f"eval/held_out/{of}"
    return CheckpointRow(update=update, name="n", path="p", at=0.0, score=score, score_name=name)


def evaluation(name: str, reward: float | None, loss: float | None = None) -> EvaluationRow:
    return EvaluationRow(
        set=name,
        update=1,
        policy_version=1,
        at=0.0,
        seconds=1.0,
        attempts=1,
        solved_at=1.0,
        reward_mean=reward,
        solve_rate=reward,
        pass_at_k={},
        fates={},
        tasks=(),
        loss=loss,
    )


@pytest.mark.parametrize(
    ("update", "is_last", "score", "best", "due"),
    [
        (0, False, 1.0, None, False),
        (9, False, None, None, False),
        (10, False, None, None, True),
        (13, True, None, None, True),
        (7, False, 0.5, None, True),
        (7, False, 0.5, 0.5, False),
        (7, False, 0.6, 0.5, True),
    ],
)
def test_one_is_saved_every_so_often_at_the_end_and_where_it_is_the_best(
    update: int, is_last: bool, score: float | None, best: float | None, due: bool
) -> None:
    told = None if score is None else Score("eval/held_out/reward_mean", score)
    rules = CheckpointRules(every=10, keep=2)
    assert is_due(update, rules, is_last=is_last, score=told, best=best) is due


def test_0_saves_only_the_last_and_the_best() -> None:
    rules = CheckpointRules(every=0, keep=2)
    assert not is_due(10, rules, is_last=False, score=None, best=None)
    assert is_due(10, rules, is_last=True, score=None, best=None)
    assert is_due(10, rules, is_last=False, score=Score("s", 0.1), best=None)


@given(
    scores=st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=12),
    keep=st.integers(0, 4),
    is_loss=st.booleans(),
)
def test_the_newest_the_last_and_the_best_stay(
    scores: list[float | None], keep: int, is_loss: bool
) -> None:
    of = "loss" if is_loss else "reward_mean"
    rows = [row(i, score, of=of) for i, score in enumerate(scores)]
    rules = CheckpointRules(every=1, keep=keep, is_loss=is_loss)
    gone = superseded(rows, rules)
    staying = [each for each in rows if each not in gone]

    assert staying[-1] == rows[-1]
    assert all(each in staying for each in rows[len(rows) - keep :])
    known = [score for score in scores if score is not None]
    best = best_of(rows)
    assert (best is None) == (not known)
    if best is not None:
        assert best in staying
        assert best.score == (min(known) if is_loss else max(known))
    assert len(staying) <= max(1, keep) + 1


def test_the_best_is_of_the_first_set_or_of_the_held_out_loss() -> None:
    rows = [evaluation("first", 0.25, loss=2.0), evaluation("second", 1.0)]
    assert score_of(rows, is_loss=False) == Score("eval/first/reward_mean", 0.25)
    assert score_of(rows, is_loss=True) == Score("eval/first/loss", 2.0)
    assert score_of([], is_loss=False) is None
    assert score_of([evaluation("first", None)], is_loss=False) is None


@pytest.mark.parametrize(
    ("error", "is_last", "ends"),
    [
        (ServiceError("compute.scope: mine:create: save: OSError: no room; mend it"), False, False),
        (ServiceRefused("no"), False, False),
        (ServiceError("compute.scope: mine:create: save: OSError: no room; mend it"), True, True),
        (EngineDied("gone"), False, True),
    ],
)
@pytest.mark.anyio
async def test_one_that_cannot_be_saved_ends_no_run_that_goes_on_unless_its_trainer_is_gone(
    error: ServiceError, is_last: bool, ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of a user's own `save` ended the run; the same from a server was a warning."""

    class Full(RecordingTrainer):
        async def save(self, name: str) -> str:
            raise error

        async def load(self, path: str, *, with_optimizer: bool) -> int:
            return 0

    store: Any = None  # nothing is told to it
    checkpoints = Checkpoints(Full(), store, CheckpointRules(1, 1), Narrator(print))
    with pytest.raises(type(error)) if ends else nullcontext():
        await checkpoints.after(1, Standing(), is_last=is_last, score=None)
    assert [record.levelname for record in caplog.records] == ([] if ends else ["WARNING"])
