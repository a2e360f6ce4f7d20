"""Which models an Episode's own methods ask for by name, read from their source.

Only what is beyond doubt is found: `sample.models["judge"]`, where `sample` is what the method is
handed. A name that is computed, or used in a helper, is found when it is called.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from loops_cookbook.problems import shown

_METHODS = ("run", "grade", "grade_group")


def models_named(episode_class: type[object]) -> Mapping[str, str]:
    """Each name of a model with the place, `episode.py:12`, where it is first asked for."""
    places: dict[str, str] = {}
    for method in _METHODS:
        function = inspect.unwrap(_plain(getattr(episode_class, method)))
        for name, place in _named_in(function):
            places.setdefault(name, place)
    return places


def _plain(method: Callable[..., object]) -> Callable[..., object]:
    """The function below a class method."""
    return getattr(method, "__func__", method)


def _named_in(function: Callable[..., object]) -> Iterator[tuple[str, str]]:
    try:
        source, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(source)))
        path = inspect.getsourcefile(function)
    except (OSError, TypeError, SyntaxError):  # code that was not read from a file
        return
    method = tree.body[0] if tree.body else None
    if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or path is None:
        return
    # The first argument is the instance or the class, the second what the method is handed.
    handed = [argument.arg for argument in method.args.args][1:2]
    for node in ast.walk(method):
        match node:
            case ast.Subscript(
                value=ast.Attribute(value=ast.Name(id=owner), attr="models"),
                slice=ast.Constant(value=str(name)),
            ) if owner in handed:
                yield name, f"{shown(Path(path))}:{first + node.lineno - 1}"
            case _:
                pass
