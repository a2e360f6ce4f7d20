"""The `.env` files of a command."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from loops_cookbook.config.environment import Environment, read_environment
from loops_cookbook.errors import ConfigError


@pytest.fixture
def config_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "own"
    directory.mkdir()
    return directory


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path


def read(config_directory: Path, here: Path, env_file: str | None = None) -> Environment:
    path = Path(env_file) if env_file else None
    return read_environment(config_directory, env_file=path, working_directory=here)


def test_the_file_beside_the_config_goes_before_the_other(
    config_directory: Path, here: Path
) -> None:
    (config_directory / ".env").write_text("A=1\nB='x y'  # a comment\n")
    (here / ".env").write_text("A=2\nexport C=3\n")
    environment = read(config_directory, here)
    assert environment.values == {"A": "1", "B": "x y", "C": "3"}
    assert environment.summary == f"{config_directory / '.env'}, {here / '.env'}"


def test_without_a_file_the_report_says_where_it_was_looked_for(
    config_directory: Path, here: Path
) -> None:
    environment = read(config_directory, here)
    assert environment.values == {}
    assert environment.summary == f"none (looked in {config_directory}, {here})"


def test_a_directory_that_is_both_is_looked_in_once(here: Path) -> None:
    assert read(here, here).summary == f"none (looked in {here})"


def test_a_directory_under_two_names_is_looked_in_once(here: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(here)
    assert read(link, here).summary == f"none (looked in {link})"


def test_env_file_is_read_instead_of_both(config_directory: Path, here: Path) -> None:
    (config_directory / ".env").write_text("A=1")
    (here / "keys").write_text("B=2")
    environment = read(config_directory, here, "keys")
    assert (environment.values, environment.files) == ({"B": "2"}, (here / "keys",))


def test_an_env_file_that_is_not_there_is_refused(config_directory: Path, here: Path) -> None:
    with pytest.raises(ConfigError, match="--env-file keys: no such file"):
        read(config_directory, here, "keys")


def test_a_file_that_is_not_utf_8_is_refused(config_directory: Path, here: Path) -> None:
    (here / ".env").write_bytes(b"A=caf\xe9")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read(config_directory, here)


def test_a_file_that_cannot_be_read_is_told(
    config_directory: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of another user ended the command with a traceback, as our bug."""

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (here / ".env").write_text("A=1")
    monkeypatch.setattr("builtins.open", forbidden)  # as root, nothing is another user's
    with pytest.raises(ConfigError, match=r"\.env: cannot be read: Permission denied"):
        read(config_directory, here)


def test_a_name_without_a_value_is_passed_over(config_directory: Path, here: Path) -> None:
    (here / ".env").write_text("A\nB=\n")
    assert read(config_directory, here).values == {"B": ""}


def test_the_real_environment_goes_before_the_files(config_directory: Path, here: Path) -> None:
    (here / ".env").write_text("A=1\nB=2\n")
    environ = {"A": "real"}
    read(config_directory, here).apply(environ)
    assert environ == {"A": "real", "B": "2"}


def test_values_are_not_shown(config_directory: Path, here: Path) -> None:
    (here / ".env").write_text("KEY=secret-123")
    assert "secret-123" not in repr(read(config_directory, here))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_file_that_git_tracks_is_warned_of(config_directory: Path, here: Path) -> None:
    def git(*arguments: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        subprocess.run(["git", "-C", here, *arguments], check=True, capture_output=True, env=clean)

    for directory in (here, config_directory):
        (directory / ".env").write_text("A=1")
    git("init")
    assert read(config_directory, here).warnings() == ()
    git("add", "own/.env")
    (warning,) = read(config_directory, here).warnings()
    assert str(config_directory / ".env") in warning
    assert "git rm --cached" in warning
