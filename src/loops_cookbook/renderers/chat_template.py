"""A renderer for any Hugging Face chat template, with no code of the model's own.

The template is probed once (`renderers.probe`). `render` is the template's text as ids. `extend`
appends, to the recorded ids, what the template writes after a reply; so what was sampled is
kept as it was, also where a tokenizer would split the same text in another way. A reply that
was cut by its token limit gets the close token as context, which is never trained.

Tool calls are not parsed yet: tools are refused.
"""

import functools
from collections.abc import Sequence
from typing import cast

import numpy as np

from loops_cookbook.errors import ModelError
from loops_cookbook.messages import Message, Tool
from loops_cookbook.renderers.base import ParsedReply
from loops_cookbook.renderers.plain import from_json, to_json
from loops_cookbook.renderers.probe import (
    CLOSE,
    OPEN,
    PAST,
    Shape,
    ThinkingRetention,
    probe,
    takes_parts,
)
from loops_cookbook.renderers.tokenizers import ChatTokenizer
from loops_cookbook.tokens import Ids, ids_of

REMEMBERED = 64
"""Rendered conversations kept: the attempts of a group, and of its neighbours, share prompts."""


class ChatTemplateRenderer:
    """Renders by a chat template, and extends if the template never rewrites what it wrote.

    Args:
        tokenizer: with a chat template.
        chosen: how this renderer was chosen; by default, that it was probed.
        thinking_retention: `all` extends a reply even if the template drops its reasoning.

    Raises:
        ModelError: there is no chat template, it cannot render a user's message, or the tokenizer
            cannot express what it writes.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        chosen: str | None = None,
        thinking_retention: ThinkingRetention = "template",
    ) -> None:
        from loops_cookbook.renderers.templates import ChatTemplate

        if not tokenizer.template:
            raise ModelError(
                f"{tokenizer.name} has no chat template: add a chat_template.jinja beside its "
                "tokenizer, or name another folder in [model] tokenizer"
            )
        self._tokenizer = tokenizer
        self._template = ChatTemplate(
            tokenizer.template, tokenizer.special_tokens, name=tokenizer.name
        )
        self._atomic = np.array(sorted(tokenizer.atomic_ids()), np.int32)
        self._chosen = chosen or f"probed from the chat template of {tokenizer.name}"
        self._parts = False
        self._parts = takes_parts(self._text, tokenizer.name)
        try:
            self._shape = probe(self._text, tokenizer, thinking_retention)
        except ValueError as error:
            raise ModelError(
                f"{tokenizer.name}: its tokenizer cannot express what its chat template writes "
                f"({error}): add the missing tokens, or name another folder in [model] tokenizer"
            ) from error
        self._prompt = functools.lru_cache(REMEMBERED)(self._render)
        self._continuation = functools.lru_cache(REMEMBERED)(self._follow)

    @property
    def name(self) -> str:
        """Always `ChatTemplateRenderer`: the template, not a class, makes the format."""
        return type(self).__name__

    @property
    def chosen(self) -> str:
        """How it was chosen."""
        return self._chosen

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The token that closes a reply, then the model's own ends of text."""
        return self._shape.stop_ids

    @property
    def why_not_extended(self) -> str | None:
        """What keeps the template from being extended, None if nothing does."""
        return self._shape.why_not_extended

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Ids:
        """The prompt that asks for the next assistant message; int32[T], read-only.

        Raises:
            ValueError: tools are given, a content is not text, or the template refuses.
        """
        _refuse(tools)
        return self._prompt(to_json(messages))

    def extend(
        self,
        prompt_ids: Ids,
        sampled_ids: Ids,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> Ids | None:
        """The next prompt, beginning exactly with `prompt_ids + sampled_ids`; int32[T].

        None if the template would write this history in another way: it never extends, the new
        messages hold a reply or are refused here, or this reply's reasoning would be dropped.

        Raises:
            ValueError: tools are given, or a content is not text.
        """
        _refuse(tools)
        shape = self._shape
        if shape.why_not_extended or any(m.get("role") == "assistant" for m in new_messages):
            return None
        if not self._keeps(sampled_ids):
            return None
        follows = self._continuation(to_json(new_messages))
        if follows is None:
            return None
        closed, rest = follows
        last = int(sampled_ids[-1]) if len(sampled_ids) else None
        if last == int(closed[-1]):
            return ids_of(np.concatenate([prompt_ids, sampled_ids, rest]))
        if last == shape.close_id:  # it ended for another kind of message than the one that came
            return None
        return ids_of(np.concatenate([prompt_ids, sampled_ids, closed, rest]))

    def parse(self, sampled_ids: Ids, tools: Sequence[Tool] | None = None) -> ParsedReply:
        """Read a completion up to its first stop token; its white space is kept."""
        return _split_reasoning(self._said(sampled_ids), self._shape)

    def decode(self, ids: Ids) -> str:
        """Text for people, special tokens included."""
        return self._tokenizer.decode(cast(list[int], ids.tolist()))

    def _said(self, sampled_ids: Ids) -> str:
        ends = np.flatnonzero(np.isin(sampled_ids, self._shape.stop_ids))
        return self.decode(sampled_ids[: ends[0]] if len(ends) else sampled_ids)

    def _keeps(self, sampled_ids: Ids) -> bool:
        """Whether the template writes this reply, later on, as it was sampled."""
        shape = self._shape
        text = self._said(sampled_ids)
        if _split_reasoning(text, shape).reasoning_content is None:
            return shape.extends_plain
        return shape.extends_reasoned and CLOSE in text

    def _render(self, key: str) -> Ids:
        messages, _ = from_json(key)
        return ids_of(self._tokenizer.encode(self._text(messages, True)))

    def _follow(self, key: str) -> tuple[Ids, Ids] | None:
        """Ids that close a reply and those after it, when some messages follow; None if unlike.

        The close is apart because a reply that was not cut has it already.
        """
        new, _ = from_json(key)
        try:
            text = self._text([*PAST, *new], True)
        except ValueError:
            return None
        if not text.startswith(self._shape.past):
            return None
        ids = ids_of(self._tokenizer.encode(text[len(self._shape.past) :]))
        atomic = np.flatnonzero(np.isin(ids, self._atomic))
        if not len(atomic) or self.decode(ids[: atomic[0]]).strip():
            return None
        end = int(atomic[0]) + 1
        return ids[:end], ids[end:]

    def _text(self, messages: Sequence[Message], ask: bool) -> str:
        return self._template.render([self._formed(m) for m in messages], add_generation_prompt=ask)

    def _formed(self, message: Message) -> dict[str, object]:
        """A message with its content in the form that the template takes."""
        content = message.get("content")
        if not self._parts or not isinstance(content, str):
            return dict(message)
        return {**message, "content": [{"type": "text", "text": content}]}


def _refuse(tools: Sequence[Tool] | None) -> None:
    if tools:
        raise ValueError(
            "tools are not supported with a probed chat template yet: call the model without them, "
            "or train a model that Prime's renderers know"
        )


def _split_reasoning(text: str, shape: Shape) -> ParsedReply:
    """Reasoning stands first, between marks that the prompt may open and a cut leave open."""
    opened = text.lstrip().startswith(OPEN)
    if not shape.splits_reasoning or not (opened or shape.opens_reasoning):
        return ParsedReply(content=text)
    body = text.partition(OPEN)[2] if opened else text
    reasoning, _, content = body.partition(CLOSE)
    return ParsedReply(content=content.lstrip("\n"), reasoning_content=reasoning.strip())
