"""Which file, folder or model a name means; what is in the project goes before what is bundled.

A config's name is looked up in the working directory, then among the bundled examples and
patterns. A model's name is a folder (beside the config, then in the working directory), a
bundled model, one that can be fetched, or else an id of the hub.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loops_cookbook.config.bundled import (
    FOLDERS,
    bundled_configs,
    bundled_models,
    bundled_root,
)
from loops_cookbook.config.fetched import FETCHABLE, fetched_folder, is_fetched
from loops_cookbook.errors import ConfigError, ModelError
from loops_cookbook.problems import nearest, shown

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Located:
    """The config file that a name means."""

    path: Path
    """Absolute."""
    bundled: bool
    """Whether it is one that ships with the package."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is read from."""

    kind: Literal["bundled", "fetched", "directory", "hub"]
    name: str
    """As the config says it."""
    directory: Path | None
    """Absolute; None for a model of the hub."""


def locate_config(name: str | Path, *, working_directory: Path | None = None) -> Located:
    """Find the config that `name` means.

    Raises:
        ConfigError: there is no such file; the message says where it was looked for.
    """
    here = working_directory or Path.cwd()
    path = _absolute(here / name)
    if path.is_file():
        return Located(path, bundled=False)
    if path.is_dir():
        raise ConfigError(f"{shown(path)}: is a folder; name the config in it{_one_in(path)}")
    if not _could_be_bundled(name):
        near = _meant(path)
        instead = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"{name}: no such config; looked in {here}{instead}")
    root = bundled_root()
    if (root / name).is_file():
        return Located(_absolute(root / name), bundled=True)
    near = nearest(str(name), [str(config) for config in bundled_configs()])
    looked_in = f"{here}" if here.resolve() == root.resolve() else f"{here} and in {root}"
    raise ConfigError(
        f"{name}: no such config; looked in {looked_in}; "
        + (f"did you mean {near}?" if near else "`loops examples` lists those that are bundled")
    )


def resolve_model(
    name: str,
    config_directory: Path,
    *,
    working_directory: Path | None = None,
    key: str = "model.name",
) -> ModelSource:
    """Say what kind of model a name means; nothing is downloaded.

    A folder is a model when it holds a `config.json`.

    Args:
        name: a folder, a bundled model, one that can be fetched, or an id of the hub.
        config_directory: where a folder is looked for first.
        working_directory: where it is looked for then; None: the process's.
        key: what a message calls the place of the name.

    Raises:
        ModelError: the name is a path, or that of a bundled model, and there is nothing there; or
            it can be fetched and was not.
    """
    beside = [config_directory, working_directory or Path.cwd()]
    candidates = [_absolute(folder / os.path.expanduser(name)) for folder in beside]
    bundled = _absolute(bundled_root() / name) if name.startswith("models/") else None
    for directory in [*candidates, *([bundled] if bundled else [])]:
        if (directory / "config.json").is_file():
            is_bundled = bundled is not None and directory.resolve() == bundled.resolve()
            return ModelSource("bundled" if is_bundled else "directory", name, directory)
    if name in FETCHABLE:
        if not is_fetched(name):
            raise ModelError(f"{key}: {name!r} is not fetched yet: run `loops models fetch {name}`")
        return ModelSource("fetched", name, fetched_folder(name))
    if bundled is None and _HUB_ID.match(name) and not name.startswith("."):
        return ModelSource("hub", name, None)
    looked_in = ", ".join(dict.fromkeys(map(str, candidates)))
    known = f"; bundled are {', '.join(bundled_models())}" if bundled else ""
    raise ModelError(
        f"{key}: no model {name!r}: no folder with a config.json at {looked_in}{known}; "
        "name a folder that has one, a bundled model or a hub id"
    )


def _absolute(path: Path) -> Path:
    """Without `..`, and with symbolic links kept: paths are shown as they were reached."""
    return Path(os.path.abspath(path))


def _one_in(directory: Path) -> str:
    config = directory / "train.toml"
    return f", such as {shown(config)}" if config.is_file() else ""


def _meant(path: Path) -> str | None:
    """A config of almost that name beside where it was looked for, or the bundled one in a folder
    of exactly that name."""
    if near := nearest(path.name, (each.name for each in path.parent.glob("*.toml"))):
        return shown(path.with_name(near))
    return next((str(each) for each in bundled_configs() if each.parent.name == path.name), None)


def _could_be_bundled(name: str | Path) -> bool:
    parts = Path(name).parts
    return bool(parts) and parts[0] in FOLDERS and ".." not in parts
