"""The class that users subclass, and what one declares.

`Episode` is the agent and its grader in one object, made anew for each try. `declared` reads a
subclass once, before anything runs: its task and options models, which of the optional methods
it has, its attributes. Whatever could only fail later is refused there, in one line.
"""

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel

from loops_cookbook.attempts import Scalar
from loops_cookbook.episodes.phases import Grading, GroupGrading, Sampling, Setup
from loops_cookbook.errors import EpisodeError
from loops_cookbook.problems import found, nearest, shown
from loops_cookbook.tasks import Task

TaskT = TypeVar("TaskT", bound=BaseModel)
OptionsT = TypeVar("OptionsT", bound=BaseModel | None)


class Episode(Generic[TaskT, OptionsT]):
    """An agent and its grader: one instance is one try at one task.

    Write `class MyEpisode(Episode[MyTask, MyOptions])`, with `None` in place of the options
    model where there are none, and give it `run` and at least one of `grade` and `grade_group`.
    """

    model_access: ClassVar[Literal["direct"]] = "direct"
    """How the agent reaches the model: `direct` is through `sample.model`."""
    grading_retries: ClassVar[int] = 0
    """How often `grade` may run again after it failed; set it where `grade` has no side effects."""
    rollout_seconds: ClassVar[float] = 100
    """How long `run` should take at most; it is cut 10 seconds later."""

    def __init__(self, task: Task[TaskT], options: OptionsT) -> None:
        self.task = task
        self.options = options

    async def setup(self, setup: Setup) -> None:
        """Prepare the try; may run before there is room to sample."""

    async def run(self, sample: Sampling) -> Mapping[str, Scalar] | None:
        """Be the agent; what it returns becomes metadata of the attempt.

        Raise only when the episode did not happen: the attempt is tried again, then discarded.
        """
        raise NotImplementedError

    async def grade(self, grading: Grading) -> float:
        """The reward for what the agent did, also when a deadline cut it."""
        raise NotImplementedError

    @classmethod
    async def grade_group(cls, group: GroupGrading) -> Sequence[float]:
        """A reward for each of `group.attempts`, which have ended and been closed."""
        raise NotImplementedError

    async def close(self) -> None:
        """Give back what the try holds; called whatever happened."""


@dataclass(frozen=True, slots=True)
class Declared:
    """What a subclass of Episode says of itself."""

    name: str
    task_model: type[BaseModel]
    options_model: type[BaseModel] | None
    model_access: str
    grading_retries: int
    rollout_seconds: float
    grades_attempts: bool
    grades_groups: bool
    sets_up: bool
    closes: bool

    @property
    def model_access_from(self) -> str:
        """Where the check report says it is declared."""
        return f"{self.name}.model_access"

    @property
    def grading_retries_from(self) -> str:
        """Where the check report says it is declared."""
        return f"{self.name}.grading_retries"


def declared(episode_class: object) -> Declared:
    """What an Episode class declares.

    Raises:
        EpisodeError: it cannot be used as one.
    """
    cls = _episode_class(episode_class)
    task_model, options_model = _models(cls)
    has = {name for name in ("setup", "run", "grade", "grade_group", "close") if _has(cls, name)}
    if "run" not in has:
        raise _refused(
            cls, f"has no run(): {_meant(cls, 'run')}write `async def run(self, sample)`"
        )
    if not has & {"grade", "grade_group"}:
        instead = "write `async def grade(self, grading)`, or grade_group"
        raise _refused(cls, f"has no grader: {_meant(cls, 'grade', 'grade_group')}{instead}")
    for name in sorted(has):
        _check_method(cls, name)
    _check_init(cls)
    return Declared(
        name=cls.__name__,
        task_model=task_model,
        options_model=options_model,
        model_access=_model_access(cls),
        grading_retries=_grading_retries(cls),
        rollout_seconds=_rollout_seconds(cls),
        grades_attempts="grade" in has,
        grades_groups="grade_group" in has,
        sets_up="setup" in has,
        closes="close" in has,
    )


_AnyEpisode: TypeAlias = Episode[Any, Any]

_SIGNATURES = {
    "__init__": "__init__(self, task, options)",
    "setup": "setup(self, setup)",
    "run": "run(self, sample)",
    "grade": "grade(self, grading)",
    "grade_group": "grade_group(cls, group)",
    "close": "close(self)",
}


def _refused(cls: type[_AnyEpisode], problem: str) -> EpisodeError:
    return EpisodeError(f"{_where(cls)}{_named(cls)} {problem}")


def _where(cls: type[_AnyEpisode]) -> str:
    """File and line of a class, as a message begins; nothing for one without a source.

    Of one that no `class` statement made it is the first of its own methods.
    """
    try:
        file = inspect.getsourcefile(cls)
        line = inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):
        codes = [each.__code__ for each in vars(cls).values() if inspect.isfunction(each)]
        if not codes:
            return ""
        first = min(codes, key=lambda code: code.co_firstlineno)
        file, line = first.co_filename, first.co_firstlineno
    return f"{shown(Path(file))}:{line}: " if file else ""


def _named(cls: type[_AnyEpisode]) -> str:
    """A class by its module and name; `types.new_class` makes one that says it is of `types`."""
    module, name = cls.__module__, cls.__qualname__
    if module in sys.modules and "<locals>" not in name and not _is_in(module, cls):
        module = next((each for each in [*sys.modules] if _is_in(each, cls)), None)
    return f"{module}:{name}" if module else name


