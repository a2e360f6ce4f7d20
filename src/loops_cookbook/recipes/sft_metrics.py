"""What an update of an SFT run came to, as a flat row of numbers, and the list of their names."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from loops_cookbook.recipes.sft_batches import BatchPlan
from loops_cookbook.services.base import AdamParams, StepResult

SFT_METRICS: tuple[tuple[str, str], ...] = (
    ("loss", "mean loss of the batch's trained tokens before the update, in nats"),
    ("rows", "rows in the batch"),
    ("epoch", "how often the run has gone through the rows, this batch included"),
    ("tokens/read", "tokens in the batch, those that are trained on included"),
    ("tokens/trained", "tokens that are trained on"),
    ("grad_norm", "norm of the gradient before clipping, where the trainer tells it"),
    ("grad_clipped", "1 if the gradient was clipped, else 0, where the trainer tells its norm"),
    ("learning_rate", "learning rate of the update"),
    ("time/update", "seconds from the update before to this one, evaluations left out"),
    ("time/training", "seconds that the update took"),
    ("eval/<set>/loss", "mean loss of the held-out rows' trained tokens after the update, in nats"),
    (
        "eval/<set>/reward_mean",
        "share of the samples that have the content and the tool calls of the held-out message",
    ),
    ("eval/<set>/solve_rate", "the same"),
)
"""Every metric with its meaning. A name in angle brackets stands for several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTUpdateFacts:
    """What one update was made of, and what came of it."""

    batch: BatchPlan
    of_rows: int
    """Rows of an epoch."""
    read_tokens: int
    trained_tokens: int
    result: StepResult
    adam: AdamParams
    update_seconds: float
    """Since the update before, evaluations and checkpoints left out."""
    training_seconds: float


class SFTMetrics:
    """Makes the row of each update, in order, and counts over the whole run."""

    def __init__(self, totals: Mapping[str, int] | None = None) -> None:
        self._totals: Counter[str] = Counter(totals or {})

    @property
    def totals(self) -> dict[str, int]:
        """Counts over the run so far, under the names of the metrics that they add up."""
        return dict(self._totals)

    def update(self, facts: SFTUpdateFacts) -> dict[str, float]:
        """The row of an update."""
        counts = {
            "rows": len(facts.batch.rows),
            "tokens/read": facts.read_tokens,
            "tokens/trained": facts.trained_tokens,
        }
        self._totals.update(counts)
        row: dict[str, float] = {
            "loss": facts.result.loss / facts.trained_tokens,
            **counts,
            "epoch": facts.batch.epoch + facts.batch.seen / facts.of_rows,
            "learning_rate": facts.adam.learning_rate,
            "time/update": facts.update_seconds,
            "time/training": facts.training_seconds,
        }
        norm = facts.result.metrics.get("grad_norm")
        if norm is not None:
            row["grad_norm"] = norm
            row["grad_clipped"] = float(0 < facts.adam.grad_clip_norm < norm)
        return {name: float(value) for name, value in row.items()}


def sft_metrics_section() -> str:
    """The part of `docs/reference/metrics.md` on supervised fine-tuning."""
    lines = [
        "",
        "## Supervised fine-tuning",
        "",
        'The rows of a run with `recipe = "sft"` have these instead.',
        "",
        "| metric | meaning |",
        "| --- | --- |",
        *(f"| `{name}` | {meaning} |" for name, meaning in SFT_METRICS),
    ]
    return "\n".join(lines) + "\n"
