"""What the groups of a row add up to: each is added when its fate is known, and none is kept.

A run may reject thousands of groups before a batch is full, each with all its tokens, and the row
that counts them needs sums alone. What would be a mean over nothing is left out.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from loops_cookbook.attempts import Fate, Group, Rejection, Scalar
from loops_cookbook.records import RolloutRow

_OWN_SHARES = 16
_LONGEST_LABEL = 60
_KINDS = ("trained", "unused", "discarded")


def rollout_rows(group: Group, rewarded: Fate) -> list[RolloutRow]:
    """The rows of a group's attempts, once it is known what came of those with a reward."""
    return [RolloutRow.of(attempt, attempt.fate(rewarded)) for attempt in group.attempts]


def fate_counts(rows: Iterable[RolloutRow]) -> Counter[str]:
    """How many attempts came to each fate, under the names of the metrics."""
    rows = tuple(rows)
    counts = Counter(
        f"attempts/failed/{row.exception or 'unknown'}" for row in rows if row.fate is Fate.FAILED
    )
    counts["attempts/timed_out"] = sum(row.flags.timed_out for row in rows)
    counts["attempts/retried"] = sum(row.flags.retried for row in rows)
    for fate, number in Counter(row.fate for row in rows).items():
        counts["attempts/finished"] += number
        counts[f"attempts/{fate.kind}"] += number
        if fate.kind != fate.value:
            counts[f"attempts/{fate}"] += number
    return counts


def token_counts(rows: Sequence[RolloutRow]) -> Counter[str]:
    """How many tokens attempts sent and sampled, and in how many turns, as metrics call them."""
    return Counter(
        {
            "tokens/prompt": sum(row.prompt_tokens for row in rows),
            "tokens/sampled": sum(row.sampled_tokens for row in rows),
            "turns/sampled": sum(row.turns for row in rows),
            "turns/cut": sum(row.cut_turns for row in rows),
        }
    )


ALWAYS = (
    "groups/usable",
    "groups/no_variance",
    "groups/too_few",
    "attempts/finished",
    *(f"attempts/{kind}" for kind in _KINDS),
    "attempts/timed_out",
    "attempts/retried",
    *(f"attempts/{fate}" for fate in Fate if "/" in fate),
    "tokens/prompt",
    "tokens/sampled",
    "turns/sampled",
    "turns/cut",
)
"""The counts that every row has, also at 0."""


def told_of_cuts(
    turns: float, cut: float, *, max_tokens: int, enough: bool, limit: str = "sampling.max_tokens"
) -> str | None:
    """What to say of replies of which half, or more, were cut; None of others.

    Where one token is all that is asked for, and rewards show that it is enough, they are meant to
    be cut.

    Args:
        turns: how many replies.
        cut: how many of them a token limit ended.
        max_tokens: what is asked for, a reply.
        enough: whether a task was solved, or rewards differ.
        limit: the key that has it.
    """
    if not cut or cut < turns / 2 or (max_tokens == 1 and enough):
        return None
    return (
        f"{cut:,.0f} of {turns:,.0f} replies were cut at a token limit: where that cuts off what "
        f"is graded, raise the limit ({limit}, sampling.max_attempt_tokens, model.max_seq_len)"
    )


