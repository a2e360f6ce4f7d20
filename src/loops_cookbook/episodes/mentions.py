"""What an Episode's own methods ask of models, read from their source: names, and tools.

Only what is beyond doubt is found: `sample.models["judge"]`, and `sample.model.conversation(tools=
...)`, where `sample` is what the method is handed. A name that is computed, or what a helper asks
for, is found when it is called.
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
        for name, place in _named_in(_own(episode_class, method)):
            places.setdefault(name, place)
    return places


def tools_declared(episode_class: type[object]) -> str | None:
    """The place where `run` hands the policy tools, None where that is not to be seen."""
    run = _own(episode_class, "run")
    for handed, node, place in _nodes_in(run):
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Attribute(value=ast.Name(id=owner), attr="model"), attr="conversation"
                ),
                keywords=keywords,
            ) if owner == handed and any(map(_gives_tools, keywords)):
                return place
            case _:
                pass
    return None


def _own(episode_class: type[object], name: str) -> Callable[..., object]:
    """A method as it was written, below decorators and `classmethod`."""
    method: Callable[..., object] = getattr(episode_class, name)
    return inspect.unwrap(getattr(method, "__func__", method))


def _gives_tools(keyword: ast.keyword) -> bool:
    match keyword.value:
        case ast.Constant(value=None) | ast.List(elts=[]) | ast.Tuple(elts=[]):
            return False
        case _:
            return keyword.arg == "tools"


def _named_in(function: Callable[..., object]) -> Iterator[tuple[str, str]]:
    for handed, node, place in _nodes_in(function):
        match node:
            case ast.Subscript(
                value=ast.Attribute(value=ast.Name(id=owner), attr="models"),
                slice=ast.Constant(value=str(name)),
            ) if owner == handed:
                yield name, place
            case _:
                pass


def _nodes_in(function: Callable[..., object]) -> Iterator[tuple[str, ast.expr, str]]:
    """What a method is handed by name, and each expression in it with its place."""
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
    for handed in [argument.arg for argument in method.args.args][1:2]:
        for node in ast.walk(method):
            if isinstance(node, ast.expr):
                yield handed, node, f"{shown(Path(path))}:{first + node.lineno - 1}"
