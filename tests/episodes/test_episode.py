"""What an Episode class declares, and what is refused before anything runs."""

import functools
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import pytest
from pydantic import BaseModel

from loops_cookbook.episodes import Episode, Grading, GroupGrading, Sampling, Setup, Task
from loops_cookbook.episodes.episode import declared
from loops_cookbook.errors import EpisodeError


class Sum(BaseModel):
    left: int
    right: int


class Options(BaseModel):
    strict: bool = False


TaskT = TypeVar("TaskT", bound=BaseModel)
OptionsT = TypeVar("OptionsT", bound=BaseModel | None)


class SumEpisode(Episode[Sum, None]):
    grading_retries = 2

    async def run(self, sample: Sampling) -> None: ...

    async def grade(self, grading: Grading) -> float:
        return 1.0


def test_a_class_declares_its_models_and_attributes() -> None:
    says = declared(SumEpisode)
    assert (says.task_model, says.options_model) == (Sum, None)
    assert (says.model_access, says.model_access_from) == ("direct", "SumEpisode.model_access")
    assert (says.grading_retries, says.grading_retries_from) == (2, "SumEpisode.grading_retries")
    assert says.rollout_seconds == 100
    assert (says.grades_attempts, says.grades_groups) == (True, False)
    assert (says.sets_up, says.closes) == (False, False)


def test_an_inherited_attribute_is_told_under_the_name_of_the_class_in_the_config() -> None:
    class Harder(SumEpisode): ...

    says = declared(Harder)
    assert (says.grading_retries, says.grading_retries_from) == (2, "Harder.grading_retries")


def test_a_group_grader_alone_is_enough() -> None:
    class Ranked(Episode[Sum, Options]):
        async def setup(self, setup: Setup) -> None: ...

        async def run(self, sample: Sampling) -> None: ...

        @classmethod
        async def grade_group(cls, group: GroupGrading) -> Sequence[float]:
            return [0.0 for _ in group.attempts]

        async def close(self) -> None: ...

    says = declared(Ranked)
    assert (says.grades_attempts, says.grades_groups) == (False, True)
    assert (says.sets_up, says.closes) == (True, True)
    assert says.options_model is Options


class Base(Episode[TaskT, OptionsT], Generic[TaskT, OptionsT]):
    async def run(self, sample: Sampling) -> None: ...

    async def grade(self, grading: Grading) -> float:
        return 0.0


class Half(Base[Sum, OptionsT], Generic[OptionsT]): ...


class Swapped(Base[TaskT, OptionsT], Generic[OptionsT, TaskT]): ...


class FromBase(Base[Sum, None]): ...


class FromHalf(Half[Options]): ...


class FromSwapped(Swapped[Options, Sum]): ...


class FromFromHalf(FromHalf): ...


class Mixin: ...


class WithMixin(Mixin, FromBase): ...


@pytest.mark.parametrize(
    ("cls", "options_model"),
    [
        (FromBase, None),
        (FromHalf, Options),
        (FromSwapped, Options),
        (FromFromHalf, Options),
        (WithMixin, None),
    ],
)
def test_models_are_found_through_the_classes_between(
    cls: type, options_model: type[BaseModel] | None
) -> None:
    says = declared(cls)
    assert (says.task_model, says.options_model) == (Sum, options_model)