def _is_in(module: str, cls: type[_AnyEpisode]) -> bool:
    found: object = sys.modules.get(module)
    for name in cls.__qualname__.split("."):
        # Not by getattr: a module may import others when it is asked for a name.
        found = cast(Mapping[str, object], getattr(found, "__dict__", {})).get(name)
    return found is cls


def _meant(cls: type[_AnyEpisode], *names: str) -> str:
    """A method that was most likely meant to have one of these names."""
    own = {name for base in cls.__mro__[: cls.__mro__.index(Episode)] for name in vars(base)}
    for name in names:
        if near := nearest(name, sorted(each for each in own if not each.startswith("__"))):
            return f"it has {near}; did you mean {name}? "
    return ""


def _episode_class(candidate: object) -> type[_AnyEpisode]:
    if not (inspect.isclass(candidate) and issubclass(candidate, Episode)):
        raise EpisodeError(
            f"{found(candidate)} is not an Episode: name a class that begins "
            "`class MyEpisode(Episode[MyTask, None])`"
        )
    cls = cast(type[_AnyEpisode], candidate)
    if cls is Episode:
        raise EpisodeError("Episode itself cannot be run: name a subclass of it")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(_abstract_in(cls)))
        raise _refused(cls, f"is abstract: it lacks {missing}")
    return cls


def _abstract_in(cls: type) -> frozenset[str]:
    return cast(frozenset[str], vars(cls)["__abstractmethods__"])


def _models(cls: type[_AnyEpisode]) -> tuple[type[BaseModel], type[BaseModel] | None]:
    task, options = _arguments(cls)
    if not (inspect.isclass(task) and issubclass(task, BaseModel)):
        raise _refused(
            cls,
            f"names {_shown(task)} as its task model: write `class {cls.__name__}(Episode[MyTask, "
            "None])`, where MyTask is a pydantic BaseModel",
        )
    if options is type(None):
        return task, None
    if not (inspect.isclass(options) and issubclass(options, BaseModel)):
        raise _refused(
            cls,
            f"names {_shown(options)} as its options model: use a pydantic BaseModel, or None",
        )
    return task, options


def _arguments(cls: type) -> tuple[object, ...]:
    """What stands for TaskT and OptionsT in a subclass, seen through generic classes between."""
    bases = cast(tuple[object, ...], cls.__dict__.get("__orig_bases__", cls.__bases__))
    for base in bases:
        origin, given = get_origin(base) or base, cast(tuple[object, ...], get_args(base))
        if origin is Episode:
            return given or (TaskT, OptionsT)
        if inspect.isclass(origin) and issubclass(origin, Episode):
            above = cast(type[_AnyEpisode], origin)
            names = cast(tuple[object, ...], getattr(above, "__parameters__", ()))
            # A generic class without arguments leaves its names open.
            meaning = dict(zip(names, given, strict=False))
            return tuple(meaning.get(argument, argument) for argument in _arguments(above))
    return TaskT, OptionsT


def _shown(model: object) -> str:
    if isinstance(model, TypeVar):
        return "no class"
    return model.__name__ if isinstance(model, type) else found(model)


def _has(cls: type[_AnyEpisode], name: str) -> bool:
    return inspect.getattr_static(cls, name) is not inspect.getattr_static(Episode, name)


def _check_method(cls: type[_AnyEpisode], name: str) -> None:
    written = inspect.getattr_static(cls, name)
    if (name == "grade_group") != isinstance(written, classmethod):
        put = "put @classmethod above it" if name == "grade_group" else "make it a plain method"
        raise _refused(cls, f"has a {name}() of the wrong kind: {put}")
    function = cast(Callable[..., object], getattr(cls, name))
    if not inspect.iscoroutinefunction(inspect.unwrap(function)) and not (
        inspect.iscoroutinefunction(function)
    ):
        raise _refused(cls, f"has a {name}() that is not async: write `async def {name}`")
    # A classmethod is bound already; of a method the first argument is the instance.
    handed = () if name == "close" else (None,)
    _check_call(cls, name, function, handed if name == "grade_group" else (None, *handed))


def _check_init(cls: type[_AnyEpisode]) -> None:
    _check_call(cls, "__init__", cls.__init__, (None, None, None))


def _check_call(
    cls: type[_AnyEpisode], name: str, function: Callable[..., object], handed: Sequence[object]
) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(*handed)
    except TypeError as error:
        names = ", ".join(signature.parameters)
        raise _refused(
            cls, f"has {name}({names}), which cannot be called: write `{_SIGNATURES[name]}`"
        ) from error


def _model_access(cls: type[_AnyEpisode]) -> str:
    access = cast(object, cls.model_access)
    if access != "direct":
        raise _refused(cls, f'has model_access = {found(access)}: use "direct"')
    return "direct"


def _grading_retries(cls: type[_AnyEpisode]) -> int:
    retries = cast(object, cls.grading_retries)
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise _refused(cls, f"has grading_retries = {found(retries)}: use a whole number from 0 up")
    return retries


def _rollout_seconds(cls: type[_AnyEpisode]) -> float:
    seconds = cast(object, cls.rollout_seconds)
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise _refused(cls, f"has rollout_seconds = {found(seconds)}: use seconds above 0")
    return float(seconds)
