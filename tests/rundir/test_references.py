"""A checkpoint is found by what a person calls it, or refused with what there is."""

import json
import shutil
from pathlib import Path

import pytest

from loops_cookbook.errors import RunFolderError
from loops_cookbook.journal import encode
from loops_cookbook.records import EvaluationRow, RunRow
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.read import open_run
from loops_cookbook.rundir.references import is_service_path, kept_checkpoints, locate, parted
from loops_cookbook.rundir.rows import CheckpointRow
from loops_cookbook.rundir.savepoints import SavePoints
from loops_cookbook.rundir.write import RunWriter


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run, in the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    with RunWriter(folder) as writer:
        writer.run_started(
            RunRow(
                run="run",
                started_at=0.0,
                recipe="rl",
                scope="local",
                model="m",
                updates=3,
                attempts_per_update=2,
                tasks={},
                service={},
                versions={},
                config_path="train.toml",
                config={},
            )
        )
    return folder


def save(
    folder: RunFolder,
    update: int,
    *,
    name: str = "",
    is_here: bool = True,
    score: float | None = None,
    of: str = "reward_mean",
) -> None:
    name = name or f"u{update}"
    place = f"checkpoints/{name}" if is_here else None
    if place is not None:
        (folder.root / place).mkdir(parents=True)
    row = CheckpointRow(
        update=update,
        name=name,
        path=f"bt://{name}",
        folder=place,
        at=0.0,
        score=score,
        score_name=None if score is None else f"eval/held_out/{of}",
    )
    with SavePoints(folder) as savepoints:
        savepoints.checkpointed(row)


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("runs/a", ("runs/a", None)),
        ("runs/a@20", ("runs/a", 20)),
        ("runs/me@home@3", ("runs/me@home", 3)),
        ("runs/me@home", ("runs/me@home", None)),
        ("runs/a@", ("runs/a@", None)),
        ("runs/a@-1", ("runs/a@-1", None)),
    ],
)
def test_only_a_number_after_the_last_at_is_an_update(
    reference: str, parts: tuple[str, int | None]
) -> None:
    assert parted(reference) == parts


def test_a_path_of_a_service_is_told_from_a_folder() -> None:
    assert is_service_path("bt://loops:r/weights/u2")
    assert is_service_path("tinker://r/weights/2")
    assert not is_service_path("runs/a@2")


def test_a_run_means_its_last_checkpoint_and_a_number_the_one_of_that_update(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 1)
    save(folder, 2)
    assert locate("run").row.update == 2
    found = locate("run@1")
    assert (found.row.update, found.folder) == (1, folder.root / "checkpoints/u1")
    elsewhere = folder.root.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert locate("run", beside=folder.root.parent).row.update == 2
    with pytest.raises(RunFolderError, match="there is no folder"):
        locate("run")


def test_what_was_not_kept_is_not_there_and_what_a_service_keeps_is(folder: RunFolder) -> None:
    save(folder, 1)
    save(folder, 2, is_here=False)
    save(folder, 3)
    (folder.root / "checkpoints/u1").rmdir()
    assert [row.update for row in kept_checkpoints(open_run(folder.root))] == [2, 3]
    assert locate("run@2").folder is None


def test_of_two_checkpoints_of_one_update_the_newer_counts(folder: RunFolder) -> None:
    """A run that is resumed may save one again."""
    save(folder, 3)
    save(folder, 2, name="first")
    save(folder, 2, name="second")
    rows = kept_checkpoints(open_run(folder.root))
    assert [(row.update, row.name) for row in rows] == [(2, "second"), (3, "u3")]


def test_what_is_not_there_is_refused_with_what_is(folder: RunFolder) -> None:
    with pytest.raises(RunFolderError, match=r"has no checkpoint: .*training\.checkpoint_every"):
        locate("run")
    for update in (1, 2, 4):
        save(folder, update)
    (folder.root / "checkpoints/u1").rmdir()
    with pytest.raises(RunFolderError, match=r"update 1, which was saved and not kept .*@2, @4$"):
        locate("run@1")
    with pytest.raises(RunFolderError, match=r"no checkpoint of update 3: it has @2, @4$"):
        locate("run@3")


