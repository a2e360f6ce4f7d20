"""Messages to token ids and back, as one Protocol that every chat format is behind.

A renderer is pure: it holds a tokenizer and no conversation. `render` starts a sequence;
`extend` goes on with ids that were recorded, so history is never tokenized again.
"""

from collections.abc import Sequence
from typing import Protocol

from loops_cookbook.messages import MalformedToolCall, Message, Tool, ToolCall
from loops_cookbook.tokens import Ids
from loops_cookbook.values import value


@value
class ParsedReply:
    """What a completion says."""

    content: str | None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed_tool_calls: tuple[MalformedToolCall, ...] = ()


class Renderer(Protocol):
    """One model family's chat format. Not thread-safe: call it from one thread at a time."""

    @property
    def name(self) -> str:
        """The class of the format, such as `Qwen35Renderer`."""
        ...

    @property
    def chosen(self) -> str:
        """How it was chosen, such as `auto-detected by Prime`."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end the model's turn."""
        ...

    @property
    def why_not_extended(self) -> str | None:
        """None where `extend` works, else why a user's message begins a new sequence."""
        ...

    @property
    def extends_results(self) -> bool:
        """Whether the results of tool calls extend a prompt, also where a user's message does not.

        Many formats drop the reasoning of earlier turns only when a user speaks again.
        """
        ...

    @property
    def why_no_tools(self) -> str | None:
        """None where tools can be declared and their calls read, else the reason why not."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Ids:
        """The prompt that asks for the next assistant message; int32[T].

        Raises:
            ValueError: the messages have a form that this format cannot express.
        """
        ...

    def extend(
        self,
        prompt_ids: Ids,
        sampled_ids: Ids,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> Ids | None:
        """The next prompt, beginning exactly with `prompt_ids + sampled_ids`; int32[T].

        `new_messages` are those after the reply that `sampled_ids` is. None where this cannot
        be done; the caller then begins a new sequence with `render`.
        """
        ...

    def supervise(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Ids:
        """What the model would sample to say the last message, an assistant's; int32[T].

        It follows `render` of the messages before it, and ends with a stop token.

        Raises:
            ValueError: this format cannot express the message as a reply.
        """
        ...

    def parse(self, sampled_ids: Ids, tools: Sequence[Tool] | None = None) -> ParsedReply:
        """Read a completion; never raises on what a model may say."""
        ...

    def decode(self, ids: Ids) -> str:
        """Text for people, special tokens included."""
        ...
