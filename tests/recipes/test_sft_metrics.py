"""A row of metrics says what an update was made of; every name is on the page."""

import pytest

from loops_cookbook.recipes.sft_batches import BatchPlan
from loops_cookbook.recipes.sft_metrics import (
    SFT_METRICS,
    SFTMetrics,
    SFTUpdateFacts,
    sft_metrics_section,
)
from loops_cookbook.services.base import AdamParams, StepResult


def facts(**result: float) -> SFTUpdateFacts:
    return SFTUpdateFacts(
        batch=BatchPlan(epoch=1, rows=(4, 2), seen=2),
        of_rows=8,
        read_tokens=40,
        trained_tokens=10,
        result=StepResult(loss=25.0, logprobs=(), metrics=result),
        adam=AdamParams(learning_rate=0.1),
        update_seconds=2.0,
        training_seconds=1.5,
    )


def test_the_loss_is_told_per_trained_token() -> None:
    row = SFTMetrics().update(facts())
    assert row["loss"] == 2.5
    assert row["epoch"] == 1.25
    assert (row["rows"], row["tokens/read"], row["tokens/trained"]) == (2, 40, 10)


@pytest.mark.parametrize(("norm", "clipped"), [(0.5, 0.0), (1.5, 1.0)])
def test_whether_the_gradient_was_clipped_follows_from_its_norm(
    norm: float, clipped: float
) -> None:
    assert SFTMetrics().update(facts(grad_norm=norm))["grad_clipped"] == clipped
    assert "grad_clipped" not in SFTMetrics().update(facts())


def test_counts_add_up_over_the_run() -> None:
    metrics = SFTMetrics()
    metrics.update(facts())
    metrics.update(facts())
    assert metrics.totals == {"rows": 4, "tokens/read": 80, "tokens/trained": 20}


def test_every_metric_of_a_row_is_on_the_page() -> None:
    named = {name for name, _ in SFT_METRICS}
    assert set(SFTMetrics().update(facts(grad_norm=1.0))) <= named
    assert all(f"| `{name}` |" in sft_metrics_section() for name in named)
