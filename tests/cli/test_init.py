"""`loops init` makes a project that works as it is."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loops_cookbook.cli.app import app
from loops_cookbook.cli.init import copy_example, make_project
from loops_cookbook.config.bundled import bundled_configs, bundled_root
from loops_cookbook.config.imports import import_class
from loops_cookbook.config.load import load_config
from loops_cookbook.episodes import Episode
from loops_cookbook.errors import UsageError
from loops_cookbook.tasks import load_tasks

FILES = {".env.example", ".gitignore", "episode.py", "tasks.jsonl", "test_episode.py", "train.toml"}


def test_the_command_makes_the_project_and_says_what_is_next(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    result = CliRunner().invoke(app, ["init", str(directory)])
    assert result.exit_code == 0
    assert {path.name for path in directory.iterdir()} == FILES
    assert result.stdout.splitlines()[-1] == f"Next: loops check {directory / 'train.toml'}"


def test_other_files_of_the_folder_are_left(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("mine")
    make_project(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES | {"notes.md"}


@pytest.mark.parametrize("below", ["", "project"])
def test_a_file_in_the_place_of_the_folder_is_told_as_that(tmp_path: Path, below: str) -> None:
    """`File exists`, or `Not a directory`, was told of the folder to make."""
    file = tmp_path / "notes.md"
    file.touch()
    with pytest.raises(
        UsageError, match=f"{file}: is a file, where a folder is to be; name another$"
    ):
        make_project(file / below)


@pytest.mark.parametrize("name", sorted(FILES))
def test_nothing_is_written_where_one_of_the_files_exists(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match=rf"holds some of a project's files \({name}\)"):
        make_project(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "mine"}


def test_a_second_project_in_one_folder_is_refused_with_what_is_there(tmp_path: Path) -> None:
    """It said of one file that it was there, and to name a folder without it."""
    make_project(tmp_path)
    with pytest.raises(UsageError) as caught:
        make_project(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: holds a project already (.env.example, episode.py, .gitignore, tasks.jsonl, "
        "test_episode.py, train.toml), and none is written over; name another folder, or move "
        "them away"
    )


def test_the_config_and_its_tasks_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    make_project(tmp_path)
    loaded = load_config(tmp_path / "train.toml")
    config = loaded.config
    assert config.model.name == "models/counting"
    assert config.episode.class_ is not None
    episode = import_class(
        config.episode.class_, loaded.directory, key="episode.class", base=Episode
    )
    schema = sys.modules.pop(episode.__module__).Question
    tasks = load_tasks(loaded.beside(config.episode.tasks), schema)
    assert len(tasks) >= config.training.groups_per_update


def test_keys_and_runs_are_kept_out_of_git(tmp_path: Path) -> None:
    make_project(tmp_path)
    assert {".env", "runs/"} <= set((tmp_path / ".gitignore").read_text().split())


@pytest.mark.slow
def test_the_projects_own_test_passes(tmp_path: Path) -> None:
    make_project(tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "patterns/custom_runtime/group_ranking/train.toml",
        "patterns/custom_runtime/group_ranking/",
        "group_ranking",
    ],
)
def test_an_example_is_copied_by_any_of_its_names(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "a" / "mine"
    result = CliRunner().invoke(app, ["init", str(directory), "--example", name])
    assert result.exit_code == 0
    copied = {path.name: path.read_bytes() for path in directory.iterdir()}
    bundled = bundled_root() / "patterns" / "custom_runtime" / "group_ranking"
    assert copied.pop(".gitignore")
    assert set(copied) == {"shortest_episode.py", "tasks.jsonl", "train.toml"}
    assert all(copied[name] == (bundled / name).read_bytes() for name in copied)
    assert result.stdout.splitlines()[-1] == f"Next: loops check {directory / 'train.toml'}"


def test_runs_and_keys_of_a_copied_example_are_kept_out_of_git(tmp_path: Path) -> None:
    """`git add .` beside a copy took its runs, and the keys in .env."""
    copy_example("group_ranking", tmp_path / "a")
    assert {".env", "runs/"} <= set((tmp_path / "a" / ".gitignore").read_text().split())


def test_a_gitignore_that_is_there_stays_and_keeps_no_example_out(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("mine")
    made = copy_example("group_ranking", tmp_path)
    assert tmp_path / ".gitignore" not in made
    assert (tmp_path / ".gitignore").read_text() == "mine"


def test_every_example_can_be_copied_whole_and_without_what_is_made_of_it(tmp_path: Path) -> None:
    for number, config in enumerate(bundled_configs()):
        made = copy_example(str(config), tmp_path / str(number))
        assert load_config(tmp_path / str(number) / "train.toml").config
        assert not any({"runs", "__pycache__"} & set(path.parts) for path in made)


@pytest.mark.parametrize(
    ("name", "guess"), [("grup_ranking", "did you mean group_ranking"), ("zz", "`loops examples`")]
)
def test_an_example_that_is_not_there_is_refused_with_a_guess(
    tmp_path: Path, name: str, guess: str
) -> None:
    with pytest.raises(UsageError, match=guess):
        copy_example(name, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_an_example_is_written_over_nothing(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("mine")
    with pytest.raises(UsageError, match=r"holds some of a project's files \(tasks.jsonl\)"):
        copy_example("group_ranking", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]
