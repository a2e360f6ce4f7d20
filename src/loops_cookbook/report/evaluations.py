"""What an evaluation alone came to: its scores, and two policies side by side, as lines."""

from collections.abc import Sequence

from loops_cookbook.recipes.comparison import Comparison, Difference
from loops_cookbook.records import EvaluationRow
from loops_cookbook.report.words import aligned, between, count, measure, share


def evaluation_lines(rows: Sequence[EvaluationRow], comparisons: Sequence[Comparison]) -> list[str]:
    """A table of every set and policy, then one for each pair that was compared."""
    told = aligned(_scores(rows))
    if any(row.reward_interval for row in rows):
        told += ["", "[low, high]: 95 % confidence, over tasks"]
    for comparison in comparisons:
        told += ["", *_compared(comparison)]
    return told


def _scores(rows: Sequence[EvaluationRow]) -> list[list[str]]:
    """A line for each, without the columns that none of them has."""
    titles = ["evaluation", "policy", "loss", "reward", "solved", "pass@k", "attempts", "lost"]
    cells = [_cells(row) for row in rows]
    used = [i for i in range(len(titles)) if any(row[i] for row in cells)]
    return [[row[i] for i in used] for row in (titles, *cells)]


def _cells(row: EvaluationRow) -> list[str]:
    attempts = sum(row.fates.values())
    lost = attempts - row.fates.get("evaluated", 0)
    k = max(row.pass_at_k, default=0)
    passed = between(share, row.pass_at_k.get(k), row.pass_at_k_intervals.get(k))
    return [
        row.set,
        row.policy or "",
        "" if row.loss is None else measure(row.loss),
        between(measure, row.reward_mean, row.reward_interval) if attempts else "",
        between(share, row.solve_rate, row.solve_rate_interval) if attempts else "",
        f"{passed} (k = {k})" if k else "",
        f"{attempts:,}" if attempts else "",
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
    told = [f"{comparison.set}: {comparison.second} minus {comparison.first}", *aligned(table)]
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
