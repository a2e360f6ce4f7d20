"""A data row: one conversation in OpenAI form, and which of its messages are trained on.

What a row may hold is checked here, down to the key of a message, since a mistyped `train` would
otherwise train on what it should not. Other keys of the row itself (an id, a source) are passed
over. How a row becomes tokens is not known here.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from loops_cookbook.config.sft import TrainOn
from loops_cookbook.messages import Message, Tool
from loops_cookbook.problems import BrokenRules, Problem
from loops_cookbook.tasks import Task

Content: TypeAlias = str | list[dict[str, object]] | None
DataRow: TypeAlias = "Task[Row]"
"""A row with its place in its file."""


class FunctionCall(BaseModel):
    """A call of one function."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1)
    arguments: str | dict[str, object] = "{}"
    """A JSON object, as text or as it is."""

    @field_validator("arguments")
    @classmethod
    def _an_object(cls, arguments: object) -> object:
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"not JSON ({error}); write an object") from error
            if not isinstance(parsed, dict):
                raise ValueError("not a JSON object; write one")
        return arguments


class RowToolCall(BaseModel):
    """A tool call of an assistant message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class RowMessage(BaseModel):
    """One message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[RowToolCall] | None = None
    reasoning_content: str | None = None
    train: bool | None = None
    """Whether it is trained on; None: as `[data] train_on` says."""

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_reasoning(cls, message: object) -> object:
        """`reasoning` is what some services call it; fields that are null say nothing."""
        if not isinstance(message, dict):
            return message
        given = {k: v for k, v in cast(dict[str, Any], message).items() if v is not None}
        if "reasoning" in given and "reasoning_content" not in given:
            given["reasoning_content"] = given.pop("reasoning")
        return given

    @model_validator(mode="after")
    def _keep_rules(self) -> "RowMessage":
        if broken := tuple(self._broken_rules()):
            raise BrokenRules(broken)
        return self

    def _broken_rules(self) -> Iterator[Problem]:
        if self.role == "assistant":
            if self.content is None and not self.tool_calls and self.reasoning_content is None:
                yield Problem(("content",), "missing, and there are no tool_calls; add either")
            return
        for key in ("train", "tool_calls", "reasoning_content"):
            if getattr(self, key) is not None:
                yield Problem((key,), f"set on a {self.role} message; only an assistant has it")
        if self.content is None:
            yield Problem(("content",), "missing; add it")

    def as_message(self) -> Message:
        """The message as renderers take it."""
        message = self.model_dump(exclude_none=True, exclude={"train"})
        for call in cast(list[dict[str, Any]], message.get("tool_calls") or ()):
            call.pop("index", None)
        return message


class Row(BaseModel):
    """One line of a data file."""

    model_config = ConfigDict(extra="ignore", strict=True)

    messages: Annotated[list[RowMessage], Field(min_length=1)]
    tools: list[dict[str, object]] | None = None

    def conversation(self) -> tuple[Message, ...]:
        """Its messages as renderers take them."""
        return tuple(message.as_message() for message in self.messages)

    def declared_tools(self) -> tuple[Tool, ...]:
        """Its tools, none for an empty list too."""
        return tuple(cast(list[Mapping[str, object]], self.tools or ()))

    def trained(self, train_on: TrainOn) -> tuple[int, ...]:
        """Which of its messages are trained on, by their places.

        A message's own `train` goes first; without one `all` means every assistant message, and
        `last` the last.
        """
        places = [i for i, message in enumerate(self.messages) if message.role == "assistant"]
        chosen = places if train_on == "all" else places[-1:]
        return tuple(
            i
            for i in places
            if (i in chosen if self.messages[i].train is None else self.messages[i].train)
        )
