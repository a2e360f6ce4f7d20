"""The lines that end a run say how it ended, what was learnt, and where it lies."""

from dataclasses import replace
from pathlib import Path

from loops_cookbook.records import EvaluationRow
from loops_cookbook.report.closing import Closing, Evaluated


def evaluation(update: int, reward: float | None, **passes: float) -> EvaluationRow:
    return EvaluationRow(
        set="held_out",
        update=update,
        policy_version=update,
        at=0.0,
        seconds=1.0,
        attempts=4,
        solved_at=1.0,
        reward_mean=reward,
        solve_rate=reward,
        pass_at_k={int(k.removeprefix("k")): value for k, value in passes.items()},
        fates={},
        tasks=(),
    )


def closing(**changes: object) -> Closing:
    given: dict[str, object] = {
        "status": "done",
        "folder": Path("runs/a"),
        "updates": 50,
        "seconds": 192.0,
        "curve": [],
        "evaluations": {},
        "counts": {},
    }
    return Closing(**(given | changes))  # type: ignore[arg-type]


def test_a_run_that_did_nothing_still_says_how_it_ended_and_where_it_lies() -> None:
    lines = closing(status="failed", updates=0, seconds=1.0).lines(width=80)

    assert lines == ["failed after 0 updates, 1.0 s", "", "run: runs/a"]


def test_attempts_are_told_by_what_they_came_to() -> None:
    counts = {
        "attempts/finished": 6528,
        "attempts/trained": 6400,
        "attempts/unused": 112,
        "attempts/unused/no_variance": 112,
        "attempts/unused/too_few": 0,
        "attempts/discarded": 16,
        "attempts/discarded/failed": 12,
        "attempts/discarded/no_reply": 4,
    }

    assert closing(counts=counts).lines(width=80)[-2] == (
        "attempts: 6,528: 6,400 trained, 112 unused (no_variance 112), "
        "16 discarded (failed 12, no_reply 4)"
    )


def test_attempts_of_evaluations_are_told_beside_those_in_training() -> None:
    """They were left out of a line that seemed to account for all."""
    counts = {"attempts/finished": 64, "attempts/trained": 64}
    row = replace(evaluation(0, 0.5), fates={"evaluated": 7, "discarded/failed": 1})
    once = Evaluated().with_(row)
    twice = once.with_(replace(row, fates={"evaluated": 8}))
    assert closing(counts=counts, evaluated=twice).lines(width=80)[-2] == (
        "attempts: 64: 64 trained, 0 unused, 0 discarded; besides, 16 in 2 evaluations (1 without "
        "a reward)"
    )
    told = closing(evaluated=once).lines(width=80)[-2]
    assert told == "attempts: 8 in 1 evaluation (1 without a reward)"


def test_an_evaluation_alone_ends_after_evaluations_and_not_after_updates() -> None:
    """`done after 0 updates` stood in the log of `loops eval`."""
    told = closing(updates=0, is_evaluation=True, evaluated=Evaluated(2, 16))
    assert told.lines(width=80)[0] == "done after 2 evaluations, 3 min 12 s"


def test_held_out_scores_are_told_before_and_after() -> None:
    pair = (evaluation(0, 0.312, k2=0.4, k4=0.5), evaluation(50, 0.906, k2=0.95, k4=0.97))

    lines = closing(evaluations={"held_out": pair}).lines(width=80)

    assert lines[2:4] == [
        "evaluation   updates   reward          solved          pass@k",
        "held_out     0 → 50    0.312 → 0.906   31.2% → 90.6%   50.0% → 97.0% (k = 4)",
    ]


def test_one_evaluation_alone_is_told_as_it_is() -> None:
    row = evaluation(0, None)

    lines = closing(evaluations={"held_out": (row, row)}).lines(width=80)

    assert lines[2:4] == [
        "evaluation   updates   reward   solved",
        "held_out     0         -        -",
    ]


def test_the_curve_says_what_it_shows_and_how_it_was_smoothed() -> None:
    few = closing(curve=[(1, 0.5), (2, 0.6)]).lines(width=80)
    many = closing(curve=[(i, 0.5) for i in range(1, 61)]).lines(width=80)

    assert few[2] == "mean reward of all graded attempts, by update"
    assert many[2].endswith(", moving mean over 3 updates")


def test_one_update_is_no_curve() -> None:
    """A chart of one dot was drawn, with an axis from 0.473 to 0.573 for a value of 0.523."""
    assert not any("by update" in line for line in closing(curve=[(1, 0.523)]).lines(width=80))


def test_a_console_without_unicode_gets_ascii_alone() -> None:
    pair = (evaluation(0, 0.3), evaluation(5, 0.9))

    lines = closing(curve=[(1, 0.5), (2, 0.6)], evaluations={"held_out": pair}).lines(
        width=80, unicode=False
    )

    assert "\n".join(lines).isascii()
    assert "0.300 -> 0.900" in "\n".join(lines)


def test_a_loss_is_charted_under_its_name_and_told_before_and_after() -> None:
    pair = (replace(evaluation(0, None), loss=3.5), replace(evaluation(9, 0.5), loss=0.25))
    lines = closing(
        curve=[(1, 3.0), (2, 1.0)], charted="loss", evaluations={"held_out": pair}
    ).lines(width=80, unicode=False)

    assert "mean loss of the trained tokens, by update" in lines
    assert "held_out     0 -> 9    3.500 -> 0.250   - -> 0.500   - -> 50.0%" in lines


def test_the_last_line_says_how_to_go_on() -> None:
    lines = closing(status="failed", onward="go on with: loops run c.toml --resume runs/a").lines(
        width=20
    )

    assert lines[-2:] == ["run: runs/a", "go on with: loops run c.toml --resume runs/a"]


def test_what_resumes_an_interrupted_run_is_left_to_the_command_which_says_it_last() -> None:
    onward = "go on with: loops run c.toml --resume runs/a"
    interrupted = closing(status="interrupted", onward=onward)
    assert interrupted.lines(width=20)[-1] == "run: runs/a"
    assert interrupted.resumed_by == onward
    assert closing(status="failed", onward=onward).resumed_by is None
