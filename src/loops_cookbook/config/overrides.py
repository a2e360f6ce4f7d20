"""`--set table.key=value`: one key of a config, said on the command line.

The value is TOML, so that it has the type it would have in the file. An override goes before
the file, and what is wrong with it is told of the override, not of the file.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

from loops_cookbook.errors import ConfigError
from loops_cookbook.problems import found, one_line

Document: TypeAlias = dict[str, object]
"""A TOML document, or a table of it."""


_EITHER: dict[tuple[str, ...], tuple[str, ...]] = {
    ("training", "updates"): ("training", "epochs"),
    ("training", "epochs"): ("training", "updates"),
    ("training", "batch_size"): ("training", "batch_tokens"),
    ("training", "batch_tokens"): ("training", "batch_size"),
}
"""Keys of which a config has one: to set the one is to take back the other."""


@dataclass(frozen=True, slots=True)
class Override:
    """One key and its value."""

    text: str
    """As it was typed."""
    place: tuple[str, ...]
    """The key, from the outermost table on."""
    value: object
    first_new: int = 0
    """How many keys of the place are there with the first that only this brings into the config;
    0: the file has all of them."""

    def over(self, document: Document) -> "Override":
        """The override, knowing what the file has."""
        table = document
        for depth, key in enumerate(self.place, start=1):
            if key not in table:
                return replace(self, first_new=depth)
            inner = table[key]
            table = cast(Document, inner) if isinstance(inner, dict) else {}
        return self

    def brought(self, place: tuple[str | int, ...]) -> bool:
        """Whether a place of the config is there because of this alone: a table around the key."""
        return 0 < self.first_new <= len(place) and self.place[: len(place)] == place

    def covers(self, place: tuple[str | int, ...]) -> bool:
        """Whether a place of the config is this key or below it."""
        return place[: len(self.place)] == self.place


def parse_override(text: str) -> Override:
    """Read `table.key=value`.

    Raises:
        ConfigError: it has no `=`, its key is not one, or its value is not TOML.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise ConfigError(f"--set {one_line(text)}: has no value; write --set table.key=value")
    try:
        place = _only_path(tomllib.loads(f"{key} = 0"))
    except ValueError as error:
        raise ConfigError(
            f"--set {one_line(text)}: {key!r} is not a key; write --set table.key=value"
        ) from error
    try:
        (parsed,) = tomllib.loads(f"value = {value}").values()
    except ValueError as error:
        raise ConfigError(
            f"--set {one_line(text)}: {found(value)} is not a TOML value; a string stands in "
            f"quotes: --set '{key}=\"{one_line(value)}\"'"
        ) from error
    return Override(text, place, parsed)


def apply_overrides(document: Document, overrides: Iterable[Override]) -> Document:
    """The document with each override put in, the later before the earlier.

    Raises:
        ConfigError: two of them set keys of which a config has one.
    """
    said: dict[tuple[str, ...], Override] = {}
    for override in overrides:
        other = _EITHER.get(override.place)
        if other is not None:
            if other in said:
                raise ConfigError(
                    f"--set {override.text}: a config has either it or --set {said[other].text}; "
                    "keep one of the two"
                )
            document = _without(document, other)
        document = _with(document, override.place, override.value)
        said[override.place] = override
    return document


def _only_path(document: Document) -> tuple[str, ...]:
    """The keys that lead to the one value of a document.

    Raises:
        ValueError: it holds more than one, as a line break in the text could bring about.
    """
    ((key, inner),) = document.items()
    return (key, *_only_path(cast(Document, inner))) if isinstance(inner, dict) else (key,)


def _without(document: Document, place: tuple[str, ...]) -> Document:
    first, *rest = place
    inner = document.get(first)
    if not rest:
        return {key: value for key, value in document.items() if key != first}
    if not isinstance(inner, dict):
        return document
    return {**document, first: _without(cast(Document, inner), tuple(rest))}


def _with(document: Document, place: tuple[str, ...], value: object) -> Document:
    first, *rest = place
    if not rest:
        return {**document, first: value}
    inner = document.get(first)
    table = cast(Document, inner) if isinstance(inner, dict) else {}
    return {**document, first: _with(table, tuple(rest), value)}
