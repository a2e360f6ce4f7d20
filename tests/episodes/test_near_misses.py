"""Names that are almost those of an Episode."""

import re
from collections.abc import Sequence
from functools import cached_property

import pytest
from pydantic import BaseModel

from loops_cookbook.episodes import Episode, Grading, GroupGrading, Sampling, Setup
from loops_cookbook.episodes.near_misses import near_misses


class Nothing(BaseModel): ...


class Whole(Episode[Nothing, None]):
    """Has helpers whose names are near, and which are used or could be no method of an Episode."""

    grading_retries = 1
    setups = 0

    async def run(self, sample: Sampling) -> None:
        await self.run_tool("ls")
        await self.runs(sample)
        self.setups += 1

    async def run_tool(self, command: str) -> None: ...

    async def runs(self, sample: Sampling) -> None: ...

    async def grade(self, grading: Grading) -> float:
        return self.grader("")

    def grader(self, text: str) -> float:
        return 1.0

    def grades(self, text: str) -> float:
        return 0.0

    def closed(self) -> bool:
        return True

    async def _close(self) -> None: ...


class Misspelt(Whole):
    grading_retry = 3
    rollout_second = 5.0

    async def grades(self, grading: Grading) -> float:  # type: ignore[override]
        return 1.0

    def setUp(self, setup: Setup) -> None: ...

    async def clsoe(self) -> None: ...

    @classmethod
    async def gradeGroup(cls, group: GroupGrading) -> Sequence[float]:
        return []


class Capital(Whole):
    async def Grade(self, grading: Grading) -> float:
        return 1.0


class Beside(Whole):
    """What defines the real one too has a helper of almost its name."""

    async def grade(self, grading: Grading) -> float:
        return 1.0

    async def grade2(self, grading: Grading) -> float:
        return 1.0


def test_a_method_that_nobody_will_call_is_told_with_what_was_meant() -> None:
    """A misspelt override beside an inherited grade passed `loops check` without a word."""
    told = near_misses(Misspelt)
    # Each as a string of its own would count as a use of that name.
    names = re.findall(r"\w+", "grading_retry rollout_second grades setUp clsoe gradeGroup")
    assert [each.partition("Misspelt.")[2].partition(" ")[0] for each in told] == names
    meant = [each.partition("did you mean ")[2].partition("?")[0] for each in told]
    assert meant == [
        "grading_retries", "rollout_seconds", "grade", "setup", "close", "grade_group",
    ]  # fmt: skip
    line = vars(Misspelt)[names[2]].__code__.co_firstlineno
    assert told[2].startswith(f"tests/episodes/test_near_misses.py:{line}: Misspelt.grades ")


class Mixin:
    """Uses what those have that it is mixed into, from a module of its own."""

    __module__ = "elsewhere"

    async def deal(self) -> None:
        await self.upgrade("its name")  # type: ignore[attr-defined]


class Settings(dict[str, int]):
    __getattr__ = dict[str, int].__getitem__


class Uses(Whole, Mixin):
    """What is only a property's or a mixin's to use, and a value that answers any name."""

    defaults = Settings(turns=3)

    @property
    def score(self) -> object:
        return self.graded("")

    @cached_property
    def best(self) -> object:
        return self.grade_(0)

    async def graded(self, grading: str) -> float:
        return 1.0

    async def grade_(self, grading: int) -> float:
        return 1.0

    async def upgrade(self, tool: str) -> None: ...


@pytest.mark.parametrize("cls", [Whole, Beside, Uses, Episode])
def test_helpers_are_left_alone(cls: type[object]) -> None:
    assert near_misses(cls) == ()


def test_another_case_is_a_near_miss() -> None:
    [told] = near_misses(Capital)
    assert "Capital.Grade is nothing that an Episode has" in told


def test_what_is_no_episode_has_none() -> None:
    assert near_misses(int) == ()


def test_a_class_without_a_source_is_told_without_a_place() -> None:
    made = type("Made", (Whole,), {"_".join(("grading", "retry")): 2})
    [told] = near_misses(made)
    assert told.startswith("Made.grading_retry is nothing")
