"""Writes the reference pages that come from the code: `make docs`.

Each page is a function without arguments that returns the page's whole text. A test makes every
page in memory and compares it with the file, so a page is never behind its code.
"""

import ast
import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import typer.main
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from loops_cookbook.cli.app import app
from loops_cookbook.config.rl import RLConfig
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.recipes.capabilities import engines_page
from loops_cookbook.recipes.metrics import metrics_page
from loops_cookbook.recipes.sft_metrics import sft_metrics_section

REFERENCE = Path(__file__).parent / "reference"
SOURCE = Path(__file__).parents[1] / "src" / "loops_cookbook"

CONFIG_INTRODUCTION = """\
# The config file

A config is a TOML file. An unknown key is an error, and so is a value of another type: nothing
is converted. Durations are seconds. Paths are relative to the config's folder, `output_dir`
alone to the working directory. Any key can be set for one command with `--set table.key=value`,
where the value is TOML.

What follows is a config with `recipe = "rl"`; below it stands what is different with
`recipe = "sft"`.
"""

SFT_INTRODUCTION = """\
# Supervised fine-tuning

A config with `recipe = "sft"` has `[compute]`, `[model]` and `[output]` as above, and these.
"""

CLI_INTRODUCTION = """\
# The command `loops`

stdout carries the answer, stderr everything else. An error is one line: what was found, where,
and what to do.

| exit status | meaning |
| ---: | --- |
| 0 | done |
| 1 | it ran and ended badly: the run failed, or a rule stopped it |
| 2 | refused before anything was launched |
| 70 | a bug of loops-cookbook, with its traceback |
| 130 | interrupted (Ctrl-C), after everything was released, or at once after the second |
| 143 | told to end (SIGTERM), likewise, within 20 seconds |
| 129 | hung up (SIGHUP: the terminal or the connection was closed), the same |
"""

MODULES_INTRODUCTION = """\
# Modules

Each module of `loops_cookbook` with the first sentence of its own docstring, which goes on to say
the module's rule. How they build on one another is told in [The house](../design/house.md).
"""


def config_page() -> str:
    """Every table and key of a config."""
    shared = {field.annotation for field in RLConfig.model_fields.values()}
    return "\n".join(
        [
            CONFIG_INTRODUCTION,
            *_tables(RLConfig, ()),
            SFT_INTRODUCTION,
            *_tables(SFTConfig, (), left_out=shared),
        ]
    )


def whole_metrics_page() -> str:
    """The metrics of every recipe."""
    return metrics_page() + sft_metrics_section()


def cli_page() -> str:
    """Every command with its arguments and options."""
    group: Any = typer.main.get_command(app)
    sections = [_command(name, command) for name, command in sorted(group.commands.items())]
    return "\n".join([CLI_INTRODUCTION, *sections])


def modules_page() -> str:
    """Every module, package by package."""
    packages: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE)
        told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if told and "project" not in name.parts:  # what `loops init` copies is no module
            package = f"`{name.parts[0]}`" if len(name.parts) > 1 else "At the top"
            packages.setdefault(package, []).append((f"`{name}`", _first_sentence(told)))
    sections = [
        f"## {package}\n\n{_table(('module', 'what it is'), rows)}"
        for package, rows in sorted(packages.items())
    ]
    return "\n".join([MODULES_INTRODUCTION, *sections])


PAGES: Mapping[str, Callable[[], str]] = {
    "config.md": config_page,
    "cli.md": cli_page,
    "engines.md": engines_page,
    "metrics.md": whole_metrics_page,
    "modules.md": modules_page,
}
"""Each generated page by its file's name."""


def main() -> None:
    """Write every page."""
    REFERENCE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8", newline="\n")


def _tables(
    model: type[BaseModel], place: tuple[str, ...], *, left_out: Container[object] = ()
) -> Iterator[str]:
    """A section for a table of the config, then one for each table in it that is not left out."""
    properties = model.model_json_schema(by_alias=True)["properties"]
    rows: list[tuple[str, ...]] = []
    below: list[tuple[type[BaseModel], tuple[str, ...]]] = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        inner = _model_in(field)
        if inner is None:
            schema, text = properties[key], field.description or ""
            rows.append((f"`{key}`", _type(schema), _default(field), text))
        elif field.annotation not in left_out:
            is_named = get_origin(field.annotation) is dict
            below.append((inner, (*place, key, "<name>") if is_named else (*place, key)))
    title = f"## `[{'.'.join(place)}]`" if place else "## Before any table"
    yield f"{title}\n\n{_sentence(model.__doc__)}\n"
    if rows:
        yield _table(("key", "type", "default", "meaning"), rows)
    for inner, deeper in below:
        yield from _tables(inner, deeper)


def _model_in(field: FieldInfo) -> type[BaseModel] | None:
    """The table that a field is, or that each of its named tables is."""
    candidates = [field.annotation, *get_args(field.annotation)]
    models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    return models[0] if models else None


def _type(schema: Mapping[str, Any]) -> str:
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "anyOf" in schema:
        choices = cast(list[Mapping[str, Any]], schema["anyOf"])
        return " or ".join(_type(choice) for choice in choices if choice.get("type") != "null")
    if schema["type"] == "array":
        return f"list of {_type(schema['items'])}s"
    words = {"integer": "whole number", "boolean": "`true` or `false`", "object": "table"}
    word = str(schema["type"])
    return ", ".join([words.get(word, word), *_bounds(schema)])


def _bounds(schema: Mapping[str, Any]) -> Iterator[str]:
    told = {
        "minimum": "{} or more",
        "exclusiveMinimum": "more than {}",
        "maximum": "at most {}",
        "exclusiveMaximum": "less than {}",
    }
    for name, words in told.items():
        if name in schema:
            yield words.format(schema[name])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None:
        return "unset"
    return f"`{re.sub(r'e-0', 'e-', json.dumps(default))}`"


def _command(name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(["loops", name, *(_argument(p) for p in arguments)])
    rows = [(f"`{_argument(p)}`", p.help or "") for p in arguments]
    rows += [(f"`{_option(p)}`", p.help or "") for p in options]
    return f"## `{usage}`\n\n{_sentence(command.help)}\n\n{_table(('what', 'meaning'), rows)}"


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    each = name if parameter.required else f"[{name}]"
    return f"{each}..." if parameter.nargs == -1 else each


def _option(parameter: Any) -> str:
    names = ", ".join(parameter.opts)
    return names if parameter.is_flag else f"{names} {parameter.metavar or parameter.name.upper()}"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", _sentence(text.partition("\n\n")[0]), maxsplit=1)[0]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = [[_sentence(cell).replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


if __name__ == "__main__":
    main()
