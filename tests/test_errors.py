"""`loops_cookbook.errors`: the tree in its docstring is the tree of its classes."""

import inspect
import re

import pytest

from loops_cookbook import errors
from loops_cookbook.errors import LoopsError, MissingExtra, RunStopped, UsageError

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, LoopsError)
]


def drawn() -> dict[str, tuple[str, str]]:
    """Each class in the docstring's drawing: its parent and the exit status beside it."""
    nodes: dict[str, tuple[str, str]] = {}
    above: dict[int, str] = {-1: ""}
    for line in (inspect.getdoc(errors) or "").splitlines():
        if match := re.match(r"([ │├└─]*)([A-Z]\w+)\s+(exit|\d|-|)", line):
            depth = len(match[1]) // 4 - 1  # the drawing itself is indented
            if depth >= 0:
                above[depth] = match[2]
                nodes[match[2]] = (above[depth - 1], match[3])
    return nodes


def test_the_drawing_has_every_class_under_its_parent() -> None:
    parents = {cls.__name__: cls.__bases__[0].__name__ for cls in CLASSES}
    parents["LoopsError"] = ""
    assert {name: parent for name, (parent, _) in drawn().items()} == parents


def test_the_drawing_gives_the_exit_status_of_each_branch() -> None:
    statuses = {name: status for name, (_, status) in drawn().items() if status.isdigit()}
    assert statuses == {
        name: str(getattr(errors, name).exit_status) for name in ("UsageError", "RunStopped")
    }


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_usage_error_exits_2_and_any_other_1(cls: type[LoopsError]) -> None:
    assert cls.exit_status == (2 if issubclass(cls, UsageError) else 1)


def test_a_stopped_run_is_not_a_usage_error() -> None:
    assert not issubclass(RunStopped, UsageError)


def test_a_missing_extra_says_what_to_type() -> None:
    error = MissingExtra("the embedded engine", "local")
    assert error.extra == "local"
    assert str(error).startswith("the embedded engine needs the extra 'local'")
    assert 'uv add "loops-cookbook[local]"' in str(error)
    assert "\n" not in str(error)
