"""`loops examples` lists what is bundled."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loops_cookbook.cli.app import app
from loops_cookbook.cli.examples import HINTS, described
from loops_cookbook.config.bundled import bundled_configs, bundled_root


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "train.toml"
    path.write_text('# Counts things. Then\n# it learns.\nrecipe = "rl"  # more\n# later\n')
    return path


def test_a_config_is_described_by_the_first_sentence_of_its_readme(config: Path) -> None:
    readme = config.with_name("README.md")
    readme.write_text("# Counting\n\nA small model counts\npaid orders. It learns fast.\n\nMore.\n")
    assert described(config) == "A small model counts paid orders."


def test_a_config_without_a_readme_is_described_by_its_leading_comment(config: Path) -> None:
    assert described(config) == "Counts things."


def test_a_config_that_says_nothing_has_no_description(config: Path) -> None:
    config.write_text('recipe = "rl"\n# later\n')
    assert described(config) == ""
    config.with_name("README.md").write_text("# A title\n")
    assert described(config) == ""


def test_every_bundled_config_has_one_line_that_says_what_it_shows() -> None:
    result = CliRunner().invoke(app, ["examples"])
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [str(config) for config in bundled_configs()]
    assert all(len(line.split()) > 1 for line in lines)


def test_what_to_type_and_which_of_them_need_a_key_is_said_beside_the_list() -> None:
    """Nobody was told that a folder's name does, nor that most patterns name a hosted model."""
    result = CliRunner().invoke(app, ["examples"])
    assert result.stderr.splitlines() == list(HINTS)
    folders = {config.parent.name: config for config in bundled_configs()}
    names = {
        name: tomllib.loads((bundled_root() / config).read_text(encoding="utf-8"))["model"]["name"]
        for name, config in folders.items()
    }
    here = {name for name, model in names.items() if not model.startswith("Qwen/")}
    assert here == {
        name
        for name, config in folders.items()
        if config.parts[0] == "examples" or name in HINTS[2].replace(";", "").split()
    }
    assert "several_turns_tool" in folders
