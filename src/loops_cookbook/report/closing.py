"""What a run came to, in the few lines that end it: curve, scores, attempts, folder, what next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from loops_cookbook.records import EvaluationRow, RunStatus
from loops_cookbook.report.chart import chart, smoothed
from loops_cookbook.report.words import aligned, count, duration, measure, share

TITLES: Mapping[str, str] = {
    "reward/all_mean": "mean reward of all graded attempts",
    "loss": "mean loss of the trained tokens",
}
"""What a chart's metric is called over it."""

_WIDEST = 100


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The evaluations of a run that came to their end: one of each set and time, or policy."""

    evaluations: int = 0
    attempts: int = 0
    unscored: int = 0
    """Those of them without a reward."""

    def with_(self, row: EvaluationRow) -> Self:
        """These and one more."""
        attempts = sum(row.fates.values())
        unscored = attempts - row.fates.get("evaluated", 0)
        return type(self)(self.evaluations + 1, self.attempts + attempts, self.unscored + unscored)

    def __str__(self) -> str:
        lost = f" ({self.unscored:,} without a reward)" if self.unscored else ""
        return f"{self.attempts:,} in {count(self.evaluations, 'evaluation')}{lost}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """All that the closing lines tell of."""

    status: RunStatus
    """Why it is that is no part of the answer: the command says it, as an error, on stderr."""
    folder: Path
    updates: int
    seconds: float
    """Of this life, where the run was resumed."""
    curve: Sequence[tuple[int, float]]
    """The metric `charted` by update."""
    evaluations: Mapping[str, tuple[EvaluationRow, EvaluationRow]]
    """The first and the last of each set, which may be one and the same."""
    counts: Mapping[str, int]
    """`StepRow.totals` at the end."""
    evaluated: Evaluated = Evaluated()
    """Their attempts are in none of `counts`."""
    is_evaluation: bool = False
    """Whether nothing was to be trained: it is of `loops eval`."""
    charted: str = "reward/all_mean"
    """What `curve` is of, one of `TITLES`."""
    is_resumed: bool = False
    onward: str | None = None
    """How to go on from here; None: no way."""

    @property
    def resumed_by(self) -> str | None:
        """What resumes a run that was interrupted: the command says it last, as an error."""
        return self.onward if self.status == "interrupted" else None

    def lines(self, *, width: int, unicode: bool = True) -> list[str]:
        """At most `width` characters each, those with the run's folder in them apart."""
        told = [self._end(), ""]
        curve = smoothed(self.curve)
        is_curve = len(curve.values) > 1  # one value is in the line of its update
        if is_curve and (drawn := chart(curve, width=min(width, _WIDEST), unicode=unicode)):
            means = f", moving mean over {curve.window} updates" if curve.window > 1 else ""
            told += [f"{TITLES[self.charted]}, by update{means}", *drawn, ""]
        if self.evaluations:
            told += [*_scores(self.evaluations, "→" if unicode else "->"), ""]
        parts = [_attempts(self.counts)] if self.counts.get("attempts/finished") else []
        parts += [str(self.evaluated)] if self.evaluated.attempts else []
        told += [f"attempts: {'; besides, '.join(parts)}"] if parts else []
        onward = [] if self.onward is None or self.resumed_by is not None else [self.onward]
        return [*told, f"run: {self.folder}", *onward]

    def _end(self) -> str:
        since = " since it was resumed" if self.is_resumed else ""
        took = f"{duration(self.seconds)}{since}"
        of = (self.evaluated.evaluations, "evaluation")
        number, noun = of if self.is_evaluation else (self.updates, "update")
        return f"{self.status} after {count(number, noun)}, {took}"


def _scores(
    evaluations: Mapping[str, tuple[EvaluationRow, EvaluationRow]], arrow: str
) -> list[str]:
    """A table: a line for each set, before and after."""
    has_loss = any(last.loss is not None for _, last in evaluations.values())
    losses = ["loss"] if has_loss else []
    table = [["evaluation", "updates", *losses, "reward", "solved", "pass@k"]]
    for name, (first, last) in evaluations.items():
        pairs = [
            (str(first.update), str(last.update)),
            *([(measure(first.loss), measure(last.loss))] if has_loss else []),
            (measure(first.reward_mean), measure(last.reward_mean)),
            (share(first.solve_rate), share(last.solve_rate)),
        ]
        shared = sorted(first.pass_at_k.keys() & last.pass_at_k.keys())
        if shared:
            k = shared[-1]
            pairs.append((share(first.pass_at_k[k]), share(last.pass_at_k[k])))
        single = first is last
        cells = [after if single else f"{before} {arrow} {after}" for before, after in pairs]
        if shared:
            cells[-1] += f" (k = {shared[-1]})"
        table.append([name, *cells])
    columns = max(map(len, table[1:]))
    return aligned([row[:columns] for row in table])


def _attempts(counts: Mapping[str, int]) -> str:
    parts = [f"{counts.get('attempts/trained', 0):,} trained"]
    for kind in ("unused", "discarded"):
        prefix = f"attempts/{kind}/"
        reasons = {k.removeprefix(prefix): n for k, n in counts.items() if k.startswith(prefix)}
        told = ", ".join(f"{reason} {n:,}" for reason, n in reasons.items() if n)
        parts.append(
            f"{counts.get(f'attempts/{kind}', 0):,} {kind}" + (f" ({told})" if told else "")
        )
    cut = counts.get("attempts/timed_out", 0)
    clock = f"; {cut:,} cut by their clock" if cut else ""
    return f"{counts.get('attempts/finished', 0):,}: {', '.join(parts)}{clock}"
