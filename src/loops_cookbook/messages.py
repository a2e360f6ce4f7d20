"""What an agent says and reads: messages in OpenAI form, and the tool calls in them.

A message is the plain mapping a user writes, never a class of ours. Two messages are the same
turn of a conversation when `canonical` of both is equal: that is the rule by which a call
extends an earlier one, so it forgives what clients change on the way (key order, absent
against None, text parts against a string, outer white space, the spacing of JSON arguments).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from loops_cookbook.problems import found

Message: TypeAlias = Mapping[str, object]
"""One message in OpenAI form: `role`, `content`, and for an assistant `tool_calls`."""

Tool: TypeAlias = Mapping[str, object]
"""A tool's declaration in OpenAI form: `{"type": "function", "function": {...}}`."""


_IMAGES = ("image", "image_url", "input_image")
"""What the clients in use call a part that is an image."""
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made of one tool."""

    id: str
    name: str
    arguments: Mapping[str, object]
    """Parsed from the model's JSON."""

    def as_message_part(self) -> dict[str, object]:
        """The call as it stands in an assistant message's `tool_calls`."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
        }

    def result(self, content: str) -> dict[str, object]:
        """What the tool gave back, as the message that answers this call."""
        return {"role": "tool", "tool_call_id": self.id, "name": self.name, "content": content}


@dataclass(frozen=True, slots=True)
class MalformedToolCall:
    """Text that was meant as a tool call and could not be parsed."""

    raw: str
    problem: str


def text_of(content: object) -> str | None:
    """The text of a message's content: a string as it is, text parts joined, else None.

    Raises:
        ValueError: it is neither None, a string nor a list of parts, or a part is not text.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Iterable) or isinstance(content, Mapping | bytes):
        raise ValueError(f"content must be a string, a list of parts or null, not {content!r}")
    parts: list[str] = []
    for part in cast(Iterable[object], content):
        text = cast(Mapping[str, object], part).get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise ValueError(f"a content part must be text here, not {_kind(cast(object, part))}")
        parts.append(text)
    return "".join(parts)


def well_formed(text: str) -> str:
    """The text with each lone surrogate, which no encoding of text has, as U+FFFD.

    A model can write one in the arguments of a call, as the JSON escape of half a character, and
    Python reads file names and broken output to some.
    """
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def images_in(content: object) -> int:
    """How many parts of a message's content are images."""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return 0
    return sum(_type_of(part) in _IMAGES for part in cast(Sequence[object], content))


def canonical(message: Message) -> tuple[object, ...]:
    """What two messages must share to be the same turn; comparable and hashable."""
    role = message.get("role")
    content = (text_of(message.get("content")) or "").strip()
    calls = tuple(map(_canonical_call, _calls_of(message)))
    if role == "assistant":
        return (role, content, calls)
    rest = [
        (key, _stable(value))
        for key, value in message.items()
        if key not in {"role", "content", "tool_calls"} and value is not None
    ]
    return (role, content, calls, tuple(sorted(rest)))


def canonical_tools(tools: Sequence[Tool] | None) -> str:
    """A list of tools as one comparable string; None and empty are the same."""
    return _stable(list(tools)) if tools else ""


def _calls_of(message: Message) -> Iterable[Mapping[str, object]]:
    calls = message.get("tool_calls")
    return cast(Iterable[Mapping[str, object]], calls or ())


def _canonical_call(call: Mapping[str, object]) -> tuple[object, str]:
    function = cast(Mapping[str, object], call.get("function") or call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return function.get("name"), arguments
    return function.get("name"), _stable(arguments)


def _stable(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)


def _type_of(part: object) -> object:
    return cast(Mapping[str, object], part).get("type") if isinstance(part, Mapping) else None


def _kind(part: object) -> str:
    """A part in a few words: what it holds may be a whole file."""
    kind = _type_of(part)
    return f"a part of type {kind!r}" if isinstance(kind, str) else found(part)
