"""Progress is seen on stderr as it comes, and the answer on stdout at the end."""

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from rich.console import Console

from loops_cookbook.attempts import Attempt, Discarded, Fate
from loops_cookbook.records import EvaluationRow, GroupRow, RunRow, StepRow
from loops_cookbook.report.progress import Progress

ATTEMPT = Attempt(0, 0, "orders", reward=1.0)


@dataclass
class Seen:
    """A run's progress, the clock that it goes by, and what it printed."""

    progress: Progress
    side: io.StringIO
    answer: io.StringIO
    time: list[float] = field(default_factory=lambda: [0.0])

    def lines(self) -> list[str]:
        """What stderr got since the last call."""
        printed = self.side.getvalue()
        self.side.seek(0)
        self.side.truncate()
        return printed.splitlines()


def watched(*, terminal: bool, width: int = 80) -> Seen:
    side, answer, time = io.StringIO(), io.StringIO(), [0.0]
    progress = Progress(
        Path("runs/a"),
        side=Console(file=side, force_terminal=terminal, width=width, _environ={"TERM": "xterm"}),
        answer=Console(file=answer, width=80),
        every_seconds=30,
        now=lambda: time[0],
    )
    return Seen(progress, side, answer, time)


@pytest.fixture
def plain() -> Iterator[Seen]:
    seen = watched(terminal=False)
    with seen.progress:
        seen.progress.run_started(run_row())
        yield seen


@pytest.fixture
def live() -> Iterator[Seen]:
    seen = watched(terminal=True)
    with seen.progress:
        seen.progress.run_started(run_row())
        yield seen


def run_row(updates: int | None = 5) -> RunRow:
    return RunRow(
        run="a",
        recipe="rl",
        scope="local",
        model="m",
        updates=updates,
        attempts_per_update=16,
        tasks={},
        service={},
        versions={},
        config_path="",
        config={},
        started_at=0.0,
    )


def step(update: int, metrics: Mapping[str, float] | None = None) -> StepRow:
    return StepRow(
        update=update,
        at=0.0,
        metrics=metrics or {"reward/all_mean": update / 10, "time/update": 4.0},
    )


def evaluation(update: int, reward: float) -> EvaluationRow:
    return EvaluationRow(
        set="held_out",
        update=update,
        policy_version=update,
        at=0.0,
        seconds=1.0,
        attempts=2,
        solved_at=1.0,
        reward_mean=reward,
        solve_rate=reward,
        pass_at_k={2: 0.75},
        fates={"evaluated": 7, "discarded/failed": 1},
        tasks=(),
    )


def rejected(attempts: int) -> GroupRow:
    return GroupRow(
        serial=0,
        epoch=0,
        task="orders",
        task_index=0,
        source="tasks.jsonl:1",
        rewards=(1.0,) * attempts,
        mean=1.0,
        std=0.0,
        usable=False,
        reason="no_variance",
        policy_version=0,
        seconds=1.0,
        update=1,
    )


def test_without_a_terminal_the_first_and_the_last_update_have_a_line(plain: Seen) -> None:
    for update in range(1, 6):
        plain.progress.update(step(update))

    assert [line.split(":")[0] for line in plain.lines()] == ["update 1/5", "update 5/5"]


def test_without_a_terminal_a_line_comes_when_its_time_has_come(plain: Seen) -> None:
    plain.progress.update(step(1))
    plain.lines()
    plain.time[0] = 29.0
    plain.progress.update(step(2))
    assert plain.lines() == []
    plain.time[0] = 30.0
    plain.progress.update(step(3))

    (line,) = plain.lines()
    assert line.startswith("update 3/5: reward 0.300, ")
    assert line.endswith("time 4.0 s, about 8.0 s left")


def test_where_evaluations_come_too_the_time_left_is_told_as_that_of_training(plain: Seen) -> None:
    """`about 1.6 s left` stood where 8 were: the evaluations to come are not in it."""
    plain.progress.expect({"held_out": 64})
    plain.progress.update(step(1))
    assert plain.lines()[-1].endswith(", about 16 s of training left")


def test_an_update_that_was_not_shown_is_shown_before_a_count_of_attempts(plain: Seen) -> None:
    plain.progress.update(step(1))
    plain.progress.update(step(2))
    plain.lines()
    for seconds in (31.0, 62.0):
        plain.time[0] = seconds
        plain.progress.attempt_ended(ATTEMPT, "train")

    first, second = plain.lines()
    assert first.startswith("update 2/5: reward 0.200")
    assert second == "update 3/5: 2/16 attempts ended"


def test_the_attempts_of_rejected_groups_are_needed_again(plain: Seen) -> None:
    plain.progress.group_settled(rejected(8))
    plain.progress.attempt_ended(ATTEMPT, "train")

    assert plain.lines() == ["update 1/5: 1/24 attempts ended"]


