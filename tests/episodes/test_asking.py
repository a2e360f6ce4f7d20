"""What an agent hands to a conversation: refused in words if it makes no sense, kept if copied."""

import copy
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pydantic import BaseModel

from loops_cookbook.episodes import Episode, Grading, Model, Sampling
from loops_cookbook.messages import Message
from loops_cookbook.testing import Tried, attempt

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


class Nothing(BaseModel):
    """A task of which nothing needs to be known."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def made(agent: Callable[[Model], Awaitable[object]]) -> Tried:
    """An attempt whose agent is one function."""

    class Agent(Episode[Nothing, None]):
        async def run(self, sample: Sampling) -> None:
            await agent(sample.model)

        async def grade(self, grading: Grading) -> float:
            return 1.0

    return await attempt(Agent, {}, replies=lambda _, index: f"reply {index}")


async def test_what_a_copy_of_a_conversation_samples_is_the_attempts_own() -> None:
    """A deep copy took its record along: what it sampled was never trained, and nobody said so."""

    async def agent(model: Model) -> None:
        conversation = model.conversation()
        first = await conversation.generate([user("a")])
        history = [user("a"), first.message, user("b")]
        for copied in (copy.copy(conversation), copy.deepcopy(conversation)):
            await copied.generate(history)
        await copy.deepcopy(model).conversation().generate(history)

    tried = await made(agent)
    assert [call.origin for call in tried.transcript] == ["first", "extended", "extended", "first"]
    assert len(tried.attempt.sequences) == 3
    assert sum(row.sampled_tokens for row in tried.attempt.sequences) == 4 * len("reply 0\0")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_tokens": "5"}, "max_tokens='5': use a whole number from 1 on"),
        ({"max_tokens": 2.5}, "max_tokens=2.5: use a whole number from 1 on"),
        ({"stop": 3}, "stop=3: use a string or a list of strings"),
        ({"stop": ["a", 3]}, "stop=['a', 3]: use a string or a list of strings"),
    ],
)
async def test_a_limit_or_a_stop_that_is_none_is_refused(asked: Any, words: str) -> None:
    """They were a `TypeError` of the sampler's."""
    tried = await made(lambda model: model.conversation().generate([user("a")], **asked))
    assert tried.fate == "discarded/failed"
    assert f"generate() was given {words}" in tried.detail


async def test_a_call_without_a_name_is_refused_with_its_place() -> None:
    """It was a `TypeError` of the history's."""
    nameless = {"role": "assistant", "tool_calls": [{"function": {"name": ["look"]}}]}
    tried = await made(lambda m: m.conversation().generate([user("a"), nameless, user("b")]))
    assert "messages[1] of generate() (assistant) is not in OpenAI form" in tried.detail
