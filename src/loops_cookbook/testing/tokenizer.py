"""A tokenizer and a chat format that need no download, so that whole runs work offline.

A `ByteTokenizer` has an id for each byte, a few for the marks of a chat, and one for each word
it is given. `PlainRenderer` writes a chat with it: a mark for the role, the content, the end
mark. Tools stand before everything else, a call is JSON between `<tool_call>` and `</tool_call>`.
The format is append-only: extending recorded ids and rendering anew give the same ids wherever
the model spelt its reply as the tokenizer would.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, cast

import numpy as np

from loops_cookbook.messages import Message, Tool, text_of, well_formed
from loops_cookbook.renderers.base import ParsedReply
from loops_cookbook.renderers.tool_calls import Marked, read_calls
from loops_cookbook.tokens import Ids

_ROLES = ("system", "developer", "user", "assistant", "tool")
_BYTES = 256
_CALLS = Marked("<tool_call>", "</tool_call>")


class ByteTokenizer:
    """UTF-8 bytes as token ids.

    Args:
        words: pieces of text with an id of their own. `encode` takes the longest that fits, so
            text that was sampled byte by byte is spelt otherwise than `encode` spells it, as
            happens with every real tokenizer.
    """

    end_id = _BYTES
    """Ends a message; the stop token of a reply."""
    role_ids: ClassVar[dict[str, int]] = {
        role: _BYTES + 1 + index for index, role in enumerate(_ROLES)
    }
    """The mark that begins a message of each role."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        first = _BYTES + 1 + len(_ROLES)
        self._ids = {word: first + index for index, word in enumerate(words)}
        self._longest_first = sorted(self._ids, key=len, reverse=True)
        marks = {self.end_id: "<|end|>"} | {i: f"<|{role}|>" for role, i in self.role_ids.items()}
        self._texts = {i: bytes([i]) for i in range(_BYTES)}
        self._texts |= {i: text.encode() for i, text in marks.items()}
        self._texts |= {i: word.encode() for word, i in self._ids.items()}
        self.vocabulary_size = first + len(words)
        """One more than the highest id."""

    def encode(self, text: str) -> list[int]:
        """The ids that this tokenizer itself spells a text with."""
        ids: list[int] = []
        while text and self._longest_first:
            word = next((w for w in self._longest_first if text.startswith(w)), None)
            ids += self.spell(text[0]) if word is None else [self._ids[word]]
            text = text[1 if word is None else len(word) :]
        return ids + self.spell(text)

    def spell(self, text: str) -> list[int]:
        """A text byte by byte, as a model may write it just as well."""
        return list(well_formed(text).encode())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of any ids; marks are shown as `<|user|>`, broken UTF-8 as U+FFFD."""
        ids = list(ids)
        try:
            text = bytes(ids)
        except ValueError:  # not bytes alone
            text = b"".join([self._texts.get(i, b"<|?|>") for i in ids])
        return text.decode(errors="replace")


class PlainRenderer:
    """A chat format for tests; implements `renderers.base.Renderer`.

    Args:
        tokenizer: whose ids it writes.
        extends: False makes it a format whose prompts cannot be extended.
    """

    name = "PlainRenderer"
    chosen = "for tests"
    why_no_tools = None

    def __init__(self, tokenizer: ByteTokenizer | None = None, *, extends: bool = True) -> None:
        self.tokenizer = tokenizer or ByteTokenizer()
        self.stop_token_ids = (self.tokenizer.end_id,)
        self.why_not_extended = None if extends else "it was made so"
        self.extends_results = extends

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Ids:
        """The prompt for the next assistant message."""
        ids = self._message("system", _declared(tools)) if tools else []
        return self._array(ids, messages)

    def extend(
        self,
        prompt_ids: Ids,
        sampled_ids: Ids,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> Ids | None:
        """The next prompt; a reply that was cut gets its end mark as context."""
        if self.why_not_extended:
            return None
        ids: list[int] = [*prompt_ids.tolist(), *sampled_ids.tolist()]
        if not sampled_ids.size or sampled_ids[-1] != self.tokenizer.end_id:
            ids.append(self.tokenizer.end_id)
        return self._array(ids, new_messages)

    def supervise(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Ids:
        """The last message's content, its calls as they are read, and the end mark.

        Raises:
            ValueError: it calls tools, and none are declared: they would be read as content.
        """
        if messages[-1].get("tool_calls") and not tools:
            raise ValueError("the message calls tools, and none are declared")
        text = _written(messages[-1])
        return np.array([*self.tokenizer.encode(text), self.tokenizer.end_id], np.int32)

    def parse(self, sampled_ids: Ids, tools: Sequence[Tool] | None = None) -> ParsedReply:
        """All of a reply is its content, but for calls where tools are declared."""
        ids: list[int] = sampled_ids.tolist()
        if ids and ids[-1] == self.tokenizer.end_id:
            ids.pop()
        text = self.tokenizer.decode(ids)
        if not tools:
            return ParsedReply(content=text)
        said = read_calls(_CALLS, text, tools, sampled_ids)
        return ParsedReply(
            content=said.content, tool_calls=said.calls, malformed_tool_calls=said.malformed
        )

    def decode(self, ids: Ids) -> str:
        """Text for people, marks included."""
        return self.tokenizer.decode(ids.tolist())

    def _array(self, ids: list[int], messages: Sequence[Message]) -> Ids:
        for message in messages:
            ids += self._message(str(message["role"]), _written(message))
        ids.append(self.tokenizer.role_ids["assistant"])
        return np.array(ids, np.int32)

    def _message(self, role: str, text: str) -> list[int]:
        tokenizer = self.tokenizer
        return [tokenizer.role_ids[role], *tokenizer.encode(text), tokenizer.end_id]


def tool_call(name: str, /, **arguments: object) -> str:
    """A call as a scripted model writes it: `"I look. " + tool_call("look", at="sea")`."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{_CALLS.opens}{body}{_CALLS.closes}"


def _declared(tools: Sequence[Tool]) -> str:
    return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def _written(message: Message) -> str:
    """A message's content, and its calls in the form in which they are read."""
    pieces = [text_of(message.get("content")) or ""]
    for call in cast(Sequence[Mapping[str, object]], message.get("tool_calls") or ()):
        function = cast(Mapping[str, object], call.get("function") or call)
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        body = f'{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments}}}'
        pieces.append(f"{_CALLS.opens}{body}{_CALLS.closes}")
    return "\n".join(piece for piece in pieces if piece)
