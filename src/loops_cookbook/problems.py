"""What is wrong with something a person wrote, told in one line a fault.

pydantic finds the faults of a config, of options and of tasks; `problems_in` retells each as a
`Problem`: the place, what was found there, what to do. A model that has rules between its own
keys raises `BrokenRules`, whose problems are placed below the model. No line ever holds a line
break, whatever was found.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import Repr
from types import UnionType
from typing import Annotated, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

ModelT = TypeVar("ModelT", bound=BaseModel)

MOST_SHOWN = 200
"""Characters of a value that a message shows."""

MOST_SAID = 1000
"""Characters of what an exception says that a message repeats."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "named values (a table in TOML, an object in JSON)",
    "model_type": "named values (a table in TOML, an object in JSON)",
    "model_attributes_type": "named values (a table in TOML, an object in JSON)",
    "none_required": "nothing",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "string_too_short": "a string of {min_length} or more characters",
    "string_too_long": "a string of {max_length} or fewer characters",
    "too_short": "{min_length} or more items",
    "too_long": "{max_length} or fewer items",
    "string_pattern_mismatch": "a string that matches {pattern}",
}
"""What to use instead, by pydantic's type of an error."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault."""

    place: tuple[str | int, ...]
    """Keys and indices from the outermost on; empty where the whole is meant."""
    text: str
    """What was found, then what to do."""

    @property
    def where(self) -> str:
        """The place as TOML writes it: `training.group_size`, `sampling.stop[0]`."""
        return dotted(self.place)

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.place else self.text


class BrokenRules(ValueError):
    """Raised by a model's validator: rules between its keys that do not hold."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(map(str, self.problems)))


@dataclass(frozen=True, slots=True)
class OtherNames:
    """Names by which people may look for a key, beside its own."""

    keys: Mapping[str, tuple[str, ...]]
    """For each the keys that it may mean, as dotted paths; the first that the model has."""
    sentences: Mapping[str, str]
    """For each that means no key what to do."""


USERS = (Exception, SystemExit, GeneratorExit)
"""What code of a user may raise, but for what a person or a signal ends a command by."""


class NotItself(TypeError):
    """Raised for what a validator of a user's model gave in place of the model."""


def itself(value: object, model: type[ModelT]) -> ModelT:
    """A model that was validated; one of its own validators may have given something else.

    Raises:
        NotItself: it did.
    """
    if isinstance(value, model):
        return value
    raise NotItself(
        f"a validator of {model.__name__} gave {found(value)} in its place; let it end with "
        "`return self`"
    )


def problems_in(
    error: BaseException,
    model: type[BaseModel],
    others: OtherNames = OtherNames({}, {}),
) -> tuple[Problem, ...]:
    """Retell what `model` raised about a value: pydantic's error, or any of its validators'."""
    if isinstance(error, NotItself):
        return (Problem((), str(error)),)
    if not isinstance(error, ValidationError):
        what = f"{model.__name__} raised {type(error).__name__}: {error}".removesuffix(": ")
        return (Problem((), f"{one_line(what)}; let it raise ValueError on a bad value"),)
    told = error.errors(include_url=False)
    return tuple(p for details in told for p in _retold(details, model, others))


def dotted(place: Iterable[str | int]) -> str:
    """A place as one word; keys that TOML would quote are quoted."""
    word = ""
    for part in place:
        if isinstance(part, int):
            word += f"[{part}]"
        else:
            key = part if _BARE_KEY.match(part) else json.dumps(part, ensure_ascii=False)
            word += f".{key}" if word else key
    return word


