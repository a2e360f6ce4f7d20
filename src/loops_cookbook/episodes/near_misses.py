"""What an Episode class defines that is almost, and so not at all, something of an Episode.

A `grades` beside an inherited `grade`, or a `setUp`, is called by nobody, and nothing fails: the
run goes on with another grader than the one that was written. Helpers have such names too, so only
what cannot be one is told: it could be called in the place of what was meant, the class that
defines it does not define that as well, and no code beside it knows its name.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import cast

from loops_cookbook.episodes.episode import Episode
from loops_cookbook.problems import shown

_NEAR = 0.8
"""Of the letters of two names, that are the same: a letter more or less, or two exchanged."""
_METHODS = {"setup": "setup", "run": "sample", "grade": "grading", "grade_group": "group"}
"""With what each is handed."""
_CLOSE = "close"
_ATTRIBUTES = ("grading_retries", "rollout_seconds", "model_access")


def near_misses(episode_class: type[object]) -> tuple[str, ...]:
    """Each in a line, with its place and what may have been meant."""
    mro = episode_class.__mro__
    own = mro[: mro.index(Episode)] if Episode in mro else ()
    others = [cls for cls in mro if cls not in Episode.__mro__]  # mixins after it use names too
    known = {name for cls in others for name in _names_in(_functions_of(cls))}
    return tuple(
        f"{_place(cls, value)}{cls.__name__}.{name} is nothing that an Episode has, and no code "
        f"here uses it; did you mean {meant}? Rename it, or begin its name with _ to keep it"
        for cls in own
        for name, value in vars(cls).items()
        if not name.startswith("_") and name not in known and name not in vars(Episode)
        for meant in _meant(cls, name, value)
    )


def _meant(cls: type[object], name: str, value: object) -> Iterator[str]:
    function = _function(value)
    candidates = _ATTRIBUTES if function is None else (*_METHODS, _CLOSE)
    near = [each for each in candidates if _is_near(name, each) and each not in vars(cls)]
    if function is None:
        yield from near[:1] if isinstance(value, int | float | str) else []
    else:
        yield from [each for each in near if _could_be(function, each)][:1]


def _is_near(name: str, meant: str) -> bool:
    a, b = (each.lower().replace("_", "") for each in (name, meant))
    return SequenceMatcher(None, a, b).ratio() >= _NEAR


def _could_be(function: FunctionType, name: str) -> bool:
    """Whether a function could be called as a method of this name is."""
    handed = [parameter.name for parameter in inspect.signature(function).parameters.values()][1:]
    if name == _CLOSE:
        return not handed and inspect.iscoroutinefunction(function)
    is_called_so = handed[:1] == [_METHODS[name]]
    return len(handed) == 1 and (is_called_so or inspect.iscoroutinefunction(function))


def _function(value: object) -> FunctionType | None:
    """What is below decorators and `classmethod`; None for what is no method."""
    # Not by getattr: a value may answer any name with whatever it likes, an error included.
    plain = cast(object, value.__func__ if isinstance(value, classmethod | staticmethod) else value)
    if callable(plain):
        plain = inspect.unwrap(plain)
    return plain if isinstance(plain, FunctionType) else None


def _functions_of(cls: type[object]) -> Iterator[FunctionType]:
    """Those of a class, and of what else is defined in its module."""
    module = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
    here = [each for each in module.values() if getattr(each, "__module__", "") == cls.__module__]
    classes = {cls, *(each for each in here if isinstance(each, type))}
    for value in [*here, *(value for each in classes for value in vars(each).values())]:
        for part in _parts(value):
            if (function := _function(part)) is not None:
                yield function


def _parts(value: object) -> Iterable[object]:
    """What a property is made of; of anything else itself."""
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    return (value.func if isinstance(value, cached_property) else value,)


def _names_in(functions: Iterable[FunctionType]) -> Iterator[str]:
    codes = [function.__code__ for function in functions]
    while codes:
        code = codes.pop()
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                codes.append(constant)
            elif isinstance(constant, str):  # as getattr is handed it
                yield constant


def _place(cls: type[object], value: object) -> str:
    function = _function(value)
    try:
        code = None if function is None else function.__code__
        file = inspect.getsourcefile(cls) if code is None else code.co_filename
        line = inspect.getsourcelines(cls)[1] if code is None else code.co_firstlineno
    except (OSError, TypeError):  # without a source
        return ""
    return f"{shown(Path(file))}:{line}: " if file else ""