def test_of_a_folder_of_runs_the_newest_with_a_checkpoint_is_named(folder: RunFolder) -> None:
    """It was the newest of all, an evaluation, of which the next try said that it has none."""
    runs = folder.root.parent
    for name in ("run-b", "run-c"):
        shutil.copytree(folder.root, runs / name)
    (runs / "run-d").mkdir()
    (runs / "run-d" / "run.json").write_text("{}")
    with pytest.raises(RunFolderError, match=r"^\. holds 4 runs and is none: .* run-d$"):
        locate(".")
    save(folder, 1)
    save(RunFolder(runs / "run-b"), 1)
    with pytest.raises(RunFolderError, match=r"holds 4 runs and is none: .* run-b$"):
        locate(".")


def test_what_is_no_number_after_the_at_is_told_with_what_there_is(folder: RunFolder) -> None:
    """`@best` was refused with `there is no folder run@best`, as if it were a part of the name."""
    with pytest.raises(RunFolderError, match=r"'best' is none: run has no checkpoint: "):
        locate("run@best")
    for update in (1, 2, 4):
        save(folder, update)
    for name in ("best", "", "-1"):
        with pytest.raises(RunFolderError) as error:
            locate(f"run@{name}")
        assert "after the last @ stands the number of an update" in str(error.value)
        assert str(error.value).endswith(f"{name!r} is none: run has @1, @2, @4")
    folder.root.rename(folder.root.with_name("run@best"))
    assert locate("run@best").row.update == 4


@pytest.mark.parametrize(("of", "best"), [("reward_mean", 2), ("loss", 1)])
def test_who_asks_for_the_best_is_told_which_it_is(folder: RunFolder, of: str, best: int) -> None:
    """`@best` was refused with the numbers alone: which was the best had to be looked for."""
    for update, score in ((1, 0.25), (2, 0.75), (4, 0.5)):
        save(folder, update, score=score, of=of)
    told = ["@1", "@2", "@4"]
    told[best - 1] += f" (the best by eval/held_out/{of})"
    with pytest.raises(RunFolderError) as error:
        locate("run@best")
    assert str(error.value).endswith(f"run has {', '.join(told)}")


def test_of_many_checkpoints_the_newest_and_the_best_are_named(folder: RunFolder) -> None:
    """All of them stood in one line, of a run with hundreds."""
    for update in range(1, 41):
        save(folder, update, score=1.0 if update == 7 else 0.5)
    with pytest.raises(RunFolderError) as error:
        locate("run@50")
    told = (
        "it has 34 older ones, @7 (the best by eval/held_out/reward_mean), @36, @37, @38, @39, @40"
    )
    assert str(error.value).endswith(told)


def evaluated(folder: RunFolder, *policies: str) -> None:
    """Let a run be one of `loops eval`, of these policies."""
    told = {**json.loads(folder.run.read_text()), "recipe": "eval"}
    folder.run.write_text(encode(told))
    with RunWriter(folder) as writer:
        for policy in policies:
            writer.evaluation(
                EvaluationRow(
                    set="held_out",
                    update=0,
                    policy_version=0,
                    at=0.0,
                    seconds=1.0,
                    attempts=1,
                    solved_at=1.0,
                    reward_mean=0.5,
                    solve_rate=0.5,
                    pass_at_k={},
                    fates={},
                    tasks=(),
                    policy=policy,
                )
            )


def test_an_evaluation_has_no_checkpoint_and_what_it_evaluated_is_named(folder: RunFolder) -> None:
    """`training.checkpoint_every` was told of a folder of `loops eval`, which trains nothing."""
    evaluated(folder, "base")
    told = "run is of `loops eval`, which saves no checkpoint: name the folder of a run"
    with pytest.raises(RunFolderError, match=f"^{told}$"):
        locate("run")
    evaluated(folder, "runs/a@2", "bt://r/2")
    with pytest.raises(RunFolderError, match=r"name what it evaluated, runs/a@2, bt://r/2$"):
        locate("run")


def test_checkpoints_that_were_deleted_are_not_asked_for_by_a_key(folder: RunFolder) -> None:
    save(folder, 1)
    (folder.root / "checkpoints/u1").rmdir()
    with pytest.raises(RunFolderError, match=r"^run has no checkpoint any more: "):
        locate("run")


@pytest.mark.parametrize("reference", ["", " ", "@3"])
def test_a_reference_without_a_run_is_told_as_that(folder: RunFolder, reference: str) -> None:
    """The working directory was told of, which nobody had named."""
    with pytest.raises(RunFolderError, match=f"^'{reference}' names no run: write RUN_DIR or "):
        locate(reference)
