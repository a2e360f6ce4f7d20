"""What an update and an evaluation came to, as flat rows of numbers, and the list of their names.

A group counts in the row of the update that trains it, a rejected one in the next row; so in
every row, and over the run, the finished attempts are the trained, the unused and the discarded
ones. A metric that would be a mean over nothing is left out of a row: 0 would be a lie.
Everything here is a pure function of its arguments but `RunMetrics`, which keeps what must be
known over the whole run, and adds rejected groups up until the next row.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeAlias

import numpy as np

from loops_cookbook.attempts import Group, Rejection
from loops_cookbook.learning.datums import Datum
from loops_cookbook.recipes.tally import Labels, Tally, fate_counts, token_counts
from loops_cookbook.records import RolloutRow, spread
from loops_cookbook.services.base import AdamParams, StepResult
from loops_cookbook.tokens import Logprobs

METRICS: tuple[tuple[str, str], ...] = (
    ("reward/mean", "mean reward of the attempts that the update trained on"),
    ("reward/group_std_mean", "mean over the trained groups of their rewards' standard deviation"),
    ("reward/all_mean", "mean reward of every attempt with a reward: the learning curve"),
    ("reward/all_std", "standard deviation of the same rewards"),
    ("reward/all_min", "lowest of the same rewards"),
    ("reward/all_max", "highest of the same rewards"),
    ("groups/usable", "groups that the update trained on"),
    ("groups/no_variance", "groups rejected because their rewards were all the same"),
    ("groups/too_few", "groups rejected because fewer than two attempts could be trained"),
    ("attempts/started", "attempts started since the row before"),
    ("attempts/finished", "attempts of this row's groups: trained + unused + discarded"),
    ("attempts/in_flight", "attempts started in the run and in no row yet"),
    ("attempts/trained", "attempts whose group the update trained on"),
    ("attempts/unused", "attempts with a reward that were not trained on"),
    ("attempts/unused/<reason>", "the same by reason: too_few, no_variance, surplus"),
    ("attempts/discarded", "attempts without a reward"),
    (
        "attempts/discarded/<reason>",
        "the same by reason: cancelled, dropped, failed, no_reply, ungraded, too_long",
    ),
    ("attempts/failed/<ExceptionType>", "attempts discarded as failed, by the exception's type"),
    ("attempts/timed_out", "attempts that a deadline cut"),
    ("attempts/retried", "attempts that needed more than one try"),
    (
        "rollout/<key>",
        "mean of a number or boolean that the Episode recorded, over attempts with a reward",
    ),
    (
        "rollout/<key>/<value>",
        "share of a text that the Episode recorded, over attempts with a reward that recorded "
        "one; the first 16 values of a run have their own share, the rest share `other`",
    ),
    ("tokens/prompt", "prompt tokens sent over all turns"),
    ("tokens/sampled", "tokens that the policy sampled"),
    (
        "tokens/trained",
        "tokens that the policy sampled in the attempts that the update trained on: what "
        "`token_mean` divides by",
    ),
    ("turns/sampled", "turns: replies of the policy"),
    ("turns/cut", 'turns that a token limit ended (`finish_reason` "length")'),
    ("tokens/sequences_per_attempt", "mean number of token rows that a trained attempt became"),
    (
        "producers/<name>/retries",
        "calls of a model of `[producers]` that were sent once more since the row before, because "
        "it was out of reach, busy or out of quota; those of evaluations included",
    ),
    ("policy/version", "policy version that the update published"),
    ("policy/staleness_mean", "mean over the trained groups of the updates since they started"),
    ("policy/staleness_max", "the most of the same"),
    (
        "kl/sample_train_k1",
        "mean of d over the trained tokens with an advantage other than 0, which alone are sent: "
        "d = sampler - trainer logprob",
    ),
    ("kl/sample_train_k2", "mean of d**2 / 2 over the same tokens"),
    ("kl/sample_train_k3", "mean of exp(-d) - 1 + d over the same tokens"),
    ("entropy", "minus the mean logprob of the sampled tokens: an estimate, in nats"),
    ("loss", "loss of the batch, in the units of the configured loss"),
    ("grad_norm", "norm of the gradient before clipping, where the trainer tells it"),
    ("grad_clipped", "1 if the gradient was clipped, else 0, where the trainer tells its norm"),
    ("learning_rate", "learning rate of the update"),
    ("time/update", "seconds from the update before to this one, evaluations left out"),
    ("time/training", "seconds that the update and its publishing took"),
    ("time/sampling", "mean seconds that an attempt sampled, its last try alone"),
    ("time/grading", "mean seconds that an attempt was graded"),
    ("time/waiting", "mean seconds that an attempt waited for a free slot, worker or judge"),
    ("eval/<set>/reward_mean", "mean reward of an evaluation set, over attempts with a reward"),
    ("eval/<set>/solve_rate", "share of the same attempts with a reward of at least solved_at"),
    (
        "eval/<set>/pass_at_<k>",
        "chance that one of k attempts solves a task, mean over tasks with k rewards (unbiased)",
    ),
)
"""Every metric with its meaning. A name in angle brackets stands for several."""

MetricRow: TypeAlias = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """What an update is made of, as it is sent."""

    groups: Sequence[Group]
    rows: Sequence[Sequence[RolloutRow]]
    """Of each group's attempts, as they will be once it is trained."""
    policy_version: int
    """That the update is applied to."""
    attempts_started: int
    """In the run so far, evaluations left out."""
    retries: Mapping[str, int] = field(default_factory=dict[str, int])
    """Calls of each model beside the policy that were sent once more, since the process began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeFacts:
    """What came of an update."""

    datums: Sequence[Datum]
    """The batch, as it was sent."""
    result: StepResult
    adam: AdamParams
    policy_version: int
    """That the update made."""
    training_seconds: float
    update_seconds: float | None
    """Since the update before, evaluations left out; None where a kill came between."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The part of an update's row that is known before it is applied; plain JSON."""

    metrics: MetricRow
    counts: Mapping[str, int]
    """Those of its metrics that add up over a run."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What a resumed run counted before."""

    totals: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of all attempts whose fate is known, those of `rejected` left out."""
    attempts_started: int = 0
    """Those of `rejected` left out that count as started in the next row."""
    counted: Sequence[RolloutRow] = ()
    """Rows in the order in which they were counted, for the texts that have a share of their own;
    those of a draft included."""
    rejected: Sequence[tuple[Sequence[RolloutRow], Rejection]] = ()
    """Groups that count in the next row."""


class RunMetrics:
    """Makes the row of each update, in order, and counts over the whole run."""

    def __init__(self, before: Counted | None = None) -> None:
        before = before or Counted()
        self._totals: Counter[str] = Counter(before.totals)
        self._started = before.attempts_started
        self._retries: Mapping[str, int] = {}
        self._labels = Labels()
        self._labels.remember(before.counted)
        self._tally = Tally(self._labels)
        self._sent_with: Mapping[str, int] = {}
        """Counts of the rejected groups in a draft that is not applied yet."""
        for rows, why in before.rejected:
            self._tally.add(rows, why)

    @property
    def totals(self) -> dict[str, int]:
        """Counts over the run so far, under the names of the metrics that they add up."""
        in_flight = self._started - self._totals["attempts/finished"]
        return {
            "attempts/started": self._started,
            "attempts/in_flight": in_flight,
            **dict(sorted(self._totals.items())),
        }

    def rejected(self, rows: Sequence[RolloutRow], why: Rejection) -> None:
        """Count the attempts of a rejected group in the next row."""
        self._tally.add(rows, why)

    def draft(self, facts: BatchFacts) -> Draft:
        """What the row of an update has before it is applied."""
        tally, self._tally = self._tally, Tally(self._labels)
        self._sent_with = tally.counts
        for rows in facts.rows:
            tally.add(rows, None)
        sequences = (r for group in facts.groups for a in group.graded for r in a.sequences)
        counts = tally.counts | {"tokens/trained": sum(row.trained_tokens for row in sequences)}
        started = facts.attempts_started - self._started
        self._started = facts.attempts_started
        finished = self._totals["attempts/finished"] + counts["attempts/finished"]
        row = _reward_metrics(facts) | tally.rewards() | self._failures_seen() | counts
        row |= {"attempts/started": started, "attempts/in_flight": self._started - finished}
        row |= tally.recorded() | _policy_metrics(facts) | tally.means() | self._retried(facts)
        return Draft({name: float(value) for name, value in row.items()}, counts)

    def applied(self, draft: Draft, facts: OutcomeFacts) -> MetricRow:
        """The row of an update: every metric that it has a value for."""
        self._totals.update(draft.counts)
        self._sent_with = {}
        row = draft.metrics | sample_train_kl(facts.datums, facts.result.logprobs)
        return row | _outcome_metrics(facts)

    def end(self, rows: Iterable[RolloutRow], *, attempts_started: int) -> dict[str, int]:
        """Count what is in no row when the run ends: these attempts, and the groups rejected since
        the last row; the last totals."""
        self._started = attempts_started
        self._totals.update(self._sent_with)
        self._totals.update(self._tally.counts)
        left = tuple(rows)
        self._totals.update(fate_counts(left))
        self._totals.update(token_counts(left))
        return self.totals

    def _retried(self, facts: BatchFacts) -> dict[str, int]:
        before, self._retries = self._retries, facts.retries
        return {
            f"producers/{name}/retries": count - before.get(name, 0)
            for name, count in facts.retries.items()
        }

    def _failures_seen(self) -> dict[str, int]:
        """A kind of failure stays in the rows at 0 once it was seen."""
        return {name: 0 for name in self._totals if name.startswith("attempts/failed/")}


def sample_train_kl(datums: Sequence[Datum], logprobs: Sequence[Logprobs]) -> MetricRow:
    """Three estimates of the divergence from trainer to sampler, over the trained tokens.

    Args:
        datums: a batch with logprobs and advantages.
        logprobs: float32[L] a datum, the trainer's own.

    Source: k1, k2 and k3 of Schulman 2020, "Approximating KL Divergence",
    http://joschu.net/blog/kl-approx.html, with the sampler as the distribution sampled from.
    """
    rows = [
        (datum.logprobs, trainer, datum.advantages)
        for datum, trainer in zip(datums, logprobs, strict=True)
        if datum.logprobs is not None and datum.advantages is not None
    ]
    if not rows:
        return {}
    sampled, trained, advantages = (np.concatenate(stream) for stream in zip(*rows, strict=True))
    counts = advantages != 0
    d = sampled[counts].astype(np.float64) - trained[counts]
    if len(d) == 0:
        return {}
    with np.errstate(over="ignore"):  # a policy far from its sampler: infinite, and written so
        k3 = np.mean(np.expm1(-d) + d)
    return {
        "kl/sample_train_k1": float(np.mean(d)),
        "kl/sample_train_k2": float(np.mean(d**2) / 2),
        "kl/sample_train_k3": float(k3),
    }


def metrics_page() -> str:
    """`docs/reference/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Every update adds one row to `steps.jsonl`, with these keys. A group counts in the row",
        "of the update that trains it, a rejected group in the next row. So in every row, and",
        "over the run, `attempts/finished` is the sum of `attempts/trained`, `attempts/unused`",
        "and `attempts/discarded`. A metric that would be a mean over nothing is left out of a",
        "row. Standard deviations are those of a sample (divided by n - 1). A number that is not",
        "finite is written as null.",
        "",
        "The `eval/*` metrics of an evaluation after an update are added to its row when they are",
        "known. Attempts of evaluations count in them alone.",
        "",
        "| metric | meaning |",
        "| --- | --- |",
        *(f"| `{name}` | {meaning} |" for name, meaning in METRICS),
    ]
    return "\n".join(lines) + "\n"


def _reward_metrics(facts: BatchFacts) -> MetricRow:
    rewards = [[a.reward for a in g.attempts if a.reward is not None] for g in facts.groups]
    trained = [of_group for of_group in rewards if of_group]
    if not trained:
        return {}
    return {
        "reward/mean": fmean([reward for of_group in trained for reward in of_group]),
        "reward/group_std_mean": fmean(map(spread, trained)),
    }


def _policy_metrics(facts: BatchFacts) -> MetricRow:
    row: MetricRow = {}
    ages = [facts.policy_version - group.policy_version for group in facts.groups]
    if ages:
        row["policy/staleness_mean"] = fmean(ages)
        row["policy/staleness_max"] = max(ages)
    if trained := [attempt for group in facts.groups for attempt in group.graded]:
        row["tokens/sequences_per_attempt"] = fmean([len(a.sequences) for a in trained])
    return row


def _outcome_metrics(facts: OutcomeFacts) -> MetricRow:
    row: MetricRow = {
        "policy/version": float(facts.policy_version),
        "loss": facts.result.loss,
        "learning_rate": facts.adam.learning_rate,
    }
    norm = facts.result.metrics.get("grad_norm")
    if norm is not None:
        limit = facts.adam.grad_clip_norm
        row["grad_norm"] = norm
        row["grad_clipped"] = float(0 < limit < norm)
    if facts.update_seconds is not None:
        row["time/update"] = facts.update_seconds
    row["time/training"] = facts.training_seconds
    return row
