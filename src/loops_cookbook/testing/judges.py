"""Models beside the policy in a test: scripted ones, and the real ones of a config.

A `ScriptedChat` stands where a `[producers]` table would. With `open_models` the same code that a
run judges by is put to the real judge, which is how a judge is measured against labelled cases.
"""

import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import anyio

from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.config.rl import RLConfig
from loops_cookbook.errors import ServiceRefused
from loops_cookbook.recipes.producers import open_judges
from loops_cookbook.services.base import Chat, ChatAnswer, ChatRequest
from loops_cookbook.testing.scripted import Line, require_script, require_step
from loops_cookbook.testing.tokenizer import PlainRenderer

PATIENCE_SECONDS = 20.0
"""Less than an attempt's clock for grading: somebody waits for the answer, or for the reason."""

ChatStep: TypeAlias = str | Line | ChatAnswer | Exception
"""What one call of a judge comes to: a text, a `Line` (its text and seconds), an answer in full,
with tool calls say, or an exception, which is raised."""
ChatScript: TypeAlias = Sequence[ChatStep] | Callable[[str, int], ChatStep]
"""A step for each call, in the order in which they arrive; or a function of the messages as one
text and the number of the call, from 0."""


class ScriptedChat:
    """Answers from a script; implements `services.base.Chat`.

    A text is cut at a stop string, which is left out, and at the token limit, a byte a token.
    """

    def __init__(self, script: ChatScript) -> None:
        require_script(script, str, Line, ChatAnswer, Exception)
        self.requests: list[ChatRequest] = []
        """All that it was asked, in order."""
        self._script = script

    @property
    def prompts(self) -> tuple[str, ...]:
        """The messages of each request as one text, such as `<|user|>Is it so?<|end|>`."""
        return tuple(_text(request) for request in self.requests)

    async def complete(self, request: ChatRequest) -> ChatAnswer:
        """The next step of the script.

        Raises:
            ServiceRefused: the script has ended.
            Exception: a step that is one.
        """
        index = len(self.requests)
        self.requests.append(request)
        step = self._step(_text(request), index)
        await anyio.sleep((step.seconds or 0.0) if isinstance(step, Line) else 0.0)
        if isinstance(step, Exception):
            raise step
        if isinstance(step, ChatAnswer):
            return step
        return _cut(step.text if isinstance(step, Line) else step, request)

    def _step(self, prompt: str, index: int) -> ChatStep:
        if callable(self._script):
            step = self._script(prompt, index)
            require_step(step, index, str, Line, ChatAnswer, Exception)
            return step
        if index < len(self._script):
            return self._script[index]
        return ServiceRefused(
            f"call {index + 1} came to a judge's script of {len(self._script)}: write a reply "
            "for it"
        )


@asynccontextmanager
async def open_models(
    config: str | Path, *, working_directory: Path | None = None
) -> AsyncGenerator[Mapping[str, Chat]]:
    """The models of a config's `[producers]`, to be called for real, by name.

    Put them in `Terms(models=...)` to grade scripted replies with them. One that cannot be reached
    is given up after 20 seconds, where a run goes on trying.

    Args:
        config: the config's file; keys come from the environment and `.env`, as in a run.
        working_directory: where a relative path begins; None: the process's.

    Raises:
        ConfigError: the config cannot be read, or a key is missing.
    """
    loaded = load_config(config, working_directory=working_directory)
    rl = loaded.of_recipe(RLConfig)
    read = read_environment(loaded.directory, working_directory=working_directory)
    values = {**read.values, **os.environ}
    tables = rl.config.producers if rl else {}
    async with open_judges(tables, values, patience_seconds=PATIENCE_SECONDS) as judges:
        yield {name: judge.chat for name, judge in judges.items()}


def _text(request: ChatRequest) -> str:
    renderer = PlainRenderer()
    return renderer.decode(renderer.render(request.messages))


def _cut(text: str, request: ChatRequest) -> ChatAnswer:
    ends = [text.index(stop) for stop in request.stop if stop in text]
    said = text[: min(ends)] if ends else text
    whole = said.encode()
    if request.max_tokens is not None and len(whole) > request.max_tokens:
        cut = whole[: request.max_tokens].decode(errors="replace")
        return ChatAnswer(cut, finish_reason="length")
    return ChatAnswer(said)
