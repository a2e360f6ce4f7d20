"""A run that is over says what its policy is called, or what to type to go on."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.report.test_evaluations import ROW
from tests.report.test_progress import run_row

from loops_cookbook.learning.datums import Datum
from loops_cookbook.records import RunStatus
from loops_cookbook.report.onward import onward
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.rows import CheckpointRow
from loops_cookbook.rundir.updates import KeptUpdate, UpdateStore
from loops_cookbook.tokens import ids_of

COMMAND = "loops run train.toml --resume runs/a"
REWARD = "eval/held_out/reward_mean"
MakeRun = Callable[..., Path]


@pytest.fixture
def recorded(tmp_path: Path) -> MakeRun:
    """A run folder with a checkpoint of each update, under its score."""

    def make(*scores: tuple[int, float | None], name: str = REWARD) -> Path:
        folder = new_run_folder("runs", tmp_path)
        folder.run.write_text(json.dumps(run_row().to_json()))
        rows = [
            CheckpointRow(
                update=update,
                name=f"u{update}",
                path=f"bt://loops:a/weights/u{update}",
                folder=None,
                at=0.0,
                score=score,
                score_name=None if score is None else name,
            )
            for update, score in scores
        ]
        lines = [json.dumps(row.to_json()) + "\n" for row in rows]
        folder.checkpoint_rows.write_text("".join(lines))
        return folder.root

    return make


@pytest.mark.parametrize(
    ("scores", "name", "told"),
    [
        ([(60, None)], REWARD, "policy: {0}@60"),
        (
            [(50, 0.912), (60, 0.9)],
            REWARD,
            "policy: {0}@60 (best {0}@50: eval/held_out/reward_mean 0.912)",
        ),
        ([(50, 0.5), (60, 0.9)], REWARD, f"policy: {{0}}@60 (the best: {REWARD} 0.900)"),
        (
            [(50, 0.5), (60, 0.9)],
            "eval/held_out/loss",
            "policy: {0}@60 (best {0}@50: eval/held_out/loss 0.500)",
        ),
    ],
)
def test_a_run_that_is_done_names_its_policy_and_the_best(
    recorded: MakeRun, scores: list[tuple[int, float | None]], name: str, told: str
) -> None:
    root = recorded(*scores, name=name)
    assert onward(root, "done", COMMAND) == told.format(root)


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (0.5, "(best {0}@50: eval/held_out/reward_mean 0.400; 0.500 before the first update)"),
        (0.3, "(best {0}@50: eval/held_out/reward_mean 0.400)"),
    ],
)
def test_that_the_best_is_worse_than_the_beginning_is_said(
    recorded: MakeRun, before: float, told: str
) -> None:
    """A run that had made its policy worse named the best of what it kept, and nothing else."""
    root = recorded((50, 0.4), (60, 0.2))
    rows = [replace(ROW, set="other", update=0, policy_version=0, reward_mean=0.9, policy=None)]
    rows += [replace(rows[0], set="held_out", reward_mean=before)]
    rows += [replace(rows[1], update=50, reward_mean=0.4)]
    lines = [json.dumps(row.to_json()) + "\n" for row in rows]
    RunFolder(root).evaluations.write_text("".join(lines))
    assert onward(root, "done", COMMAND) == f"policy: {root}@60 {told.format(root)}"


@pytest.mark.parametrize("status", ["failed", "stopped", "interrupted"])
def test_a_run_that_came_to_no_end_says_what_goes_on_with_it(
    recorded: MakeRun, status: RunStatus
) -> None:
    assert onward(recorded((10, None)), status, COMMAND) == f"go on with: {COMMAND}"
    assert onward(recorded((10, None)), status, None) is None


def test_batches_are_something_to_go_on_from(recorded: MakeRun) -> None:
    root = recorded()
    assert onward(root, "failed", COMMAND) is None
    ids = ids_of([1])
    datum = Datum(ids, ids, weights=np.ones(1, np.float32))
    UpdateStore(RunFolder(root).updates).keep(KeptUpdate(1, "update-1", (datum,), {}, {}))
    assert onward(root, "failed", COMMAND) == f"go on with: {COMMAND}"


START = '{"serial":0,"task":"t","policy_version":0,"at":0.0}\n'
STEP = '{"update":1,"at":0.0,"totals":{}}\n'


@pytest.mark.parametrize(
    ("recipe", "starts", "steps", "attempts", "goes_on"),
    [
        ("rl", "", "", 0, True),  # before its first attempt
        ("rl", START, "", 8, True),
        ("rl", "", "", 8, False),  # its trainer keeps nothing, so its starts are not written either
        ("rl", START, STEP, 8, False),  # its batch is gone
        ("sft", "", STEP, 0, True),
    ],
)
def test_a_run_that_was_interrupted_before_it_kept_anything_goes_on_too(
    recorded: MakeRun, recipe: str, starts: str, steps: str, attempts: int, goes_on: bool
) -> None:
    """It was told that no update was kept, and no way on, though `--resume` works."""
    root = recorded()
    folder = RunFolder(root)
    row = replace(run_row(), recipe=recipe, counts={"attempts/started": attempts})
    folder.run.write_text(json.dumps(row.to_json()))
    folder.starts.write_text(starts)
    folder.steps.write_text(steps)
    assert onward(root, "interrupted", COMMAND) == (f"go on with: {COMMAND}" if goes_on else None)
    assert onward(root, "interrupted", None) is None


def test_a_run_that_kept_nothing_has_no_such_line(recorded: MakeRun, tmp_path: Path) -> None:
    assert onward(recorded(), "done", COMMAND) is None
    assert onward(tmp_path / "nothing", "failed", COMMAND) is None
