"""Messages and tools as one JSON text: what a renderer is a function of, and remembers it by.

Equal texts render to equal ids. Only what no format tells apart is made equal: absent fields
and None, text parts and their joined string. White space stays: it is part of a prompt.
"""

import json
from collections.abc import Sequence
from typing import TypeAlias

from loops_cookbook.messages import Message, Tool, text_of

PlainMessages: TypeAlias = list[dict[str, object]]


def to_json(messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str:
    """Write messages and tools down.

    Raises:
        ValueError: a content is not text, or a field is not plain JSON.
    """
    plain = [{k: v for k, v in message.items() if v is not None} for message in messages]
    for message in plain:
        if "content" in message:
            message["content"] = text_of(message["content"])
    try:
        return json.dumps([plain, list(tools or ())], ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"a message must be plain JSON: {error}") from error


def from_json(text: str) -> tuple[PlainMessages, PlainMessages | None]:
    """Messages and tools, None for no tools."""
    messages, tools = json.loads(text)
    return messages, tools or None
