"""The marks of turns, which a format writes and no message can.

A tokenizer takes `<|im_end|>` for its token wherever the text stands. What a user says, or a tool
gave back, could so end its own message and begin another, in the name of anybody; a policy that
writes such text into a file, and reads it again, would learn to. So a mark within a message is
broken in two by `BREAK`, which `ChatTokenizer.encode` heeds and leaves out: the model reads the
same letters, as text.

Marks are the special tokens with which a plain conversation is written. Others, such as `<think>`
or `<tool_call>`, stay what the tokenizer makes of them: prompts speak of them, and models were
trained to read them as tokens there.
"""

import json
import re
from collections.abc import Callable, Sequence

from loops_cookbook.messages import Message, Tool
from loops_cookbook.renderers.plain import from_json, to_json
from loops_cookbook.renderers.probe import CLOSE, OPEN
from loops_cookbook.renderers.tokenizers import BREAK, ChatTokenizer
from loops_cookbook.tokens import Ids

_SAID: tuple[Message, ...] = (
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "!"},
)
_RESULT: Message = {"role": "tool", "tool_call_id": "qzcall000", "name": "look", "content": "."}
_CONVERSATIONS: Sequence[Sequence[Message]] = (
    ({"role": "system", "content": "."}, *_SAID, _SAID[0]),
    (*_SAID, _SAID[0]),
    (*_SAID, _RESULT),
)


class TurnMarks:
    """Keeps the marks of one format out of messages.

    Args:
        tokenizer: of the model.
        render: the format; it raises `ValueError` on a conversation that it does not take.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, render: Callable[[Sequence[Message]], Ids]
    ) -> None:
        written: set[int] = set()
        for conversation in _CONVERSATIONS:
            try:
                written.update(render(conversation).tolist())
            except ValueError:
                continue
        texts = {tokenizer.text_of(i) for i in written & tokenizer.special_ids()}
        texts -= {OPEN, CLOSE, tokenizer.special_tokens.get("unk_token", "")}
        # A word could be a role or a key as well, and one letter cannot be broken.
        marks = (json.dumps(text, ensure_ascii=False)[1:-1] for text in texts if not text.isalnum())
        self._marks = sorted(mark for mark in marks if len(mark) > 1)
        # Looked ahead, so that one mark within another is found too.
        begins = "|".join(map(re.escape, self._marks))
        self._begins = re.compile(rf"(?=(?:{begins}))(.)", re.DOTALL)

    def broken_before(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> str:
        """`plain.to_json`, with every mark broken but those of the last message.

        A demonstration that holds a mark would be trained to spell it; as it is, it ends there,
        and whoever compares what was said with what is read back finds out.
        """
        before, declared = from_json(self.broken(to_json(messages[:-1], tools)))
        last, _ = from_json(to_json(messages[-1:]))
        return to_json([*before, *last], declared)

    def broken(self, key: str) -> str:
        """What `plain.to_json` wrote, with every mark in it broken."""
        if not any(mark in key for mark in self._marks):
            return key
        return self._begins.sub(rf"\1{BREAK}", key)