def test_an_evaluation_is_told_while_it_runs_and_when_it_is_done(plain: Seen) -> None:
    plain.progress.attempt_ended(ATTEMPT, "held_out")
    plain.progress.evaluation(evaluation(0, 0.5))
    plain.progress.evaluation(evaluation(10, 1.0))

    scores = "solved 50.0%, pass@2 75.0%, 8 attempts, 1 without a reward"
    assert plain.lines() == [
        "evaluating held_out: 1 attempt ended",
        f"held_out before the first update: reward 0.500, {scores}",
        f"held_out after 10 updates: reward 1.000, {scores.replace('50.0%', '100.0%')}",
    ]


def test_an_evaluation_beside_training_counts_its_own_attempts(plain: Seen) -> None:
    for purpose in ("train", "held_out", "train"):
        plain.progress.attempt_ended(ATTEMPT, purpose)
    plain.time[0] = 31.0
    plain.progress.attempt_ended(ATTEMPT, "held_out")
    plain.progress.evaluation(evaluation(0, 0.5))
    plain.time[0] = 62.0
    plain.progress.attempt_ended(ATTEMPT, "train")

    first, second, _, third = plain.lines()
    assert first == "update 1/5: 1/16 attempts ended"
    assert second == "evaluating held_out: 2 attempts ended"
    assert third == "update 1/5: 3/16 attempts ended"


def test_an_evaluation_is_told_with_how_many_attempts_it_has(plain: Seen) -> None:
    """`2 attempts ended` told nobody how long it would take, though the run knows of how many."""
    plain.progress.expect({"held_out": 1200})
    plain.progress.attempt_ended(ATTEMPT, "held_out")
    plain.time[0] = 31.0
    plain.progress.attempt_ended(ATTEMPT, "held_out")
    assert plain.lines() == [
        "evaluating held_out: 1/1,200 attempts ended",
        "evaluating held_out: 2/1,200 attempts ended",
    ]


def test_the_scores_of_an_update_stand_below_its_row(plain: Seen) -> None:
    """They were printed before the row of the same update."""
    plain.progress.update(step(1))
    plain.progress.update(step(2))
    plain.progress.evaluation(evaluation(2, 0.5))

    assert [line.split(":")[0] for line in plain.lines()] == [
        "update 1/5",
        "update 2/5",
        "held_out after 2 updates",
    ]


@pytest.mark.parametrize(
    ("recipe", "told"), [("rl", ["", "9.0 s", "6.0 s"]), ("sft", ["4.0 s", "6.0 s", "4.0 s"])]
)
def test_an_update_that_was_sampled_beside_an_evaluation_tells_nothing_of_the_time_left(
    plain: Seen, recipe: str, told: list[str]
) -> None:
    """Its sampling is in the time of the evaluation: of 60 updates, 9 s were left after one, and
    14 s after 17. Rows of `sft` are not sampled."""
    plain.progress.run_started(replace(run_row(), recipe=recipe))
    plain.progress.evaluation(evaluation(0, 0.5))
    left: list[str] = []
    for update, seconds in ((1, 1.0), (2, 3.0), (3, 2.0)):
        plain.time[0] += 31.0
        plain.progress.update(step(update, {"time/update": seconds}))
        left.append(plain.lines()[-1].partition("about ")[2].removesuffix(" left"))
        if update == 2:
            plain.progress.attempt_ended(ATTEMPT, "held_out")
    assert left == told


def test_attempts_of_later_updates_are_still_counted_after_an_update(plain: Seen) -> None:
    for _ in range(40):
        plain.progress.attempt_ended(ATTEMPT, "train")
    plain.progress.update(step(1, {"attempts/finished": 16}))
    plain.lines()
    for _ in range(2):
        plain.time[0] += 31.0
        plain.progress.attempt_ended(ATTEMPT, "train")

    assert plain.lines()[-1] == "update 2/5: 26 attempts ended and not trained yet"


def test_attempts_without_a_reward_are_told_before_their_update(plain: Seen) -> None:
    """With graders that run out of their clock, an update is hours away, and only its row told."""
    lost = replace(ATTEMPT, reward=None, discarded=Discarded(Fate.UNGRADED, "grading: slow"))
    plain.progress.attempt_ended(lost, "held_out")
    plain.progress.evaluation(evaluation(0, 0.5))
    for ended in (lost, ATTEMPT):
        plain.time[0] += 30
        plain.progress.attempt_ended(ended, "train")
    told = [line for line in plain.lines() if "ended" in line]
    assert told == [
        "evaluating held_out: 1 attempt ended, 1 of them lost",
        "update 1/5: 1/16 attempts ended, 1 of them lost",
        "update 1/5: 2/16 attempts ended, 1 of them lost",
    ]