class Tally:
    """The sums of one row.

    Args:
        labels: the texts that have a share of their own, remembered from row to row.
    """

    def __init__(self, labels: "Labels") -> None:
        self._counts = Counter(dict.fromkeys(ALWAYS, 0))
        self._rewards = Moments()
        self._logprobs = Moments()
        self._times = {name: Moments() for name in ("sampling", "grading", "waiting")}
        self._numbers: dict[str, Moments] = defaultdict(Moments)
        self._texts: dict[str, Counter[str]] = defaultdict(Counter)
        self._labels = labels

    def add(self, rows: Sequence[RolloutRow], rejection: Rejection | None) -> None:
        """Take in the attempts of a group that was trained, or rejected."""
        self._counts["groups/usable" if rejection is None else f"groups/{rejection.reason}"] += 1
        self._counts.update(fate_counts(rows))
        self._counts.update(token_counts(rows))
        for name, time in self._times.items():
            time.add_sum(sum(getattr(row.timing, name) for row in rows), len(rows))
        for row in rows:
            self._add_row(row)

    @property
    def counts(self) -> dict[str, int]:
        """The metrics that add up over a run."""
        return dict(self._counts)

    def rewards(self) -> dict[str, float]:
        """`reward/all_...`."""
        all_of_them = self._rewards
        if not all_of_them.count:
            return {}
        return {
            "reward/all_mean": all_of_them.mean,
            "reward/all_std": all_of_them.std,
            "reward/all_min": all_of_them.least,
            "reward/all_max": all_of_them.most,
        }

    def recorded(self) -> dict[str, float]:
        """`rollout/...`: what the Episodes recorded."""
        row = {f"rollout/{key}": values.mean for key, values in sorted(self._numbers.items())}
        for key in sorted(self._texts):
            counts = self._texts[key]
            for label in dict.fromkeys([*self._labels.own(key), *counts]):
                row[f"rollout/{key}/{label}"] = counts[label] / counts.total()
        return row

    def means(self) -> dict[str, float]:
        """`entropy`, and the times of the attempts."""
        row = {f"time/{name}": time.mean for name, time in self._times.items() if time.count}
        if self._logprobs.count:
            row["entropy"] = -self._logprobs.mean
        return row

    def _add_row(self, row: RolloutRow) -> None:
        if row.logprob_mean is not None:
            self._logprobs.add_sum(row.logprob_mean * row.sampled_tokens, row.sampled_tokens)
        if row.reward is not None:
            self._rewards.add(row.reward)
            self._record(row.metadata)

    def _record(self, metadata: Mapping[str, Scalar]) -> None:
        for key, value in metadata.items():
            if isinstance(value, str):
                label = self._labels.label(key, value)
                self._texts[key][label] += 1
            elif (number := _as_float(value)) is not None:
                self._numbers[key].add_sum(number, 1)


def _as_float(value: float) -> float | None:
    """A number that a mean can hold; None for others, which a runtime may record as well."""
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):  # a huge int, or a date of numpy
        return None
    return number if math.isfinite(number) else None


class Moments:
    """Count, mean, spread and range of numbers that come one by one."""

    def __init__(self) -> None:
        self.count = 0
        self.least = math.inf
        self.most = -math.inf
        self._sum = 0.0
        self._mean = 0.0
        self._squares = 0.0
        """Sum of squared distances from the mean. Source: Welford 1962."""

    def add(self, value: float) -> None:
        """Take in one number."""
        self.count += 1
        self._sum += value
        away = value - self._mean
        self._mean += away / self.count
        self._squares += away * (value - self._mean)
        self.least, self.most = min(self.least, value), max(self.most, value)

    def add_sum(self, total: float, count: int) -> None:
        """Take in numbers by their sum; then only the mean can be asked for."""
        self.count += count
        self._sum += total

    @property
    def mean(self) -> float:
        """Of all numbers; there must be one."""
        return self._sum / self.count

    @property
    def std(self) -> float:
        """The sample standard deviation (divided by n - 1); 0 for a single number."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0


class Labels:
    """Which of the texts that Episodes record have a share of their own, over a whole run."""

    def __init__(self) -> None:
        self._own: dict[str, list[str]] = {}

    def remember(self, rows: Iterable[RolloutRow]) -> None:
        """Take in what earlier rows recorded, in the order in which it came up."""
        for row in rows:
            if row.reward is not None:
                for key, value in row.metadata.items():
                    if isinstance(value, str):
                        self.label(key, value)

    def label(self, key: str, value: str) -> str:
        """The text under which a value counts: its own, or `other`."""
        label = " ".join(value.split())[:_LONGEST_LABEL] or "empty"
        own = self._own.setdefault(key, [])
        if label not in own and len(own) < _OWN_SHARES:
            own.append(label)
        return label if label in own else "other"

    def own(self, key: str) -> tuple[str, ...]:
        """Those that have one, in the order in which they came up."""
        return tuple(self._own.get(key, ()))
