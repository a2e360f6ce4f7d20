"""The environment of a command: the process's own, over the `.env` files that were found.

Two files are read, in the config's directory and in the working directory; of a name in both
the first counts. `--env-file` is read instead of both. Values are never shown.
"""

import os
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from dotenv import dotenv_values

from loops_cookbook.errors import ConfigError
from loops_cookbook.problems import shown


@dataclass(frozen=True, slots=True)
class Environment:
    """What the `.env` files say, and which they were."""

    values: Mapping[str, str] = field(repr=False)
    """Of the files alone."""
    files: tuple[Path, ...]
    """Those that were read, the one that counts first before the other."""
    looked_for: tuple[Path, ...]
    """Where a file was looked for."""

    @property
    def summary(self) -> str:
        """The files as the check report names them."""
        if self.files:
            return ", ".join(map(str, self.files))
        return f"none (looked in {', '.join(str(path.parent) for path in self.looked_for)})"

    def warnings(self) -> tuple[str, ...]:
        """One line for each file that git tracks; asks git."""
        return tuple(
            f"{shown(path)}: git tracks this file, and would share its keys; run "
            f"`git rm --cached {path.name}` and add it to .gitignore"
            for path in self.files
            if _is_tracked(path)
        )

    def apply(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Put the files' values into the environment, where it does not have them already."""
        for name, value in self.values.items():
            environ.setdefault(name, value)


def read_environment(
    config_directory: Path, *, env_file: Path | None = None, working_directory: Path | None = None
) -> Environment:
    """Read the `.env` files of a command.

    Raises:
        ConfigError: `env_file` is not there, or a file cannot be read as UTF-8 text.
    """
    here = working_directory or Path.cwd()
    is_one_folder = config_directory.resolve() == here.resolve()
    folders = (config_directory,) if is_one_folder else (config_directory, here)
    looked_for = (here / env_file,) if env_file else tuple(folder / ".env" for folder in folders)
    files = tuple(path for path in looked_for if path.is_file())
    if env_file and not files:
        raise ConfigError(f"--env-file {env_file}: no such file; name one that is there")
    values: dict[str, str] = {}
    for path in files:
        values = _values(path) | values
    return Environment(values, files, looked_for)


def _values(path: Path) -> dict[str, str]:
    try:
        values = dotenv_values(path, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown(path)}: is not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{shown(path)}: cannot be read: {reason}") from error
    return {name: value for name, value in values.items() if value is not None}


def _is_tracked(path: Path) -> bool:
    command = ["git", "-C", str(path.parent), "ls-files", "--error-unmatch", "--", path.name]
    # A hook of another repository sets GIT_DIR, which would go before the folder.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(command, capture_output=True, env=environ, timeout=10)
        return done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):  # without git, nothing is tracked
        return False
