"""What is given for a test and can mean nothing is refused where it is given."""

import math
from typing import Any

import pytest
from pydantic import BaseModel

from loops_cookbook.episodes import Episode, Grading, Sampling
from loops_cookbook.errors import EpisodeError
from loops_cookbook.testing import (
    Line,
    RecordingTrainer,
    ScriptedSampler,
    Terms,
    attempt,
    attempt_group,
)

pytestmark = pytest.mark.anyio


class Nothing(BaseModel): ...


class Asks(Episode[Nothing, None]):
    async def run(self, sample: Sampling) -> None:
        await sample.model.conversation().generate([{"role": "user", "content": "?"}])

    async def grade(self, grading: Grading) -> float:
        if "judge" in grading.models:
            await grading.models["judge"].conversation().generate([{"role": "user", "content": ""}])
        return 1.0


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"max_attempt_tokens": -1},
        {"max_seq_len": 1},
        {"rollout_seconds": 0},
        {"setup_seconds": math.nan},
        {"grading_seconds": math.inf},
        {"release_seconds": "5"},
        {"max_rollout_retries": -1},
    ],
    ids=str,
)
def test_terms_that_can_mean_nothing_are_refused_by_name(given: dict[str, Any]) -> None:
    """`Terms(max_tokens=0)` was taken, and the attempt had no reply whatever the Episode did."""
    [name] = given
    with pytest.raises(EpisodeError, match=rf"^Terms\(\): {name}: found .+; use "):
        Terms(**given)


def test_terms_as_they_are_meant_are_taken() -> None:
    terms = Terms(max_tokens=1, rollout_seconds=0.2, setup_seconds=5, max_rollout_retries=2)
    assert terms.setup_seconds == 5


@pytest.mark.parametrize("models", [["judge"], {"main": ["yes"]}, {"judge": 5}], ids=str)
async def test_models_that_are_none_are_refused(models: Any) -> None:
    """A number was taken for a judge, and every grade failed by an `AttributeError`."""
    with pytest.raises(EpisodeError, match=r"^Terms\(\): models"):
        await attempt(Asks, Nothing(), replies=["yes"], terms=Terms(models=models))


@pytest.mark.parametrize("replies", ["yes", [], {"yes": "no"}, None, 3], ids=repr)
async def test_scripts_of_a_group_that_are_none_are_refused(replies: Any) -> None:
    with pytest.raises(EpisodeError, match="give a script for each attempt"):
        await attempt_group(Asks, Nothing(), replies=replies)


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, "1", True], ids=repr)
def test_a_time_that_no_call_may_take_is_refused(seconds: Any) -> None:
    for make in (Line, RecordingTrainer, lambda seconds: ScriptedSampler([], seconds=seconds)):
        with pytest.raises(EpisodeError, match=r"seconds is .*: use a number from 0 up"):
            make(seconds=seconds)


def test_a_line_without_a_text_is_refused() -> None:
    with pytest.raises(EpisodeError, match=r"Line\(\): text is None: use a string"):
        Line(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("who", ["policy", "judge"])
async def test_what_a_function_gives_that_is_no_step_is_told_as_that(who: str) -> None:
    """A script that forgot to return failed the Episode: `NoneType has no attribute ids`."""

    def forgets(prompt: str, call: int) -> Any: ...

    tried = await attempt(
        Asks,
        Nothing(),
        replies=forgets if who == "policy" else ["yes"],
        terms=Terms(models={"judge": forgets} if who == "judge" else {}),
    )
    assert "EpisodeError: step 0 of a script is None: use one of str, Line, " in tried.detail
