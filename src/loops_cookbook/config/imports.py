"""`module:Name` in a config becomes the object, its module looked for beside the config first.

The config's directory is put first on `sys.path` and modules keep their own names, so that a
module may import its neighbours; a process therefore serves one config. A neighbour named like
the standard library or an installed package would be imported in its place everywhere: that is
refused before anything is imported.
"""

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard, TypeVar

from loops_cookbook.errors import EpisodeError
from loops_cookbook.problems import USERS, nearest, one_line, shown

ClassT = TypeVar("ClassT")

_NEVER_MEANT = {"conftest", "setup", "test", "tests"}
"""Names that many projects have beside their code, and nobody imports by accident."""
_INSTALLED = "site-packages"
"""A folder of this name may lie below a project, as that of its virtual environment does."""


def import_object(spec: str, directory: Path, *, key: str) -> object:
    """Import what `spec` names.

    Args:
        spec: `module:Name`.
        directory: the config's; stays first on `sys.path`.
        key: the config's key that holds the spec, for messages.

    Raises:
        EpisodeError: the spec has another form, the module is not there, fails or would shadow
            an installed one, or it has no such name.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not all(map(str.isidentifier, [*module_name.split("."), *name.split(".")])):
        raise EpisodeError(f'{key}: found {spec!r}; write "module:Name", such as "episode:Answer"')
    _put_first(directory)
    module = _import(module_name, directory, key)
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise EpisodeError(_no_such_name(key, module, found, part))
        found = getattr(found, part)
    return found


def import_class(spec: str, directory: Path, *, key: str, base: type[ClassT]) -> type[ClassT]:
    """Import a subclass of `base`; otherwise as `import_object`."""
    found = import_object(spec, directory, key=key)
    if _is_subclass(found, base):
        return found
    raise EpisodeError(f"{key}: {spec!r} is {_kind(found)}; name a subclass of {_public(base)}")


def import_callable(spec: str, directory: Path, *, key: str) -> Callable[..., Any]:
    """Import something that can be called; otherwise as `import_object`."""
    found = import_object(spec, directory, key=key)
    if callable(found):
        return found
    raise EpisodeError(f"{key}: {spec!r} is {_kind(found)}; name something that can be called")


def imported_files(directory: Path) -> Iterator[Path]:
    """The files of the modules below a config's directory that were imported, packages that are
    installed there left out."""
    origins = [getattr(module, "__file__", None) for module in sys.modules.values()]
    for file in (Path(origin) for origin in origins if isinstance(origin, str)):
        is_below = file.is_relative_to(directory) and file.is_file()
        if is_below and _INSTALLED not in file.relative_to(directory).parts:
            yield file


def _put_first(directory: Path) -> None:
    """Make the config's modules importable, before any other.

    Raises:
        EpisodeError: one of them would shadow another module.
    """
    for neighbour in _modules_in(directory):
        if neighbour.stem in _NEVER_MEANT:
            continue
        if shadowed := _elsewhere(neighbour.stem, directory):
            raise EpisodeError(
                f"{shown(neighbour)}: has the name of {shadowed} and would be imported in its "
                "place; rename it"
            )
    if sys.path[:1] != [str(directory)]:
        sys.path.insert(0, str(directory))
        importlib.invalidate_caches()


def _modules_in(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.suffix == ".py" or (path / "__init__.py").is_file():
            yield path


def _elsewhere(name: str, directory: Path) -> str | None:
    """What else has this module name: the standard library, or a package on `sys.path`."""
    if name in sys.stdlib_module_names:
        return f"the standard library's module {name!r}"
    ours = {directory.resolve(), Path.cwd().resolve()}
    others = [entry for entry in sys.path if Path(entry).resolve() not in ours]
    spec = PathFinder.find_spec(name, others)
    if spec is None or spec.origin is None:
        return None
    return f"the installed package {name!r} ({spec.origin})"


def _import(name: str, directory: Path, key: str) -> ModuleType:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            near = nearest(name, [path.stem for path in _modules_in(directory)])
            advice = f"did you mean {near}?" if near else "name one that is there"
            raise EpisodeError(
                f"{key}: no module {name!r} in {directory} or among what is installed; {advice}"
            ) from error
        raise EpisodeError(_failed(error, name, directory, key)) from error
    except USERS as error:  # a signal passes, as which a command may be told to end
        raise EpisodeError(_failed(error, name, directory, key)) from error
    top = name.partition(".")[0]
    beside = [path for path in _modules_in(directory) if path.stem == top]
    origin = getattr(sys.modules[top], "__file__", None)
    if beside and origin and directory.resolve() not in Path(origin).resolve().parents:
        raise EpisodeError(
            f"{key}: a module {top!r} was imported from {origin} before the one in {directory}; "
            "rename it, or start a new process for this config"
        )
    return module


def _failed(error: BaseException, module: str, directory: Path, key: str) -> str:
    told = error.msg if isinstance(error, SyntaxError) else error  # its text repeats the place
    what = one_line(f"{type(error).__name__}: {told}")
    return f"{_where(error, directory)}: {what}, while {key} imported {module!r}; mend the module"


def _where(error: BaseException, directory: Path) -> str:
    """File and line of the user's code that failed: the innermost frame beside the config."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{shown(Path(error.filename))}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame for frame in frames if not frame.filename.startswith("<")]
    users = [frame for frame in files if _is_users(Path(frame.filename), directory)]
    frame = (users or files)[-1]
    return f"{shown(Path(frame.filename))}:{frame.lineno}"


def _is_users(file: Path, directory: Path) -> bool:
    return file.is_relative_to(directory) and _INSTALLED not in file.parts


def _no_such_name(key: str, module: ModuleType, found: object, name: str) -> str:
    near = nearest(name, [known for known in dir(found) if not known.startswith("_")])
    advice = f"did you mean {near}?" if near else "name one that it has"
    origin = module.__file__
    return f"{key}: {shown(Path(origin)) if origin else module.__name__} has no {name!r}; {advice}"


def _is_subclass(found: object, base: type[ClassT]) -> TypeGuard[type[ClassT]]:
    return isinstance(found, type) and issubclass(found, base)


def _public(base: type[object]) -> str:
    """Where users import a class from: the package that offers it, else its own module."""
    package = base.__module__.rpartition(".")[0]
    offers = getattr(sys.modules.get(package), base.__name__, None) is base
    return f"{package if offers else base.__module__}.{base.__name__}"


def _kind(found: object) -> str:
    """An object in words, with the place of its code where it has one."""
    if isinstance(found, type):
        return f"the class {found.__name__}"
    if isinstance(found, ModuleType):
        return "a module"
    code = getattr(found, "__code__", None)
    if code is not None:
        return f"a function ({shown(Path(code.co_filename))}:{code.co_firstlineno})"
    return f"a value of type {type(found).__name__}"