def found(value: object) -> str:
    """A value as a message shows it: short, and in one line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    short = Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    try:
        text = one_line(short.repr(value))
    except ValueError:  # an int of more digits than Python writes
        text = f"a value of type {type(value).__name__} that is too long to be written"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


def said(error: BaseException) -> str:
    """What an exception says: in one line, not too long, and without what moves a terminal.

    It may come from user code, so nothing is taken for granted, not even that it can be asked.
    """
    try:
        text = str(error)
    except Exception as fault:  # whatever its own __str__ raises
        return f"(its __str__ raised {type(fault).__name__})"
    is_cut = len(text) > MOST_SAID
    kept = one_line("".join(c if c.isprintable() else " " for c in text[:MOST_SAID]))
    return f"{kept}..." if is_cut else kept


def one_line(text: str) -> str:
    """The text without its line breaks."""
    return " ".join(text.split())


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was most likely meant, if one is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return near[0] if near else None


def places_of(key: str, model: type[BaseModel], others: OtherNames) -> list[str]:
    """The dotted paths of the keys of that name, then of those that others call so."""
    paths = {dotted(path): path[-1] for path in _every_key(model)}
    named = [path for path, last in paths.items() if last == key]
    return named + [path for path in others.keys.get(key, ()) if path in paths]


def shown(path: Path) -> str:
    """A path as a message shows it: relative where it lies below the working directory."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _retold(details: ErrorDetails, model: type[BaseModel], others: OtherNames) -> Iterator[Problem]:
    place = details["loc"]
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, BrokenRules):
        yield from (replace(p, place=(*place, *p.place)) for p in cause.problems)
    else:
        yield Problem(place, _text(details, model, others))


def _text(details: ErrorDetails, model: type[BaseModel], others: OtherNames) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "missing":
        return _missing(details["loc"], model)
    if kind == "extra_forbidden":
        return f"unknown key{_instead(details['loc'], model, others)}"
    if kind in ("value_error", "assertion_error"):
        return one_line(str(context.get("error") or details["msg"]))
    if kind in _WANTED:
        return f"found {found(details['input'])}; use {_WANTED[kind].format_map(context)}"
    return one_line(f"found {found(details['input'])}; {details['msg']}")


def _missing(place: tuple[str | int, ...], model: type[BaseModel]) -> str:
    """What to add, where it can be only one thing."""
    parts = [p for annotation in _annotations_at(model, place) for p in _alternatives(annotation)]
    match [get_args(part) for part in parts if get_origin(part) is Literal]:
        case [(str(word),)]:
            return f'missing; add {place[-1]} = "{word}"'
        case _:
            return "missing; add it"


def _instead(place: tuple[str | int, ...], model: type[BaseModel], others: OtherNames) -> str:
    """What to write instead of a key that there is not."""
    *table, key = place
    known = _keys(_annotations_at(model, table))
    if elsewhere := places_of(str(key), model, others):
        return f"; did you mean {elsewhere[0]}?"
    if key in others.sentences:
        return f"; {others.sentences[str(key)]}"
    if near := nearest(str(key), known):
        return f"; did you mean {near}?"
    return f"; the keys here are {', '.join(known)}" if known else ""


def _annotations_at(model: type[BaseModel], place: Iterable[str | int]) -> list[object]:
    """The types that may stand at a place below `model`."""
    here: list[object] = [model]
    for key in place:
        here = [inner for annotation in here for inner in _step(annotation, key)]
    return here


def _step(annotation: object, key: str | int) -> Iterator[object]:
    for part in _alternatives(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield from (field for name, field in _fields(part).items() if name == key)
        else:  # a list or a dict: the type of what it holds
            yield from [inner for inner in get_args(part) if inner is not ...][-1:]


def _alternatives(annotation: object) -> Iterator[object]:
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _alternatives(part)
    elif get_origin(annotation) is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    else:
        yield annotation


def _fields(model: type[BaseModel]) -> Mapping[str, object]:
    """The annotation of each field under the name that a file uses."""
    fields = model.model_fields.items()
    return {field.alias or name: cast(object, field.annotation) for name, field in fields}


def _keys(annotations: Iterable[object]) -> list[str]:
    parts = (part for annotation in annotations for part in _alternatives(annotation))
    models = (part for part in parts if isinstance(part, type) and issubclass(part, BaseModel))
    return [name for model in models for name in _fields(model)]


def _every_key(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Each key of a model and of the models directly in it, as a path."""
    for name, annotation in _fields(model).items():
        yield (*above, name)
        for part in _alternatives(annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _every_key(part, (*above, name))
