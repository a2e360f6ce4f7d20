"""Names of models, and tools, are read from the methods that ask for them."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from loops_cookbook.episodes import Episode, Grading, GroupGrading, Sampling
from loops_cookbook.episodes.mentions import models_named, tools_declared

HERE = Path(__file__)


class Nothing(BaseModel):
    pass


class Asking(Episode[Nothing, None]):
    async def run(self, sample: Sampling) -> None:
        name = "computed"
        _ = sample.models["helper"], sample.models[name], self.models["own"]

    async def grade(self, grading: Grading) -> float:
        _ = grading.models["judge"]
        return 0.0

    @classmethod
    async def grade_group(cls, group: GroupGrading) -> Sequence[float]:
        return [float(bool(group.models["ranker"]))]

    models: dict[str, int]


class Heir(Asking):
    async def run(self, sample: Sampling) -> None: ...


def line_of(text: str) -> int:
    lines = HERE.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def test_each_name_has_the_place_where_it_is_asked_for() -> None:
    places = models_named(Asking)
    assert set(places) == {"helper", "judge", "ranker"}
    assert places["judge"].endswith(f"test_mentions.py:{line_of('_ = grading.models')}")


def test_methods_of_a_base_count_unless_they_are_replaced() -> None:
    assert set(models_named(Heir)) == {"judge", "ranker"}


def test_code_without_a_file_names_nothing() -> None:
    scope: dict[str, type] = {}
    exec(
        "class Made:\n"
        "    async def run(self, sample): sample.models['x']\n"
        "    grade = grade_group = run\n",
        scope,
    )
    assert models_named(scope["Made"]) == {}


class Armed(Asking):
    async def run(self, sample: Sampling) -> None:
        sample.model.conversation(tools=[{}])


class Unarmed(Asking):
    async def run(self, sample: Sampling) -> None:
        for conversation in (sample.model.conversation(tools=None), sample.model.conversation()):
            await conversation.generate([], tools=[])
        sample.models["judge"].conversation(tools=[{}])


def test_tools_have_the_place_where_the_policy_is_handed_them() -> None:
    place = tools_declared(Armed)
    assert place is not None
    assert place.endswith(f"test_mentions.py:{line_of('sample.model.conversation(tools=[{}])')}")


def test_no_tools_and_those_of_a_judge_are_none_of_the_policys() -> None:
    assert tools_declared(Unarmed) is None
    assert tools_declared(Asking) is None