def test_a_decorated_method_is_taken_for_what_it_wraps() -> None:
    def logged(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        def wrapper(*args: object) -> Awaitable[Any]:
            return method(*args)

        return wrapper

    class Logged(SumEpisode):
        @logged
        async def run(self, sample: Sampling) -> None: ...

    assert declared(Logged).grades_attempts


def test_an_init_may_take_more_that_has_a_default() -> None:
    class Roomy(SumEpisode):
        def __init__(self, task: Task[Sum], options: None, limit: int = 3) -> None:
            super().__init__(task, options)

    assert declared(Roomy).task_model is Sum


class NoRun(Episode[Sum, None]):
    async def grade(self, grading: Grading) -> float:
        return 0.0


class NoGrader(Episode[Sum, None]):
    async def run(self, sample: Sampling) -> None: ...


class PlainRun(SumEpisode):
    def run(self, sample: Sampling) -> None: ...  # type: ignore[override]


class YieldingRun(SumEpisode):
    async def run(self, sample: Sampling) -> Any:
        yield 1


class PlainClose(SumEpisode):
    def close(self) -> None: ...  # type: ignore[override]


class BoundGroupGrader(SumEpisode):
    async def grade_group(self, group: GroupGrading) -> Sequence[float]:  # type: ignore[override]
        return []


class StaticRun(SumEpisode):
    @staticmethod
    async def run(sample: Sampling) -> None: ...  # type: ignore[override]


class ClassRun(SumEpisode):
    @classmethod
    async def run(cls, sample: Sampling) -> None: ...  # type: ignore[override]


class RunWithoutSample(SumEpisode):
    async def run(self) -> None: ...  # type: ignore[override]


class ShortInit(SumEpisode):
    def __init__(self, task: Task[Sum]) -> None:
        super().__init__(task, None)


class GreedyInit(SumEpisode):
    def __init__(self, task: Task[Sum], options: None, limit: int) -> None:
        super().__init__(task, options)


class ByEndpoint(SumEpisode):
    model_access = "endpoint"  # type: ignore[assignment]


class NegativeRetries(SumEpisode):
    grading_retries = -1


class TruthyRetries(SumEpisode):
    grading_retries = True


class NoTime(SumEpisode):
    rollout_seconds = 0


class EndlessTime(SumEpisode):
    rollout_seconds = float("inf")


class Unnamed(Episode):  # type: ignore[type-arg]
    async def run(self, sample: Sampling) -> None: ...

    async def grade(self, grading: Grading) -> float:
        return 0.0


class WrongTask(Base[dict, None]): ...  # type: ignore[type-var]


class WrongOptions(Base[Sum, int]): ...  # type: ignore[type-var]


class OpenOptions(Half): ...  # type: ignore[type-arg]


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (NoRun, "test_episode:NoRun has no run(): write `async def run(self, sample)`"),
        (NoGrader, "has no grader: write `async def grade(self, grading)`, or grade_group"),
        (PlainRun, "has a run() that is not async: write `async def run`"),
        (YieldingRun, "has a run() that is not async"),
        (PlainClose, "has a close() that is not async"),
        (BoundGroupGrader, "has a grade_group() of the wrong kind: put @classmethod above it"),
        (ClassRun, "has a run() of the wrong kind: make it a plain method"),
        (StaticRun, "has run(sample), which cannot be called: write `run(self, sample)`"),
        (RunWithoutSample, "which cannot be called: write `run(self, sample)`"),
        (ShortInit, "which cannot be called: write `__init__(self, task, options)`"),
        (GreedyInit, "which cannot be called: write `__init__(self, task, options)`"),
        (ByEndpoint, "has model_access = 'endpoint': use \"direct\""),
        (NegativeRetries, "has grading_retries = -1: use a whole number from 0 up"),
        (TruthyRetries, "has grading_retries = true: use a whole number from 0 up"),
        (NoTime, "has rollout_seconds = 0: use seconds above 0"),
        (EndlessTime, "has rollout_seconds = inf: use seconds above 0"),
        (Unnamed, "names no class as its task model: write `class Unnamed(Episode[MyTask, None])`"),
        (WrongTask, "names dict as its task model"),
        (WrongOptions, "names int as its options model: use a pydantic BaseModel, or None"),
        (OpenOptions, "names no class as its options model"),
        (Episode, "Episode itself cannot be run: name a subclass of it"),
        (Sum, "is not an Episode: name a class"),
        ("SumEpisode", "'SumEpisode' is not an Episode"),
    ],
)
def test_a_class_that_cannot_be_run_is_refused_in_one_line(cls: object, said: str) -> None:
    with pytest.raises(EpisodeError) as refused:
        declared(cls)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_status == 2


def test_an_abstract_class_is_refused_with_what_it_lacks() -> None:
    class Unfinished(SumEpisode, ABC):
        @abstractmethod
        def prompt(self) -> str: ...

    with pytest.raises(EpisodeError, match="is abstract: it lacks prompt"):
        declared(Unfinished)


class Misspelt(Episode[Sum, None]):
    async def run(self, sample: Sampling) -> None: ...

    async def gradee(self, grading: Grading) -> float:
        return 0.0


class MisspeltRun(Episode[Sum, None]):
    async def runn(self, sample: Sampling) -> None: ...


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Misspelt, "has no grader: it has gradee; did you mean grade? write `async def grade("),
        (MisspeltRun, "has no run(): it has runn; did you mean run? write `async def run("),
    ],
)
def test_a_method_that_is_called_almost_so_is_named_with_its_file(
    cls: type[Episode[Sum, None]], said: str
) -> None:
    """`has no grader` named no file, and not the `gradee` that was meant."""
    with pytest.raises(EpisodeError) as refused:
        declared(cls)
    line = inspect.getsourcelines(cls)[1]
    assert f"test_episode.py:{line}: {cls.__module__}:{cls.__name__} {said}" in str(refused.value)


def test_a_class_without_a_source_is_refused_without_a_place() -> None:
    made = types.new_class("Made", (Episode[Sum, None],), exec_body=lambda space: None)
    made.__module__ = "nowhere"
    with pytest.raises(EpisodeError) as refused:
        declared(made)
    assert str(refused.value).startswith("nowhere:Made has no run(): write")


async def run_without_anything(self: object) -> None: ...


MadeHere = types.new_class(
    "MadeHere",
    (Episode[Sum, None],),
    exec_body=lambda space: space.update(run=run_without_anything),
)


def test_a_class_that_no_class_statement_made_is_told_by_where_it_stands() -> None:
    """It was told as `types:MadeHere`, of the standard library, and without a place."""
    with pytest.raises(EpisodeError) as refused:
        declared(MadeHere)
    line = run_without_anything.__code__.co_firstlineno
    assert f"test_episode.py:{line}: {__name__}:MadeHere has " in str(refused.value)
