"""A checkpoint is refused where it does not fit, and put in place whole where it does."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loops_cookbook.config.bundled import bundled_root
from loops_cookbook.errors import RunFolderError, UsageError
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.start import find_start, place_checkpoint, start_of
from loops_cookbook.records import RunRow
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.references import locate
from loops_cookbook.rundir.rows import CheckpointRow

MODEL = 'model.name="models/counting"'
SAVED = "checkpoints/r/weights/u2"
MakeRun = Callable[..., Path]


@pytest.fixture
def saved_run(project: Path) -> MakeRun:
    """A run folder, `r`, with a checkpoint of update 2."""

    def make(*, kept_here: bool = True, **model: object) -> Path:
        table = {"name": "models/counting", "lora_rank": 32, "lora_alpha": 32.0, **model}
        folder = RunFolder(project / "r")
        run = RunRow(
            run="r",
            started_at=0.0,
            recipe="rl",
            scope="local",
            model=str(table["name"]),
            updates=2,
            attempts_per_update=4,
            tasks={},
            service={},
            versions={},
            config_path=str(project / "train.toml"),
            config={"model": table},
        )
        row = CheckpointRow(
            update=2,
            name="u2",
            path="bt://loops:r/weights/u2",
            folder=SAVED if kept_here else None,
            at=0.0,
        )
        (folder.root / SAVED).mkdir(parents=True)
        for name in ("adapter_model.safetensors", "optimizer.safetensors", "state.json"):
            (folder.root / SAVED / name).write_text(name)
        folder.run.write_text(json.dumps(run.to_json()))
        folder.checkpoint_rows.write_text(json.dumps(row.to_json()) + "\n")
        return folder.root

    return make


@pytest.fixture
def counting_plan(make_plan: Callable[..., Plan]) -> Callable[..., Plan]:
    return lambda *overrides, **named: make_plan(MODEL, *overrides, **named)


def test_what_fits_is_found(saved_run: MakeRun, counting_plan) -> None:
    run = saved_run()
    start = find_start("r", counting_plan())
    assert (start.path, start.is_here) == ("bt://loops:r/weights/u2", True)
    beside = find_start("../r@2", counting_plan(), beside=run)
    assert beside.path == start.path


@pytest.mark.parametrize("working", ["elsewhere", "."])
def test_a_config_names_a_run_beside_it_or_in_the_working_directory(
    saved_run: MakeRun, counting_plan, project: Path, working: str
) -> None:
    run = saved_run()
    runs = project / working / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    run.rename(runs / "r")
    plan = counting_plan('model.start_from="runs/r@2"')
    loaded = replace(plan.loaded, working_directory=project / working)
    start = start_of(replace(plan, loaded=loaded))
    assert start is not None
    assert start.located is not None
    assert start.located.root == runs / "r"


def test_what_is_no_update_of_a_run_that_is_there_is_told_as_that(
    saved_run: MakeRun, counting_plan, project: Path
) -> None:
    """It was told as a folder that is not there."""
    run = saved_run()
    plan = counting_plan(f'model.start_from="{run.relative_to(project)}@best"')
    with pytest.raises(RunFolderError, match=r"after the last @ stands .* 'best' is none"):
        start_of(plan)


def test_a_run_that_is_in_neither_place_is_told_with_both(counting_plan, project: Path) -> None:
    """It named the folder of the config alone, which may be inside the installed package."""
    with pytest.raises(RunFolderError) as refused:
        start_of(counting_plan('model.start_from="runs/none"'))
    assert str(refused.value) == (
        f"model.start_from: there is no folder 'runs/none' beside the config, in {project}, or in "
        "the working directory; name that of a run"
    )


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        ({"lora_rank": 8}, [], "lora_rank = 8, and the config has model.lora_rank = 32"),
        ({"lora_rank": 0}, [], "lora_rank = 0 (every weight), and the config has"),
        ({"lora_alpha": 8.0}, [], "lora_alpha = 8, and the config has model.lora_alpha = 32"),
        ({}, ["model.lora_rank=0"], "lora_rank = 32, and the config has model.lora_rank = 0"),
        ({"name": "my_model"}, [], "is of the model 'my_model', and the config has"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(
    saved_run: MakeRun, counting_plan, model: dict[str, object], overrides: list[str], words: str
) -> None:
    saved_run(**model)
    with pytest.raises(UsageError) as refused:
        find_start("r", counting_plan(*overrides))
    told = str(refused.value)
    assert told.startswith("r: ")
    assert words in told
    assert "export it with `loops export r OUT --merged` and name OUT as model.name" in told


def test_alpha_scales_nothing_where_there_is_no_adapter(saved_run: MakeRun, counting_plan) -> None:
    saved_run(lora_rank=0, lora_alpha=1.0)
    find_start("r", counting_plan("model.lora_rank=0"))


def test_a_model_is_the_same_by_its_folder_and_not_by_what_it_is_called(
    saved_run: MakeRun, counting_plan, project: Path
) -> None:
    saved_run()
    own = project / "models" / "counting"
    shutil.copytree(bundled_root() / "models" / "counting", own)
    plan = counting_plan()
    (own / "config.json").unlink()  # so that the run's own was the bundled one
    with pytest.raises(UsageError, match="is of the model"):
        find_start("r", plan)


@pytest.mark.parametrize(
    ("kept_here", "reference", "scope", "words"),
    [
        (False, "r", "local", "use that service's scope"),
        (True, "bt://loops:r/weights/u2", "local", "use that service's scope"),
        (True, "r", "serverless", "use --scope local"),
        (
            False,
            "r",
            "tinker",
            "of another service, and scope 'tinker' loads paths that begin with",
        ),
        (True, "r", "tinker", "use --scope local"),
        (True, "tinker://x/weights/y", "serverless", "loads paths that begin with bt://"),
    ],
)
def test_a_scope_loads_what_its_service_keeps(
    saved_run: MakeRun, counting_plan, kept_here: bool, reference: str, scope: str, words: str
) -> None:
    saved_run(kept_here=kept_here)
    with pytest.raises(UsageError, match=words):
        find_start(reference, counting_plan(scope=scope))


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("bt://loops:x/weights/y", "serverless"),
        ("bt://loops:x/weights/y", None),
        ("tinker://x/weights/y", "tinker"),
    ],
)
def test_a_service_s_own_path_needs_no_run_here(
    make_plan: Callable[..., Plan], path: str, scope: str | None
) -> None:
    start = find_start(path, make_plan(scope=scope))
    assert (start.path, start.is_here) == (path, False)


def test_a_checkpoint_is_placed_without_its_optimizer_and_as_it_was_then(
    saved_run: MakeRun, project: Path
) -> None:
    run, other = saved_run(), RunFolder(project / "other")
    assert place_checkpoint(locate("r"), other) == "bt://loops:r/weights/u2"
    placed = other.root / SAVED
    assert sorted(path.name for path in placed.iterdir()) == [
        "adapter_model.safetensors",
        "state.json",
    ]
    for path in sorted(run.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert (placed / "state.json").read_text() == "state.json"


def test_what_is_in_place_already_is_left_as_it_is(saved_run: MakeRun, project: Path) -> None:
    saved_run()
    other = RunFolder(project / "other")
    (other.root / SAVED).mkdir(parents=True)
    place_checkpoint(locate("r"), other)
    assert list((other.root / SAVED).iterdir()) == []


def test_a_checkpoint_that_was_not_kept_is_told_from_one_that_never_was(
    saved_run: MakeRun,
) -> None:
    """Nothing said why an update that the run had saved was not there: `training.keep`."""
    root = saved_run()
    (root / SAVED).rename(root / SAVED.replace("u2", "u4"))
    rows = RunFolder(root).checkpoint_rows
    row = json.loads(rows.read_text())
    later = row | {"update": 4, "folder": SAVED.replace("u2", "u4")}
    rows.write_text("".join(f"{json.dumps(each)}\n" for each in (row, later)))
    with pytest.raises(RunFolderError, match=r"saved and not kept \(training.keep\): it has @4$"):
        locate("r@2")
    with pytest.raises(RunFolderError, match=r"no checkpoint of update 3: it has @4$"):
        locate("r@3")


def test_a_place_that_cannot_be_written_is_named(saved_run: MakeRun, project: Path) -> None:
    saved_run()
    (project / "other").write_text("a file")
    with pytest.raises(RunFolderError, match="cannot be copied to"):
        place_checkpoint(locate("r"), RunFolder(project / "other"))


def test_a_folder_may_have_an_at_sign_in_its_path(
    make_plan: Callable[..., Plan], saved_run: MakeRun, project: Path
) -> None:
    """What came before it was taken for the run, and the working directory was not looked at."""
    saved_run()
    (project / "configs").mkdir()
    (project / "runs@home").mkdir()
    (project / "r").rename(project / "runs@home" / "r")
    plan = make_plan(MODEL, 'model.start_from="runs@home/r"')
    elsewhere = replace(plan.loaded, path=project / "configs" / "train.toml")
    start = start_of(replace(plan, loaded=elsewhere))
    assert start is not None
    assert start.located is not None
    assert start.located.root == project / "runs@home" / "r"