def test_notes_carry_their_level_and_those_for_debugging_are_not_shown(plain: Seen) -> None:
    plain.progress.note("info", "the engine is ready")
    plain.progress.note("warning", "[red]slow[/red]")
    plain.progress.note("debug", "a detail")

    assert plain.lines() == ["the engine is ready", "warning: [red]slow[/red]"]


def test_an_update_that_was_the_last_though_more_were_planned_is_shown(plain: Seen) -> None:
    for update in (1, 2):
        plain.progress.update(step(update))
    plain.progress.run_ended("interrupted", {})

    assert [line.split(":")[0] for line in plain.lines()] == ["update 1/5", "update 2/5"]


def test_the_answer_is_what_the_run_came_to(plain: Seen) -> None:
    plain.progress.evaluation(evaluation(0, 0.25))
    plain.progress.update(step(1))
    plain.progress.evaluation(evaluation(1, 0.5))
    plain.progress.evaluation(evaluation(2, 0.75))
    plain.time[0] = 75.0
    assert plain.answer.getvalue() == ""

    plain.progress.run_ended("stopped", {"attempts/finished": 16}, "no signal")

    answer = plain.answer.getvalue()
    assert answer.startswith("stopped after 1 update, 1 min 15 s\n")
    assert "no signal" not in answer  # it is the command's to say, and was said twice
    assert "0 → 2     0.250 → 0.750" in answer
    assert answer.endswith("\nrun: runs/a\n")


def test_the_answer_of_a_run_that_went_on_is_of_all_of_it(plain: Seen) -> None:
    """Curve and scores began where the run had gone on, as if it had been no better before, and the
    seconds of its last life were told as those of all updates."""
    plain.progress.recall([step(1), step(2)], [evaluation(0, 0.25), evaluation(2, 0.5)])
    plain.progress.run_started(replace(run_row(), resumed_from=2, resumed_at=(1.0,)))
    plain.progress.update(step(3))
    plain.progress.evaluation(evaluation(3, 0.75))
    plain.time[0] = 35.0
    plain.progress.run_ended("done", {})

    assert plain.progress.closing is not None
    assert [update for update, _ in plain.progress.closing.curve] == [1, 2, 3]
    answer = plain.answer.getvalue()
    assert answer.startswith("done after 3 updates, 35 s since it was resumed\n")
    assert "0 → 3     0.250 → 0.750" in answer
    assert [line.split(":")[0] for line in plain.lines()] == [
        "update 3/5",
        "held_out after 3 updates",
    ]


def test_on_a_terminal_every_update_has_a_row_under_one_head(live: Seen) -> None:
    for update in range(1, 6):
        live.progress.update(step(update))

    printed = "\n".join(live.lines())
    assert printed.count("group std") == 1
    assert [f"{update}/5   " in printed for update in range(1, 6)] == [True] * 5


def test_on_a_terminal_the_last_line_tells_how_far_the_next_update_is(live: Seen) -> None:
    live.progress.update(step(1))
    live.lines()
    live.time[0] = 1.0
    live.progress.attempt_ended(ATTEMPT, "train")

    assert "update 2/5: 1/16 attempts ended, about 16 s left" in live.lines()[-1]


def test_on_a_terminal_the_line_is_not_drawn_for_every_attempt(live: Seen) -> None:
    live.time[0] = 1.0
    for _ in range(100):
        live.progress.attempt_ended(ATTEMPT, "train")

    assert live.side.getvalue().count("attempts ended") == 1


def test_a_terminal_is_left_as_it_was(live: Seen) -> None:
    live.progress.attempt_ended(ATTEMPT, "train")
    live.progress.run_ended("done", {})

    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    printed = live.side.getvalue()
    assert printed.count(hidden) == printed.count(shown) == 1
    assert printed.rindex(shown) > printed.rindex("attempts ended")


def test_a_terminal_is_left_as_it_was_when_the_run_fails() -> None:
    seen = watched(terminal=True)
    with pytest.raises(RuntimeError), seen.progress:
        raise RuntimeError

    assert "\x1b[?25h" in seen.side.getvalue()


def test_a_dumb_terminal_gets_plain_lines() -> None:
    side = io.StringIO()
    progress = Progress(
        Path("runs/a"),
        side=Console(file=side, force_terminal=True, width=80, _environ={"TERM": "dumb"}),
        answer=Console(file=io.StringIO(), width=80),
    )
    with progress:
        progress.run_started(run_row(updates=None))
        progress.update(step(1))

    assert side.getvalue().startswith("update 1: reward 0.100")
    assert "\x1b[?25l" not in side.getvalue()
