"""An update that is kept is sent again as it was sent, to the last bit, and recorded likewise."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.rundir.test_past import row

from loops_cookbook.attempts import Fate, Flags, Timing
from loops_cookbook.learning.datums import Datum
from loops_cookbook.recipes.metrics import Draft
from loops_cookbook.recipes.sent import SentUpdate, from_kept, to_keep
from loops_cookbook.rundir.updates import UpdateStore
from loops_cookbook.services.base import AdamParams, LossSpec
from loops_cookbook.tokens import ids_of, logprobs_of

ADAM = AdamParams(
    learning_rate=1e-5, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.01, grad_clip_norm=1.0
)
RATES = st.floats(min_value=0, allow_infinity=False, exclude_min=True)
DATUM = Datum(
    input_ids=ids_of([1, 2]),
    target_ids=ids_of([2, 3]),
    logprobs=logprobs_of([0.0, -0.1]),
    advantages=np.array([0.0, 0.3], np.float32),
)
ROW = replace(
    row(4, 1, Fate.TRAINED, "4-1.json"),
    reward=0.1 + 0.2,
    flags=Flags(timed_out=True),
    policy_versions=(3, 4),
    metadata={"why": "späte Antwort", "share": 1 / 3, "done": True},
    timing=Timing(sampling=1.5),
)


def sent(rate: float = 1e-5, **metrics: float) -> SentUpdate:
    return SentUpdate(
        update=7,
        key="update-7-life2",
        datums=(DATUM,),
        loss=LossSpec("cispo", {"clip_high": 0.2, "is_on": True}),
        adam=replace(ADAM, learning_rate=rate),
        groups=(4, 9),
        rows=(ROW,),
        draft=Draft(metrics, {"attempts/finished": 16}),
    )


def test_an_update_is_the_same_once_it_was_on_the_disk(tmp_path: Path) -> None:
    store, update = UpdateStore(tmp_path / "updates"), sent(**{"reward/mean": 1 / 3})
    store.keep(to_keep(update))
    back = from_kept(store.read(7))
    (datum,) = back.datums
    assert datum.advantages is not None
    assert datum.advantages.tobytes() == np.array([0.0, 0.3], np.float32).tobytes()
    assert (back.update, back.key, back.groups) == (7, "update-7-life2", (4, 9))
    assert (back.loss, back.adam, back.draft) == (update.loss, update.adam, update.draft)
    (told,) = back.rows
    assert told == ROW


@given(RATES)
def test_no_learning_rate_is_rounded(rate: float) -> None:
    """A resumed run would have other weights than one that was never stopped."""
    assert from_kept(to_keep(sent(rate))).adam.learning_rate == rate


def test_a_number_that_is_none_is_still_none_in_what_comes_back(tmp_path: Path) -> None:
    """JSON has no NaN, and a row with null in its place would be refused."""
    store = UpdateStore(tmp_path / "updates")
    store.keep(to_keep(replace(sent(), rows=(replace(ROW, metadata={"score": math.nan}),))))
    (told,) = from_kept(store.read(7)).rows
    assert isinstance(told.metadata["score"], float)
    assert math.isnan(told.metadata["score"])


def test_an_update_without_a_draft_has_an_empty_one() -> None:
    kept = to_keep(replace(sent(), draft=None, rows=(), groups=()))
    assert from_kept(kept).draft == Draft({}, {})
