"""`attempt` tries an Episode as a user's own test would."""

import gc
import importlib.util
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
from pydantic import BaseModel
from trio.testing import MockClock

from loops_cookbook.attempts import Fate
from loops_cookbook.episodes import Discard, Episode, Grading, GroupGrading, Sampling, Setup
from loops_cookbook.errors import EpisodeError, ServiceUnavailable
from loops_cookbook.testing import Line, Terms, attempt

pytestmark = pytest.mark.anyio

PATTERN = Path(__file__).parents[2] / "patterns" / "custom_runtime" / "in_process_direct"
TASK = {"name": "sum", "instruction": "2 + 2?", "answer": "4"}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture(scope="module")
def direct_episode() -> ModuleType:
    """The smallest pattern, as it ships."""
    path = PATTERN / "direct_episode.py"
    spec = importlib.util.spec_from_file_location("direct_episode", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("reply", "reward"), [("4", 1.0), (" 4\n", 1.0), ("5", 0.0)])
async def test_the_smallest_pattern_is_graded(
    direct_episode: ModuleType, reply: str, reward: float
) -> None:
    tried = await attempt(direct_episode.AnswerEpisode, TASK, replies=[reply])
    assert (tried.reward, tried.fate, tried.replies_used) == (reward, None, 1)
    assert tried.prompts == ("<|user|>2 + 2?<|end|><|assistant|>",)
    assert [call.reply["content"] for call in tried.transcript] == [reply]
    assert tried.attempt.task == "sum"


class Sum(BaseModel):
    left: int
    right: int


class Options(BaseModel):
    hint: str = "none"


class Sums(Episode[Sum, Options]):
    async def run(self, sample: Sampling) -> Mapping[str, int | str]:
        conversation = sample.model.conversation()
        reply = await conversation.generate([{"role": "user", "content": "sum?"}])
        self.answer = reply.content
        return {"length": len(reply.content or ""), "hint": self.options.hint}

    async def grade(self, grading: Grading) -> float:
        return 1.0 if self.answer == str(self.task.value.left + self.task.value.right) else 0.0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_an_attempt_held_is_freed_when_it_ends(anyio_backend: str) -> None:
    """Models and jobs closed circles, so that all of it waited for the garbage collector."""
    made: list[weakref.ref[Episode[Sum, Options]]] = []

    class Remembered(Sums):
        async def setup(self, setup: Setup) -> None:
            made.append(weakref.ref(self))

    gc.disable()
    try:
        await attempt(Remembered, Sum(left=1, right=2), replies=["3"])
        assert [each() for each in made] == [None]
    finally:
        gc.enable()


async def test_a_value_and_options_may_be_given_as_they_are() -> None:
    tried = await attempt(Sums, Sum(left=1, right=2), replies=["3"], options=Options(hint="add"))
    assert tried.reward == 1.0
    assert tried.metadata == {"length": 1, "hint": "add"}


async def test_options_have_their_defaults() -> None:
    tried = await attempt(Sums, {"left": 1, "right": 2}, replies=["3"])
    assert tried.metadata["hint"] == "none"


async def test_a_task_that_does_not_validate_is_refused() -> None:
    with pytest.raises(
        EpisodeError, match=r"the task given to attempt.* is no Sum: right: missing"
    ):
        await attempt(Sums, {"left": 1}, replies=[])


async def test_options_that_do_not_validate_are_refused() -> None:
    with pytest.raises(EpisodeError, match=r"options given to attempt\(\) is no Options: hint"):
        await attempt(Sums, {"left": 1, "right": 2}, replies=[], options={"hint": 3})


async def test_terms_that_are_no_terms_are_refused() -> None:
    """A dict, as `options` may be, was an AttributeError in a line that no user has read."""
    terms: Any = {"grading_seconds": 5}
    with pytest.raises(
        EpisodeError, match=r"attempt\(\) was given the terms .*: give them as Terms"
    ):
        await attempt(Sums, {"left": 1, "right": 2}, replies=["3"], terms=terms)


