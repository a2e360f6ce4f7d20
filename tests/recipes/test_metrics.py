"""Every attempt counts once, no mean is over nothing, and the list of metrics is whole."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.attempts import (
    Attempt,
    Discarded,
    Fate,
    Flags,
    Group,
    Rejection,
    Scalar,
    Timing,
)
from loops_cookbook.learning.datums import Datum, ScoredAttempt, datums
from loops_cookbook.recipes.metrics import (
    METRICS,
    BatchFacts,
    OutcomeFacts,
    RunMetrics,
    metrics_page,
    sample_train_kl,
)
from loops_cookbook.recipes.scores import EvaluationFacts, evaluation_row
from loops_cookbook.recipes.tally import rollout_rows
from loops_cookbook.records import RolloutRow
from loops_cookbook.services.base import AdamParams, StepResult
from loops_cookbook.tokens import SampledTokens, Trajectory, Turn, ids_of, logprobs_of, sequences


def attempt(
    reward: float | None, *, why: Fate = Fate.FAILED, index: int = 0, **metadata: Scalar
) -> Attempt:
    sampled = SampledTokens(ids_of([5, 6]), logprobs_of([-0.5, -1.5]), "stop", 3)
    trajectory = Trajectory((Turn(ids_of([1, 2, 3]), sampled),))
    return Attempt(
        group=0,
        index=index,
        task="orders",
        reward=reward,
        discarded=None if reward is not None else Discarded(why, "why", "OSError"),
        trajectory=trajectory,
        sequences=sequences(trajectory),
        metadata=metadata,
        timing=Timing(sampling=2.0, grading=1.0, waiting=0.5),
    )


def group(*rewards: float | None, version: int = 3) -> Group:
    attempts = tuple(attempt(reward, index=i) for i, reward in enumerate(rewards))
    return Group(0, "orders", 0, "tasks.jsonl:1", 0, version, attempts)


@dataclass(frozen=True)
class Facts:
    batch: BatchFacts
    outcome: OutcomeFacts


def facts(*trained: Group, started: int = 0) -> Facts:
    batch = [
        datum
        for group in trained
        for attempt in group.graded
        for datum in datums([ScoredAttempt(attempt.sequences, 1.0)])
    ]
    logprobs = [d.logprobs for d in batch if d.logprobs is not None]
    return Facts(
        BatchFacts(
            groups=trained,
            rows=[rows_of(group, None) for group in trained],
            policy_version=4,
            attempts_started=started,
        ),
        OutcomeFacts(
            datums=batch,
            result=StepResult(loss=-0.25, logprobs=tuple(logprobs), metrics={"grad_norm": 0.5}),
            adam=AdamParams(learning_rate=1e-4),
            policy_version=5,
            update_seconds=10.0,
            training_seconds=3.0,
        ),
    )


def rows_of(group: Group, why: Rejection | None) -> list[RolloutRow]:
    return rollout_rows(group, Fate.TRAINED if why is None else why.fate)


def update(metrics: RunMetrics, made: Facts) -> dict[str, float]:
    return metrics.applied(metrics.draft(made.batch), made.outcome)


def after(*rejected: tuple[Group, Rejection]) -> RunMetrics:
    """The metrics of a run that rejected these groups."""
    metrics = RunMetrics()
    for each, why in rejected:
        metrics.rejected(rows_of(each, why), why)
    return metrics


def with_metadata(values: Sequence[Mapping[str, Scalar]], *, fails: int = 0) -> Facts:
    made = [attempt(float(i % 2), **value) for i, value in enumerate(values)]
    made += [attempt(None, score=100.0, ended="failed") for _ in range(fails)]
    return facts(Group(0, "orders", 0, "tasks.jsonl:1", 0, 3, tuple(made)))


rewards = st.lists(st.none() | st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4)
rejections = st.builds(Rejection, st.sampled_from(["no_variance", "too_few"]))


@given(
    rows=st.lists(
        st.tuples(
            st.lists(rewards, max_size=3), st.lists(st.tuples(rewards, rejections), max_size=3)
        ),
        max_size=4,
    ),
    left=st.lists(rewards, max_size=3),
    ahead=st.integers(0, 20),
)
def test_finished_attempts_are_trained_unused_or_discarded_in_every_row_and_over_the_run(
    rows: list[tuple[list[list[float | None]], list[tuple[list[float | None], Rejection]]]],
    left: list[list[float | None]],
    ahead: int,
) -> None:
    metrics = RunMetrics()
    finished = started = 0
    for trained, rejected in rows:
        made = [group(*each) for each in trained]
        refused = [(group(*each), why) for each, why in rejected]
        in_this_row = sum(len(g.attempts) for g in [*made, *(g for g, _ in refused)])
        finished += in_this_row
        for each, why in refused:
            metrics.rejected(rows_of(each, why), why)
        row = update(metrics, facts(*made, started=finished + ahead))
        started += row["attempts/started"]

        assert row["attempts/finished"] == in_this_row
        assert_sums(row)
        assert started == finished + row["attempts/in_flight"]
        assert_sums(metrics.totals)
        assert metrics.totals["attempts/finished"] == finished
    surplus = [row for each in left for row in rollout_rows(group(*each), Fate.SURPLUS)]

    why = Rejection("no_variance")
    metrics.rejected(rows_of(group(1.0), why), why)
    finished += 1

    totals = metrics.end(surplus, attempts_started=finished + len(surplus))

    assert_sums(totals)
    assert totals["attempts/finished"] == totals["attempts/started"] == finished + len(surplus)
    assert totals["attempts/in_flight"] == 0


def test_tokens_of_attempts_that_the_end_left_over_are_counted() -> None:
    """A run that was stopped told fewer than its rows, and more once it had been resumed."""
    metrics = RunMetrics()
    rows = rollout_rows(group(1.0, 0.0), Fate.SURPLUS)
    totals = metrics.end(rows, attempts_started=2)
    assert totals["tokens/sampled"] == sum(row.sampled_tokens for row in rows) > 0


def assert_sums(row: Mapping[str, float]) -> None:
    kinds = ("trained", "unused", "discarded")
    assert row.get("attempts/finished", 0) == sum(row.get(f"attempts/{kind}", 0) for kind in kinds)
    for kind in kinds[1:]:
        parts = [value for key, value in row.items() if key.startswith(f"attempts/{kind}/")]
        assert row.get(f"attempts/{kind}", 0) == sum(parts)
    failed = [value for key, value in row.items() if key.startswith("attempts/failed/")]
    assert row.get("attempts/discarded/failed", 0) == sum(failed)


def test_a_failure_is_counted_by_its_type_and_enters_no_mean() -> None:
    """A broken sandbox must not become a reward of 0."""
    row = update(RunMetrics(), facts(group(0.0, 0.0, 1.0, None, None, None, None, None)))

    assert row["attempts/failed/OSError"] == 5
    assert row["reward/mean"] == pytest.approx(1 / 3)
    assert row["reward/all_mean"] == pytest.approx(1 / 3)


def test_a_type_of_failure_stays_in_the_rows_once_seen() -> None:
    metrics = RunMetrics()
    update(metrics, facts(group(0.0, 1.0, None)))

    assert update(metrics, facts(group(0.0, 1.0)))["attempts/failed/OSError"] == 0


def test_the_learning_curve_includes_rejected_groups_and_the_trained_mean_does_not() -> None:
    row = update(after((group(1.0, 1.0), Rejection("no_variance"))), facts(group(0.0, 1.0)))

    assert row["reward/mean"] == 0.5
    assert row["reward/all_mean"] == 0.75
    assert (row["reward/all_min"], row["reward/all_max"]) == (0.0, 1.0)
    assert row["reward/all_std"] == pytest.approx(0.5)
    assert row["reward/group_std_mean"] == pytest.approx(0.5**0.5)
    assert (row["groups/usable"], row["groups/no_variance"], row["groups/too_few"]) == (1, 1, 0)


def test_a_row_without_a_reward_leaves_its_means_out() -> None:
    """An empty mean must not be a crash, nor a 0."""
    row = update(after((group(None, None), Rejection("too_few"))), facts())

    assert not [name for name in row if name.startswith(("reward/", "kl/", "policy/staleness"))]
    assert row["attempts/discarded"] == 2


def test_staleness_counts_updates_between_a_groups_start_and_its_training() -> None:
    row = update(RunMetrics(), facts(group(0.0, 1.0, version=4), group(0.0, 1.0, version=1)))

    assert (row["policy/staleness_mean"], row["policy/staleness_max"]) == (1.5, 3)
    assert row["policy/version"] == 5


def test_tokens_are_counted_over_all_groups_of_the_row_and_trained_ones_in_the_batch() -> None:
    row = update(after((group(1.0, 1.0), Rejection("no_variance"))), facts(group(0.0, 1.0)))

    assert (row["tokens/prompt"], row["tokens/sampled"], row["tokens/trained"]) == (12, 8, 4)
    assert row["tokens/sequences_per_attempt"] == 1
    assert row["entropy"] == 1.0


def test_tokens_of_an_attempt_at_the_mean_are_trained_though_no_datum_is_sent() -> None:
    """`token_mean` divided by them and `tokens/trained` left them out."""
    made = facts(group(0.0, 0.5, 1.0))
    row = update(
        RunMetrics(),
        replace(
            made,
            outcome=replace(
                made.outcome,
                datums=[made.outcome.datums[0], made.outcome.datums[2]],
                result=replace(made.outcome.result, logprobs=made.outcome.result.logprobs[::2]),
            ),
        ),
    )

    assert row["tokens/trained"] == 6


@pytest.mark.parametrize(("limit", "clipped"), [(0.4, 1), (0.5, 0), (0.0, 0)])
def test_a_gradient_is_clipped_when_its_norm_is_over_the_limit(limit: float, clipped: int) -> None:
    made = facts(group(0.0, 1.0))
    clips = replace(made.outcome, adam=AdamParams(1e-4, grad_clip_norm=limit))

    assert update(RunMetrics(), replace(made, outcome=clips))["grad_clipped"] == clipped


def test_a_trainer_that_tells_no_norm_leaves_it_out() -> None:
    made = facts(group(0.0, 1.0))
    silent = replace(made.outcome, result=replace(made.outcome.result, metrics={}))

    told = update(RunMetrics(), replace(made, outcome=silent))
    assert not {"grad_norm", "grad_clipped"} & told.keys()


def test_times_are_means_over_attempts_or_the_loops_own() -> None:
    row = update(RunMetrics(), facts(group(0.0, None)))

    assert {name: value for name, value in row.items() if name.startswith("time/")} == {
        "time/update": 10.0,
        "time/training": 3.0,
        "time/sampling": 2.0,
        "time/grading": 1.0,
        "time/waiting": 0.5,
    }


def datum(sampler: Sequence[float], advantages: Sequence[float]) -> Datum:
    ids = ids_of(range(len(sampler)))
    return Datum(ids, ids, logprobs_of(sampler), np.array(advantages, np.float32))


def test_kl_is_over_the_trained_positions_alone() -> None:
    batch = [datum([0.0, -1.0, -2.0], [0.0, 0.5, 0.5]), datum([0.0, -3.0], [0.0, -0.5])]
    trainer = [logprobs_of([np.nan, -1.5, -2.0]), logprobs_of([9.0, -2.0])]
    d = np.array([0.5, 0.0, -1.0])

    assert sample_train_kl(batch, trainer) == pytest.approx(
        {
            "kl/sample_train_k1": d.mean(),
            "kl/sample_train_k2": (d**2 / 2).mean(),
            "kl/sample_train_k3": (np.exp(-d) - 1 + d).mean(),
        }
    )


def test_kl_of_a_policy_far_from_its_sampler_is_infinite_without_a_warning() -> None:
    row = sample_train_kl([datum([-2000.0], [1.0])], [logprobs_of([0.0])])

    assert row["kl/sample_train_k3"] == math.inf


def test_kl_needs_the_trainers_logprobs_of_every_datum() -> None:
    with pytest.raises(ValueError, match="zip"):
        sample_train_kl([datum([-1.0], [1.0])], [])


def test_numbers_that_episodes_record_become_means_over_attempts_with_a_reward() -> None:
    row = update(
        RunMetrics(),
        with_metadata([{"score": 1, "clean": True}, {"score": 2.0, "clean": False}, {}], fails=1),
    )

    assert row["rollout/score"] == 1.5
    assert row["rollout/clean"] == 0.5


def test_a_recorded_number_that_is_not_finite_is_left_out_of_its_mean() -> None:
    row = update(RunMetrics(), with_metadata([{"x": math.nan, "y": math.inf}, {"x": 1.0}]))

    assert row["rollout/x"] == 1.0
    assert "rollout/y" not in row


def test_texts_that_episodes_record_become_shares_that_stay_once_seen() -> None:
    metrics = RunMetrics()
    first = update(metrics, with_metadata([{"ended": "done"}, {"ended": "limit"}, {}], fails=1))
    second = update(metrics, with_metadata([{"ended": " "}, {"ended": "done"}]))

    assert (first["rollout/ended/done"], first["rollout/ended/limit"]) == (0.5, 0.5)
    assert second["rollout/ended/limit"] == 0.0
    assert second["rollout/ended/empty"] == 0.5


def test_only_sixteen_texts_of_a_run_have_their_own_share() -> None:
    metrics = RunMetrics()
    update(metrics, with_metadata([{"ended": f"early {i}"} for i in range(10)]))
    row = update(metrics, with_metadata([{"ended": f"late {i}"} for i in range(10)]))

    shares = {name: value for name, value in row.items() if name.startswith("rollout/ended/")}
    assert len(shares) == 17
    assert shares["rollout/ended/other"] == pytest.approx(0.4)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_a_number_and_a_text_under_one_key_are_told_apart() -> None:
    row = update(RunMetrics(), with_metadata([{"ended": "done"}, {"ended": 3}]))

    assert (row["rollout/ended"], row["rollout/ended/done"]) == (3.0, 1.0)


def test_totals_add_up_over_the_run() -> None:
    metrics = RunMetrics()
    update(metrics, facts(group(0.0, 1.0), started=2))
    update(metrics, facts(group(0.0, 1.0, None), started=9))

    totals = metrics.totals
    assert (totals["attempts/started"], totals["attempts/in_flight"]) == (9, 4)
    assert (totals["attempts/trained"], totals["tokens/sampled"]) == (4, 10)
    assert totals["groups/usable"] == 2


def test_a_flag_counts_whatever_the_fate() -> None:
    flagged = tuple(replace(a, flags=Flags(True, True, True)) for a in group(1.0, None).attempts)
    row = update(RunMetrics(), facts(replace(group(), attempts=flagged)))

    assert (row["attempts/timed_out"], row["attempts/retried"]) == (2, 2)


def whole_row() -> dict[str, float]:
    evaluation = evaluation_row(
        EvaluationFacts(
            set="held_out",
            update=1,
            policy_version=5,
            groups=[group(1.0, 0.0)],
            solved_at=1.0,
            at=0.0,
            seconds=1.0,
        )
    )
    made = with_metadata([{"score": 1, "ended": "done"}, {}], fails=1)
    made = replace(made, batch=replace(made.batch, retries={"judge": 1}))
    return update(RunMetrics(), made) | evaluation.metrics


def pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<\w+>", name)
    return re.compile("[^/]+".join(map(re.escape, parts)))


def test_every_metric_of_a_row_is_in_the_list_and_the_list_has_no_other() -> None:
    row = whole_row()
    patterns = [pattern(name) for name, _ in METRICS]

    assert [name for name in row if not any(p.fullmatch(name) for p in patterns)] == []
    assert [p.pattern for p in patterns if not any(p.fullmatch(name) for name in row)] == []


def test_every_value_of_a_row_is_a_float() -> None:
    assert {type(value) for value in whole_row().values()} == {float}


def test_the_metrics_page_is_what_the_list_makes() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"

    assert page.read_text().startswith(metrics_page())


def test_the_retries_of_a_judge_count_in_the_row_in_which_they_came() -> None:
    """That a judge was busy for half of a run stood in no number."""
    metrics, made = RunMetrics(), facts(group(0.0, 1.0))
    rows = [
        update(metrics, replace(made, batch=replace(made.batch, retries={"judge": count})))
        for count in (0, 5, 7)
    ]
    assert [row["producers/judge/retries"] for row in rows] == [0.0, 5.0, 2.0]


def test_a_run_without_judges_has_no_retries() -> None:
    assert not [name for name in update(RunMetrics(), facts(group(0.0, 1.0))) if "retries" in name]
