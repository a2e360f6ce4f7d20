"""Scripted judges answer as a service would, and a config's real ones can be opened."""

from pathlib import Path

import anyio
import pytest
from pydantic import BaseModel
from trio.testing import MockClock

from loops_cookbook.episodes import Episode, Grading, Sampling
from loops_cookbook.errors import ConfigError, EpisodeError, ServiceRefused, ServiceUnavailable
from loops_cookbook.services import ChatAnswer, ChatRequest
from loops_cookbook.testing import Line, ScriptedChat, attempt_group, judges, open_models

pytestmark = pytest.mark.anyio

ASK = ChatRequest(({"role": "system", "content": "rate"}, {"role": "user", "content": "this"}))


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


async def test_a_list_is_said_step_by_step_and_its_end_is_an_error() -> None:
    chat = ScriptedChat(["1", ChatAnswer("2", "thinking"), Line("3", seconds=7)])
    said = [(await chat.complete(ASK)).content for _ in range(3)]
    assert said == ["1", "2", "3"]
    assert anyio.current_time() == 7.0
    with pytest.raises(ServiceRefused, match="call 4 came to a judge's script of 3"):
        await chat.complete(ASK)


async def test_a_function_sees_the_messages_as_one_text() -> None:
    chat = ScriptedChat(lambda prompt, call: f"{call}: {prompt}")
    told = "<|system|>rate<|end|><|user|>this<|end|><|assistant|>"
    assert (await chat.complete(ASK)).content == f"0: {told}"
    assert (await chat.complete(ASK)).content == f"1: {told}"
    assert chat.prompts == (told, told)


async def test_an_exception_is_raised() -> None:
    with pytest.raises(ServiceUnavailable, match="gone"):
        await ScriptedChat([ServiceUnavailable("gone")]).complete(ASK)


async def test_a_text_ends_at_its_stop_string_and_its_limit() -> None:
    chat = ScriptedChat(lambda _, __: "one. two")
    stopped = await chat.complete(ChatRequest(ASK.messages, stop=(".",)))
    assert (stopped.content, stopped.finish_reason) == ("one", "stop")
    cut = await chat.complete(ChatRequest(ASK.messages, max_tokens=5))
    assert (cut.content, cut.finish_reason) == ("one. ", "length")


CONFIG = """
recipe = "rl"
model.name = "m"
episode = { class = "e:E", tasks = "t.jsonl" }

[producers.judge]
base_url = "http://127.0.0.1:9/v1"
model = "j"
api_key_env = "TESTING_JUDGE_KEY"
"""


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_judges_of_a_config_are_opened_with_the_keys_that_a_run_would_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TESTING_JUDGE_KEY", raising=False)
    (tmp_path / "train.toml").write_text(CONFIG)
    with pytest.raises(ConfigError, match="TESTING_JUDGE_KEY is neither"):
        async with open_models("train.toml", working_directory=tmp_path):
            pass
    (tmp_path / ".env").write_text("TESTING_JUDGE_KEY=sk-0123456789")
    async with open_models("train.toml", working_directory=tmp_path) as models:
        assert list(models) == ["judge"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_judge_that_cannot_be_reached_is_given_up_while_somebody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried for ten minutes: measuring a judge that was not up took an hour, in silence."""
    monkeypatch.setenv("TESTING_JUDGE_KEY", "sk-0123456789")
    monkeypatch.setattr(judges, "PATIENCE_SECONDS", 0.01)
    (tmp_path / "train.toml").write_text(CONFIG)
    async with open_models("train.toml", working_directory=tmp_path) as models:
        with pytest.raises(ServiceUnavailable, match="producer 'judge'"):
            await models["judge"].complete(ChatRequest(({"role": "user", "content": "?"},)))


class Nothing(BaseModel):
    pass


class Said(Episode[Nothing, None]):
    async def run(self, sample: Sampling) -> None:
        asked = [{"role": "user", "content": "?"}]
        self.said = [(await sample.model.conversation().generate(asked)).content for _ in range(2)]

    async def grade(self, grading: Grading) -> float:
        return float("".join(word or "" for word in self.said))


async def test_each_attempt_of_a_group_has_its_own_script() -> None:
    group = await attempt_group(Said, {}, replies=[["1", "2"], ["3", "4"], ["5"]])
    assert group.rewards == (12.0, 34.0, None)
    assert [tried.replies_used for tried in group.attempts] == [2, 2, 2]
    assert group.unusable is None


async def test_a_group_of_one_teaches_nothing() -> None:
    assert (await attempt_group(Said, {}, replies=[["1", "2"]])).unusable == "too_few"


async def test_a_group_needs_a_script() -> None:
    with pytest.raises(EpisodeError, match="give a script for each attempt"):
        await attempt_group(Said, {}, replies=[])
