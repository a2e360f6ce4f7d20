"""A TOML file, and what the command line changes in it, become one validated config.

Every fault is told, one line each: the file (or the `--set`) at fault, the key, what was found
there and what to do. A config that loads is whole; nothing it names has been looked at yet.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar, cast

from pydantic import BaseModel, ValidationError

from loops_cookbook.config.elsewhere import KEYS, SENTENCES
from loops_cookbook.config.locate import locate_config
from loops_cookbook.config.overrides import (
    Document,
    Override,
    apply_overrides,
    parse_override,
)
from loops_cookbook.config.rl import RLConfig
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.errors import ConfigError
from loops_cookbook.problems import (
    USERS,
    OtherNames,
    Problem,
    found,
    itself,
    one_line,
    problems_in,
    shown,
)

OptionsT = TypeVar("OptionsT", bound=BaseModel)
AnyConfig: TypeAlias = RLConfig | SFTConfig
ConfigT = TypeVar("ConfigT", bound=AnyConfig, covariant=True)
RecipeT = TypeVar("RecipeT", bound=AnyConfig)

RECIPES: Mapping[str, type[AnyConfig]] = {"rl": RLConfig, "sft": SFTConfig}
"""What a config is, by its `recipe`."""

_AT = re.compile(r" \(at line (\d+), (column \d+)\)$")


@dataclass(frozen=True)  # with slots, LoadedConfig[X](...) fails on Python 3.11
class LoadedConfig(Generic[ConfigT]):
    """A config, and where it came from."""

    config: ConfigT
    path: Path
    """The file, absolute."""
    bundled: bool
    """Whether the file is one that ships with the package."""
    working_directory: Path
    text: str
    """The file as it stands."""
    overrides: tuple[Override, ...] = ()

    @property
    def directory(self) -> Path:
        """Where the paths and modules of the config are looked for."""
        return self.path.parent

    @property
    def output_dir(self) -> Path:
        """The folder that holds the config's runs, in the working directory."""
        named = self.config.output.output_dir
        return self.working_directory / (named or Path("runs", self.directory.name))

    def of_recipe(self, config: type[RecipeT]) -> "LoadedConfig[RecipeT] | None":
        """This, as one of a recipe; None where it is of another."""
        return cast("LoadedConfig[RecipeT]", self) if isinstance(self.config, config) else None

    def beside(self, name: str) -> Path:
        """The file that a path in the config means."""
        return self.directory / os.path.expanduser(name)

    def options(
        self,
        schema: type[OptionsT] | None,
        table: Mapping[str, object] | None,
        *,
        place: tuple[str, ...],
    ) -> OptionsT | None:
        """Validate a table that belongs to the user's code, such as `[episode.options]`.

        Args:
            schema: the user's options model; None takes no table.
            table: what the config has there; None where it has nothing.
            place: the table's own place in the config.

        Raises:
            ConfigError: the table does not satisfy the model, or there is no model for it.
        """
        if schema is None:
            if table is not None:
                problem = Problem(place, "set, but the code takes no options; remove it")
                raise ConfigError(self._told([problem]))
            return None
        try:
            return itself(schema.model_validate(table or {}), schema)
        except USERS as error:  # of a validator of the user's model
            below = [Problem((*place, *p.place), p.text) for p in problems_in(error, schema)]
            raise ConfigError(self._told(below)) from error

    def _told(self, problems: Iterable[Problem]) -> str:
        return _told(problems, self.path, self.overrides)


def load_config(
    name: str | Path, overrides: Sequence[str] = (), *, working_directory: Path | None = None
) -> LoadedConfig[AnyConfig]:
    """Find, read and validate a config.

    Args:
        name: as typed; looked up in the working directory, then among what is bundled.
        overrides: `table.key=value` each, put over the file in this order.
        working_directory: where the command was started; by default the current directory.

    Raises:
        ConfigError: no such file, not TOML, or a config that cannot stand.
    """
    here = working_directory or Path.cwd()
    located = locate_config(name, working_directory=here)
    text = _read(located.path)
    document = _parse(text, located.path)
    parsed = tuple(parse_override(override).over(document) for override in overrides)
    document = apply_overrides(document, parsed)
    schema = _schema(document.get("recipe", "rl"), located.path, parsed)
    try:
        config = schema.model_validate(document)
    except ValidationError as error:
        problems = problems_in(error, schema, OtherNames(KEYS, SENTENCES))
        raise ConfigError(_told(problems, located.path, parsed)) from error
    return LoadedConfig(config, located.path, located.bundled, here, text, parsed)


def recipe_of(name: str | Path) -> str | None:
    """The recipe that a config names, whatever else is in it; None where that cannot be known."""
    try:
        path = locate_config(name, working_directory=Path.cwd()).path
        recipe = _parse(_read(path), path).get("recipe")
    except ConfigError:
        return None
    return recipe if isinstance(recipe, str) and recipe in RECIPES else None


def _schema(recipe: object, path: Path, overrides: Sequence[Override]) -> type[AnyConfig]:
    """The recipe's config; a missing `recipe` is told with what else is wrong with an RL one."""
    if isinstance(recipe, str) and recipe in RECIPES:
        return RECIPES[recipe]
    known = " or ".join(f"'{name}'" for name in RECIPES)
    problem = Problem(("recipe",), f"found {found(recipe)}; use {known}")
    raise ConfigError(_told([problem], path, overrides))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown(path)}: is not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{shown(path)}: cannot be read as a config: {reason}") from error


def _parse(text: str, path: Path) -> Document:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        told = _AT.sub(r" at \2", str(error))
        at = _AT.search(str(error))
        where = f"{shown(path)}:{at[1]}" if at else shown(path)
        mend = "mend the line" if at else "mend its end"
        raise ConfigError(f"{where}: not TOML: {told}; {mend}") from error


def _told(problems: Iterable[Problem], path: Path, overrides: Sequence[Override]) -> str:
    """One line a problem, each beginning with the file or the override at fault."""

    def source(problem: Problem) -> str:
        covering = [o for o in overrides if o.covers(problem.place)]
        covering = covering or [o for o in overrides if o.brought(problem.place)]
        return f"--set {one_line(covering[-1].text)}" if covering else shown(path)

    return "\n".join(f"{source(problem)}: {problem}" for problem in problems)
