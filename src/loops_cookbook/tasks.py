"""Tasks: one JSON object a line, each validated by the Episode's task model before anything runs.

`load_tasks` reads the whole file and reports every bad line, not the first alone. Blank lines
are skipped and keep their number. A file is UTF-8, with or without a byte order mark.
"""

import codecs
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, NoReturn, TypeVar

from pydantic import BaseModel

from loops_cookbook.errors import TaskFileError
from loops_cookbook.problems import USERS, found, itself, nearest, one_line, problems_in, shown

TaskT = TypeVar("TaskT", bound=BaseModel, covariant=True)
ValueT = TypeVar("ValueT", bound=BaseModel)

PROBLEMS_SHOWN = 20
"""Bad lines are told one by one up to here; a count stands for the rest."""


@dataclass(frozen=True)  # with slots, Task[X](...) fails on Python 3.11
class Task(Generic[TaskT]):
    """One line of a tasks file."""

    index: int
    """Its place in the file, from 0, blank lines not counted."""
    name: str
    """The value's `name` if that is a string, else `source`."""
    value: TaskT
    source: str
    """File and line, such as `tasks.jsonl:17`."""


def load_tasks(
    path: Path, schema: type[ValueT], *, kind: Literal["tasks", "data"] = "tasks"
) -> list[Task[ValueT]]:
    """Read a tasks file, in its order.

    Args:
        path: a JSONL file.
        schema: the pydantic model that each line must satisfy.
        kind: what messages call the file: `data` has rows, each of which is read as a task is.

    Raises:
        TaskFileError: there is no such file, it holds no task, or lines of it are wrong; each
            wrong line is named as `file:line: field: what was found; what to do`.
    """
    tasks: list[Task[ValueT]] = []
    problems: list[str] = []
    line_of: dict[str, int] = {}
    for number, line in _lines(path, kind):
        try:
            value = _value(line, schema)
            name = _name(value, schema)
        except _BadLine as bad:
            problems += [f"{shown(path)}:{number}: {text}" for text in bad.texts]
            continue
        source = f"{path.name}:{number}"
        task = Task(len(tasks), name if isinstance(name, str) else source, value, source)
        if task.name in line_of:
            problems.append(
                f"{shown(path)}:{number}: name: {found(task.name)} is already the name of line "
                f"{line_of[task.name]}; give each task its own"
            )
        line_of.setdefault(task.name, number)
        tasks.append(task)
    if problems:
        raise TaskFileError(_listed(problems))
    if not tasks:
        item = "task" if kind == "tasks" else "row"
        raise TaskFileError(f"{shown(path)}: holds no {item}; write one JSON object a line")
    return tasks


class _BadLine(Exception):
    def __init__(self, *texts: str) -> None:
        self.texts = texts


def _lines(path: Path, kind: str) -> Iterator[tuple[int, bytes]]:
    """Every line that is not blank, with its number from 1."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        if path.is_symlink():
            raise TaskFileError(
                f"{shown(path)}: is a link to {os.readlink(path)!r}, which is not there; mend it"
            ) from error
        near = nearest(path.name, (each.name for each in path.parent.glob("*.jsonl")))
        instead = f"did you mean {near}?" if near else "write one JSON object a line there"
        raise TaskFileError(f"{shown(path)}: no such {kind} file; {instead}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise TaskFileError(f"{shown(path)}: cannot be read as a {kind} file: {reason}") from error
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TaskFileError(f"{shown(path)}: is UTF-16 text; save it as UTF-8")
    # Split as bytes: text has more line ends (such as U+2028) than JSON lines have.
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _value(line: bytes, schema: type[ValueT]) -> ValueT:
    text = _text(line)
    _require_object(text)
    try:
        return itself(schema.model_validate_json(text), schema)
    except USERS as error:  # of a validator of the user's model
        raise _BadLine(*map(str, problems_in(error, schema))) from error


def _name(value: BaseModel, schema: type[BaseModel]) -> object:
    try:
        return getattr(value, "name", None)
    except USERS as error:  # it may be a property
        raise _BadLine(*map(str, problems_in(error, schema))) from error


def _text(line: bytes) -> str:
    try:
        return line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise _BadLine(
            f"byte {error.start + 1} of the line is {line[error.start]:#04x}, which is not UTF-8; "
            "save the file as UTF-8"
        ) from error


def _require_object(text: str) -> None:
    """Hold a line to JSON's own rules, which the parsers forgive in part."""
    try:
        value = json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise _BadLine(
            f"not JSON: {error.msg} at column {error.colno}; write one JSON object a line"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"not JSON that can be read: {one_line(str(error))}") from error
    if not isinstance(value, dict):
        raise _BadLine(f"found {found(value)}; write one JSON object a line")


def _no_key_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _BadLine(f"{twice}: stands twice in one object; keep one")
    return value


def _no_constant(word: str) -> NoReturn:
    raise _BadLine(f"found {word}, which is not JSON; use a number, a string or null")


def _listed(problems: list[str]) -> str:
    rest = len(problems) - PROBLEMS_SHOWN
    more = [f"... and {rest} more like these; mend the first and check again"] if rest > 0 else []
    return "\n".join(problems[:PROBLEMS_SHOWN] + more)
