"""Which config and which model a name means."""

from pathlib import Path

import pytest

from loops_cookbook.config.bundled import bundled_configs, bundled_root
from loops_cookbook.config.locate import locate_config, resolve_model
from loops_cookbook.errors import ConfigError, ModelError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.toml").touch()
    return tmp_path


@pytest.fixture(scope="module")
def bundled() -> Path:
    return next(bundled_configs())


def model_at(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def refusal(name: str, project: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        locate_config(name, working_directory=project)
    return str(caught.value)


def test_a_config_is_found_in_the_working_directory(project: Path) -> None:
    located = locate_config("own/train.toml", working_directory=project)
    assert (located.path, located.bundled) == (project / "own" / "train.toml", False)


def test_a_config_is_found_among_the_bundled_ones(project: Path, bundled: Path) -> None:
    located = locate_config(str(bundled), working_directory=project)
    assert (located.path, located.bundled) == (bundled_root() / bundled, True)


def test_the_project_goes_before_what_is_bundled(project: Path, bundled: Path) -> None:
    own = project / bundled
    own.parent.mkdir(parents=True)
    own.touch()
    located = locate_config(str(bundled), working_directory=project)
    assert (located.path, located.bundled) == (own, False)


def test_one_folder_under_two_names_is_told_once(tmp_path: Path) -> None:
    """In a checkout it was looked for "in X and in X"."""
    link = tmp_path / "checkout"
    link.symlink_to(bundled_root())
    for here in (bundled_root(), link):
        said = refusal("patterns/none/train.toml", here)
        assert said.startswith(f"patterns/none/train.toml: no such config; looked in {here}; ")


def test_an_absolute_path_is_taken_as_it_is(project: Path) -> None:
    name = project / "own" / ".." / "own" / "train.toml"
    assert locate_config(name).path == project / "own" / "train.toml"


def test_a_config_that_is_nowhere_is_refused_with_where_it_was_looked_for(project: Path) -> None:
    assert refusal("mine.toml", project) == f"mine.toml: no such config; looked in {project}"


def test_a_bundled_name_with_a_slip_is_refused_with_the_near_one(
    project: Path, bundled: Path
) -> None:
    said = refusal(str(bundled).replace("train", "trian"), project)
    assert str(project) in said
    assert str(bundled_root()) in said
    assert said.endswith(f"did you mean {bundled}?")


def test_only_examples_and_patterns_are_looked_up_beside_the_package(project: Path) -> None:
    assert (bundled_root() / "examples").is_dir()
    assert "no such config" in refusal("pyproject.toml", project)
    assert "no such config" in refusal("examples/../pyproject.toml", project)


def test_a_folder_is_refused_with_the_config_in_it(project: Path) -> None:
    said = refusal("own", project)
    assert "is a folder" in said
    assert said.endswith("own/train.toml")


def test_a_bundled_model_is_found_from_any_directory(project: Path) -> None:
    source = resolve_model("models/counting", project / "own", working_directory=project)
    assert (source.kind, source.name) == ("bundled", "models/counting")
    assert source.directory == bundled_root() / "models" / "counting"


def test_a_bundled_model_stays_one_when_the_checkout_is_the_working_directory() -> None:
    root = bundled_root()
    assert resolve_model("models/counting", root, working_directory=root).kind == "bundled"


def test_a_folder_of_the_project_goes_before_a_bundled_model(project: Path) -> None:
    here = model_at(project / "models" / "counting")
    source = resolve_model("models/counting", project / "own", working_directory=project)
    assert (source.kind, source.directory) == ("directory", here)
    beside = model_at(project / "own" / "models" / "counting")
    source = resolve_model("models/counting", project / "own", working_directory=project)
    assert (source.kind, source.directory) == ("directory", beside)


def test_a_folder_is_a_model_by_its_absolute_path(project: Path) -> None:
    directory = model_at(project / "mine")
    source = resolve_model(str(directory), project / "own", working_directory=project)
    assert (source.kind, source.directory) == ("directory", directory)


@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-4B", "gpt2", "a.b/c_d-1.0"])
def test_any_other_name_of_that_form_is_an_id_of_the_hub(name: str, project: Path) -> None:
    source = resolve_model(name, project, working_directory=project)
    assert (source.kind, source.name, source.directory) == ("hub", name, None)


def test_a_folder_without_a_model_does_not_hide_the_hub(project: Path) -> None:
    (project / "gpt2").mkdir()
    assert resolve_model("gpt2", project, working_directory=project).kind == "hub"


@pytest.mark.parametrize("name", ["models/nothing", "/nowhere/model", "./mine", "a/b/c", "a b", ""])
def test_a_name_that_can_be_no_model_is_refused_with_where_it_was_looked_for(
    name: str, project: Path
) -> None:
    with pytest.raises(ModelError, match=r"^model\.name: no model ") as caught:
        resolve_model(name, project / "own", working_directory=project)
    assert "with a config.json at" in str(caught.value)
    assert ("bundled are" in str(caught.value)) == name.startswith("models/")


FETCHABLE_NAME = "smollm2-135m"


def test_a_model_that_can_be_fetched_and_was_not_says_how(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPS_CACHE", str(project / "cache"))
    with pytest.raises(ModelError) as caught:
        resolve_model(FETCHABLE_NAME, project, working_directory=project)
    assert str(caught.value) == (
        "model.name: 'smollm2-135m' is not fetched yet: run `loops models fetch smollm2-135m`"
    )


def test_a_fetched_model_is_found_by_its_name_unless_the_project_has_a_folder_of_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPS_CACHE", str(project / "cache"))
    fetched = model_at(project / "cache" / "models" / FETCHABLE_NAME)
    source = resolve_model(FETCHABLE_NAME, project / "own", working_directory=project)
    assert (source.kind, source.name) == ("fetched", FETCHABLE_NAME)
    assert source.directory == fetched
    own = model_at(project / FETCHABLE_NAME)
    source = resolve_model(FETCHABLE_NAME, project / "own", working_directory=project)
    assert (source.kind, source.directory) == ("directory", own)


def test_a_message_names_the_place_of_the_name(project: Path) -> None:
    with pytest.raises(ModelError, match=r"^MODEL: no model './mine'"):
        resolve_model("./mine", project, working_directory=project, key="MODEL")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("own/trian.toml", "own/train.toml"), ("counting", "examples/counting/train.toml")],
)
def test_a_config_that_is_called_almost_so_is_named(project: Path, name: str, meant: str) -> None:
    assert refusal(name, project).endswith(f"{meant}?")
