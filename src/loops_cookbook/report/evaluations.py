"""What an evaluation alone came to: scores set by set, and two policies side by side, as lines."""

from collections.abc import Sequence

from loops_cookbook.recipes.comparison import Comparison, Difference
from loops_cookbook.records import EvaluationRow
from loops_cookbook.report.words import aligned, between, count, measure, share

_GAP = "  "
"""So narrow that a line is of at most 120 characters, with the name of a run in it."""


def evaluation_lines(rows: Sequence[EvaluationRow], comparisons: Sequence[Comparison]) -> list[str]:
    """A table of the policies for every set, then one for each pair that was compared."""
    told: list[str] = []
    for name in dict.fromkeys(row.set for row in rows):
        told += [*_scored([row for row in rows if row.set == name]), ""]
    if any(row.reward_interval for row in rows):
        told += ["[low, high]: 95 % confidence, over tasks", ""]
    for comparison in comparisons:
        told += [*_compared(comparison), ""]
    return told[:-1]


def _scored(rows: Sequence[EvaluationRow]) -> list[str]:
    """A set, and a line for each policy, without the columns that none of them has."""
    k = max((k for row in rows for k in row.pass_at_k), default=0)
    titles = ["policy", "loss", "reward", "solved", f"pass@{k}", "lost"]
    cells = [_cells(row, k) for row in rows]
    used = [i for i in range(len(titles)) if any(row[i] for row in cells)]
    # Every policy is given the same tasks, as often.
    attempts = max(sum(row.fates.values()) for row in rows)
    each = " each" if len(rows) > 1 else ""
    title = f"{rows[0].set}: {count(attempts, 'attempt')}{each}" if attempts else rows[0].set
    return [title, *aligned([[row[i] for i in used] for row in (titles, *cells)], gap=_GAP)]


def _cells(row: EvaluationRow, k: int) -> list[str]:
    attempts = sum(row.fates.values())
    lost = attempts - row.fates.get("evaluated", 0)
    return [
        row.policy or "",
        "" if row.loss is None else measure(row.loss),
        between(measure, row.reward_mean, row.reward_interval) if attempts else "",
        between(share, row.solve_rate, row.solve_rate_interval) if attempts else "",
        between(share, row.pass_at_k.get(k), row.pass_at_k_intervals.get(k)) if k else "",
        f"{lost:,}" if lost else "",
    ]


def _compared(comparison: Comparison) -> list[str]:
    scores = (
        ("loss", comparison.loss, _signed),
        ("reward", comparison.reward, _signed),
        ("solved", comparison.solved, _points),
    )
    table = [["", "difference", "p", "better", "worse", "equal"]]
    table += [
        [name, between(show, score.difference, score.interval), *_counts(score)]
        for name, score, show in scores
        if score is not None
    ]
    told = [
        f"{comparison.set}: {comparison.second} minus {comparison.first}",
        *aligned(table, gap=_GAP),
    ]
    if comparison.unpaired:
        told.append(
            f"left out: {count(comparison.unpaired, 'task')} without a reward of both policies"
        )
    return told


def _counts(difference: Difference) -> list[str]:
    numbers = (difference.better, difference.worse, difference.equal)
    return [f"{difference.p_value:.2g}", *(f"{number:,}" for number in numbers)]


def _signed(value: float | None) -> str:
    return f"{'+' if value is not None and value > 0 else ''}{measure(value)}"


def _points(value: float | None) -> str:
    return f"{'+' if value is not None and value > 0 else ''}{share(value)}"