async def test_a_failed_model_call_is_a_fate_and_no_reward() -> None:
    tried = await attempt(Sums, {"left": 1, "right": 2}, replies=[ServiceUnavailable("no answer")])
    assert (tried.reward, tried.fate) == (None, Fate.FAILED)
    assert "no answer" in tried.detail


async def test_a_try_may_be_retried() -> None:
    replies = [ServiceUnavailable("no answer"), "3"]
    terms = Terms(max_rollout_retries=1)
    tried = await attempt(Sums, {"left": 1, "right": 2}, replies=replies, terms=terms)
    assert (tried.reward, tried.attempt.tries, tried.replies_used) == (1.0, 2, 2)


async def test_a_dropped_attempt_says_why() -> None:
    class Dropping(Sums):
        async def grade(self, grading: Grading) -> float:
            raise Discard("unparsable")

    tried = await attempt(Dropping, {"left": 1, "right": 2}, replies=["3"])
    assert (tried.fate, tried.detail) == (Fate.DROPPED, "unparsable")


async def test_an_agent_is_cut_and_graded() -> None:
    """E4: the agent times out, and its grader still has the word."""

    class Slow(Sums):
        async def run(self, sample: Sampling) -> Mapping[str, int | str]:
            await super().run(sample)
            sample.metadata["seconds_left"] = sample.seconds_left
            await anyio.sleep_forever()
            raise AssertionError

        async def grade(self, grading: Grading) -> float:
            return 1.0 if grading.timed_out else 0.0

    terms = Terms(rollout_seconds=50)
    task = {"left": 1, "right": 2}
    tried = await attempt(Slow, task, replies=[Line("3", seconds=5)], terms=terms)
    assert (tried.reward, tried.timed_out) == (1.0, True)
    assert tried.metadata == {"seconds_left": 40.0}


async def test_a_window_that_is_full_is_told_to_the_agent() -> None:
    class Talking(Sums):
        async def run(self, sample: Sampling) -> Mapping[str, int | str]:
            conversation, messages = sample.model.conversation(), []
            while True:
                messages.append({"role": "user", "content": "go on"})
                reply = await conversation.generate(messages)
                messages.append(reply.message)
                if reply.finish_reason == "context_full":
                    return {"reason": reply.finish_reason}

        async def grade(self, grading: Grading) -> float:
            return 0.5

    tried = await attempt(
        Talking, {"left": 1, "right": 2}, replies=lambda _, __: "more", terms=Terms(max_seq_len=60)
    )
    assert (tried.reward, tried.metadata) == (0.5, {"reason": "context_full"})
    assert tried.attempt.flags.context_full
    [row] = tried.attempt.sequences
    assert len(row.ids) <= 60


async def test_other_models_have_scripts_of_their_own() -> None:
    class Judged(Sums):
        async def grade(self, grading: Grading) -> float:
            reply = (
                await grading.models["judge"]
                .conversation()
                .generate([{"role": "user", "content": f"grade {self.answer}"}])
            )
            return float(reply.content or "nan")

    terms = Terms(models={"judge": ["0.75"]})
    tried = await attempt(Judged, {"left": 1, "right": 2}, replies=["3"], terms=terms)
    assert (tried.reward, tried.replies_used) == (0.75, 1)
    assert [call.producer for call in tried.transcript] == ["main", "judge"]


async def test_a_group_grader_grades_a_group_of_one() -> None:
    class Ranked(Episode[Sum, None]):
        async def setup(self, setup: Setup) -> None:
            self.steps = 1

        async def run(self, sample: Sampling) -> None:
            await sample.model.conversation().generate([{"role": "user", "content": "?"}])

        @classmethod
        async def grade_group(cls, group: GroupGrading) -> Sequence[float]:
            return [attempt.episode.steps / 4 for attempt in group.attempts]

    tried = await attempt(Ranked, {"left": 1, "right": 2}, replies=["3"])
    assert tried.reward == 0.25
