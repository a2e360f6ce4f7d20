"""What a newcomer types first: each way to try an Episode, and each way to get it wrong."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from trio.testing import MockClock

from loops_cookbook import testing
from loops_cookbook.episodes import Episode, Grading, GroupGrading, Sampling
from loops_cookbook.errors import EpisodeError, ServiceUnavailable
from loops_cookbook.testing import Line, ScriptedChat, Terms, attempt, attempt_group, tool_call

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "testing.md"
TOOLS = [{"type": "function", "function": {"name": "count"}}]
ASK: list[dict[str, object]] = [{"role": "user", "content": "?"}]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


class Nothing(BaseModel):
    """A task of which nothing needs to be known."""


class MyEpisode(Episode[Nothing, None]):
    """Does all that the page shows: says what it is told until there is no call and no number."""

    async def run(self, sample: Sampling) -> None:
        self.said: list[str] = []
        conversation = sample.model.conversation(tools=TOOLS)
        messages: list[dict[str, object]] = list(ASK)
        for _ in range(4):
            reply = await conversation.generate(messages)
            self.said.append(reply.content or "")
            sample.metadata["calls"] = len(reply.tool_calls)
            if self.said[-1] in ("37", "43") or reply.finish_reason == "length":
                return
            messages += [reply.message, *(call.result("17") for call in reply.tool_calls), *ASK]

    async def grade(self, grading: Grading) -> float:
        return float(self.said[-1] in ("37", "43"))


class Judged(MyEpisode):
    async def run(self, sample: Sampling) -> None:
        await sample.model.conversation().generate(ASK)

    async def grade(self, grading: Grading) -> float:
        reply = await grading.models["judge"].conversation().generate(ASK)
        return float("2" in (reply.content or ""))


class Ranked(Judged):
    async def grade(self, grading: Grading) -> float:
        return 0.0

    @classmethod
    async def grade_group(cls, group: GroupGrading) -> list[float]:
        return [float(index) for index, _ in enumerate(group.attempts)]


def calls_on_the_page() -> dict[str, str]:
    """What the page's table says to write, by what it is for."""
    rows = re.findall(r"^\| ([^|]+?) \| `(attempt\w*\(.*\))` \|$", PAGE.read_text(), re.MULTILINE)
    return dict(rows)


@pytest.mark.parametrize(
    ("what", "episode", "comes"),
    [
        ("one question", MyEpisode, {"reward": 1.0}),
        ("several turns", MyEpisode, {"reward": 1.0, "replies_used": 3}),
        ("a tool", MyEpisode, {"reward": 1.0, "replies_used": 2}),
        ("a judge", Judged, {"reward": 1.0}),
        ("a clock that runs out", MyEpisode, {"reward": 0.0, "timed_out": True}),
        ("the token limit", MyEpisode, {"reward": 0.0, "replies_used": 1}),
        ("a model that cannot be reached", MyEpisode, {"fate": "discarded/failed"}),
        ("a group that is ranked", Ranked, {"rewards": (0.0, 1.0, 2.0), "unusable": None}),
    ],
)
async def test_what_the_page_says_to_write_works_as_it_stands(
    what: str, episode: type[MyEpisode], comes: dict[str, object]
) -> None:
    names: dict[str, Any] = {**vars(testing), "ServiceUnavailable": ServiceUnavailable}
    call = calls_on_the_page()[what]
    tried = await eval(call, names | {"MyEpisode": episode, "TASK": {}})
    assert {key: getattr(tried, key) for key in comes} == comes


def test_all_rows_of_the_page_but_the_one_with_a_real_sandbox_are_tried_here() -> None:
    assert len(calls_on_the_page()) == 9


async def test_a_call_in_a_script_is_read_as_it_was_written() -> None:
    both = "I look. " + tool_call("count", item='böl"t') + tool_call("count", name="x")
    tried = await attempt(MyEpisode, {}, replies=[both, "43"])
    calls: Any = tried.transcript[0].reply["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [
        '{"item": "böl\\"t"}',
        '{"name": "x"}',
    ]


@pytest.mark.parametrize("script", ["yes", 3, ["yes", 3], None])
async def test_what_is_no_script_is_refused_before_it_is_played(script: Any) -> None:
    """A text was taken for a list of its letters: the model said `y`, and then `e`."""
    with pytest.raises(EpisodeError, match="a script"):
        await attempt(MyEpisode, {}, replies=script)
    with pytest.raises(EpisodeError, match="a script"):
        await attempt_group(MyEpisode, {}, replies=[["yes"], script])
    with pytest.raises(EpisodeError, match="a script"):
        ScriptedChat(script)


async def test_options_for_an_episode_that_takes_none_are_refused() -> None:
    """They were left out in silence."""
    with pytest.raises(EpisodeError, match=r"given the options \{'turns': 3\}, and the Episode"):
        await attempt(MyEpisode, {}, replies=["yes"], options={"turns": 3})


async def test_a_clock_that_runs_out_before_a_word_leaves_nothing_to_grade() -> None:
    slow = [Line("37", seconds=60)]
    tried = await attempt(MyEpisode, {}, replies=slow, terms=Terms(rollout_seconds=0.2))
    assert (tried.reward, tried.fate, tried.timed_out) == (None, "discarded/no_reply", True)
