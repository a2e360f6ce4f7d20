"""Rows tell what the nouns of a rollout came to, and a Fanout tells everyone."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from loops_cookbook.attempts import Attempt, Discarded, Fate, Flags, Group, Rejection
from loops_cookbook.errors import RunStopped
from loops_cookbook.journal import encode
from loops_cookbook.recorders import Fanout
from loops_cookbook.records import (
    SCHEMA_VERSION,
    EvaluationRow,
    GroupRow,
    Level,
    RolloutRow,
    RunRow,
    RunStatus,
    StepRow,
    TaskResult,
    spread,
)
from loops_cookbook.tokens import SampledTokens, Trajectory, Turn, ids_of, logprobs_of, sequences


def graded(index: int, reward: float) -> Attempt:
    turn = Turn(ids_of([1, 2, 3]), SampledTokens(ids_of([4]), logprobs_of([-0.5]), "stop", 7))
    trajectory = Trajectory((turn,))
    return Attempt(
        group=5,
        index=index,
        task="orders",
        reward=reward,
        trajectory=trajectory,
        sequences=sequences(trajectory),
        metadata={"ended": "answered"},
        flags=Flags(timed_out=True),
    )


def failed(index: int) -> Attempt:
    why = Discarded(Fate.FAILED, "OSError: no sandbox", "OSError")
    return Attempt(group=5, index=index, task="orders", discarded=why, tries=3)


def group(*attempts: Attempt) -> Group:
    return Group(5, "orders", 2, "tasks.jsonl:3", 1, 7, attempts, seconds=2.5)


def run_row() -> RunRow:
    return RunRow(
        run="20260101-000000-abcd",
        recipe="rl",
        scope="local",
        model="models/counting",
        updates=50,
        attempts_per_update=128,
        tasks={"train": 10},
        service={"device": "cpu"},
        versions={"python": "3.11"},
        config_path="train.toml",
        config={"recipe": "rl"},
        started_at=1.0,
    )


def test_a_groups_mean_and_spread_are_over_its_rewards_alone() -> None:
    row = GroupRow.of(group(graded(0, 1.0), failed(1), graded(2, 0.0)), None, update=4)

    assert row.rewards == (1.0, None, 0.0)
    assert row.mean == 0.5
    assert row.std == pytest.approx(0.5**0.5)
    assert (row.usable, row.reason, row.update) == (True, None, 4)


def test_a_group_without_a_reward_has_no_mean() -> None:
    row = GroupRow.of(group(failed(0), failed(1)), Rejection("too_few"), update=1)

    assert (row.mean, row.std) == (None, None)
    assert (row.usable, row.reason) == (False, "too_few")


def test_equal_rewards_have_no_spread_whatever_their_binary_form() -> None:
    assert spread([0.1 + 0.2] * 7) == 0.0
    assert spread([0.3]) == 0.0


def test_a_rollout_row_says_why_an_attempt_was_discarded() -> None:
    row = RolloutRow.of(failed(1), Fate.FAILED)

    assert row.to_json()["fate"] == "discarded/failed"
    assert (row.reward, row.detail, row.exception) == (None, "OSError: no sandbox", "OSError")
    assert row.tries == 3


def test_a_rollout_row_is_a_json_object_with_its_fields_as_keys() -> None:
    row = json.loads(encode(RolloutRow.of(graded(0, 1.0), Fate.TRAINED).to_json()))

    assert row["flags"] == {"timed_out": True, "context_full": False, "retried": False}
    assert (row["prompt_tokens"], row["sampled_tokens"], row["sequences"]) == (3, 1, 1)
    assert row["metadata"] == {"ended": "answered"}
    assert row["transcript"] is None


def test_a_step_row_lies_flat_with_its_totals_apart() -> None:
    row = StepRow(update=1, at=2.0, metrics={"reward/mean": 0.5}, totals={"finished": 16})

    assert row.to_json() == {
        "update": 1,
        "at": 2.0,
        "reward/mean": 0.5,
        "totals": {"finished": 16},
    }


def test_run_json_begins_with_its_schema() -> None:
    assert next(iter(run_row().to_json().items())) == ("schema", SCHEMA_VERSION)


def test_an_evaluation_row_holds_each_tasks_results_as_objects() -> None:
    row = EvaluationRow(
        set="held_out",
        update=0,
        policy_version=0,
        at=1.0,
        seconds=2.0,
        attempts=2,
        solved_at=1.0,
        reward_mean=1.0,
        solve_rate=1.0,
        pass_at_k={2: 1.0},
        fates={"evaluated": 1, "discarded/failed": 1},
        tasks=(
            TaskResult(task="a", group=3, rewards=(1.0, None), fates=(Fate.EVALUATED, Fate.FAILED)),
        ),
    )

    written = json.loads(encode(row.to_json()))

    assert written["tasks"] == [
        {
            "task": "a",
            "group": 3,
            "rewards": [1.0, None],
            "fates": ["evaluated", "discarded/failed"],
            "transcripts": [],
        }
    ]
    assert written["pass_at_k"] == {"2": 1.0}


@dataclass
class Listener:
    name: str
    heard: list[tuple[str, str]] = field(default_factory=list)

    def run_started(self, row: RunRow) -> None:
        self.heard.append((self.name, "run_started"))

    def attempt_ended(self, attempt: Attempt, purpose: str) -> None:
        self.heard.append((self.name, f"attempt_ended {purpose}"))

    def group_settled(self, row: GroupRow) -> None:
        self.heard.append((self.name, "group_settled"))

    def fates(self, rows: Sequence[RolloutRow]) -> None:
        self.heard.append((self.name, f"fates {len(rows)}"))

    def update(self, row: StepRow) -> None:
        self.heard.append((self.name, f"update {row.update}"))

    def evaluation(self, row: EvaluationRow) -> None:
        self.heard.append((self.name, f"evaluation {row.set}"))

    def note(self, level: Level, text: str) -> None:
        self.heard.append((self.name, f"note {level} {text}"))

    def run_ended(
        self, status: RunStatus, counts: Mapping[str, int], reason: str | None = None
    ) -> None:
        self.heard.append((self.name, f"run_ended {status} {reason}"))


def test_a_fanout_tells_each_of_its_recorders_in_their_order() -> None:
    heard: list[tuple[str, str]] = []
    both = Fanout((Listener("first", heard), Listener("second", heard)))
    evaluation = EvaluationRow(
        set="held_out",
        update=0,
        policy_version=0,
        at=0.0,
        seconds=0.0,
        attempts=1,
        solved_at=1.0,
        reward_mean=None,
        solve_rate=None,
        pass_at_k={},
        fates={},
        tasks=(),
    )

    both.run_started(run_row())
    both.attempt_ended(failed(0), "train")
    both.group_settled(GroupRow.of(group(failed(0)), Rejection("too_few"), update=1))
    both.fates([RolloutRow.of(failed(0), Fate.FAILED)])
    both.update(StepRow(update=1, at=0.0, metrics={}))
    both.evaluation(evaluation)
    both.note("warning", "look")
    both.run_ended("stopped", {}, "no signal")

    told = [
        "run_started",
        "attempt_ended train",
        "group_settled",
        "fates 1",
        "update 1",
        "evaluation held_out",
        "note warning look",
        "run_ended stopped no signal",
    ]
    assert heard == [(name, what) for what in told for name in ("first", "second")]


class Full(Listener):
    def run_ended(
        self, status: RunStatus, counts: Mapping[str, int], reason: str | None = None
    ) -> None:
        super().run_ended(status, counts, reason)
        raise RunStopped("no space left")


def test_the_end_is_told_to_each_also_where_one_cannot_write_it() -> None:
    """On a full disk a run ended without a word on its attempts, and on how to go on."""
    heard: list[tuple[str, str]] = []
    both = Fanout((Full("folder", heard), Listener("progress", heard)))
    with pytest.raises(RunStopped, match="no space left"):
        both.run_ended("failed", {}, "a reason")
    assert heard == [
        ("folder", "run_ended failed a reason"),
        ("progress", "run_ended failed a reason"),
    ]
