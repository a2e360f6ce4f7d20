"""A renderer for any Hugging Face chat template, with no code of the model's own.

The template is probed once (`renderers.probe`). `render` is the template's text as ids. `extend`
appends, to the recorded ids, what the template writes after a reply; so what was sampled is
kept as it was, also where a tokenizer would split the same text in another way. A reply that
was cut by its token limit gets the close token as context, which is never trained.

Tools are declared by the template itself, and its calls are read in the form in which it writes
them (`renderers.tool_shape`); where it cannot do both, tools are refused with the reason.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

import numpy as np

from loops_cookbook.errors import ModelError
from loops_cookbook.messages import Message, Tool
from loops_cookbook.renderers.base import ParsedReply
from loops_cookbook.renderers.marks import TurnMarks
from loops_cookbook.renderers.plain import from_json, to_json
from loops_cookbook.renderers.probe import (
    CLOSE,
    NEXT,
    OPEN,
    PAST,
    REPLY,
    Shape,
    ThinkingRetention,
    probe,
    takes_parts,
)
from loops_cookbook.renderers.supervised import reply_text, up_to_stop
from loops_cookbook.renderers.tokenizers import ChatTokenizer
from loops_cookbook.renderers.tool_calls import read_calls
from loops_cookbook.renderers.tool_shape import (
    TOOL,
    ToolShape,
    end_of_reply,
    past_calls,
    probe_tools,
    result_of,
)
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
            with_tool = partial(self._text, tools=[TOOL])
            self._tools = probe_tools(self._text, with_tool, tokenizer, thinking_retention)
        except ValueError as error:
            raise ModelError(
                f"{tokenizer.name}: its tokenizer cannot express what its chat template writes "
                f"({error}): add the missing tokens, or name another folder in [model] tokenizer"
            ) from error
        self._marks = TurnMarks(tokenizer, lambda said: self._render(to_json(said)))
        closes = [self._shape.close_id]
        if not isinstance(self._tools, str):
            closes.append(self._tools.close_id)
        self._closes = tuple(i for i in dict.fromkeys(closes) if i is not None)
        self._stops = tuple(dict.fromkeys([*self._shape.stop_ids, *self._closes]))
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
        """The tokens that close a reply, then the model's own ends of text."""
        return self._stops

    @property
    def why_not_extended(self) -> str | None:
        """What keeps a user's message from extending a prompt, None if nothing does."""
        return self._shape.why_not_extended

    @property
    def why_no_tools(self) -> str | None:
        """What keeps the template from speaking of tools, None if nothing does."""
        return self._tools if isinstance(self._tools, str) else None

    @property
    def extends_results(self) -> bool:
        """Whether the results of calls extend a prompt."""
        return not isinstance(self._tools, str) and self._tools.keeps_calls

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Ids:
        """The prompt that asks for the next assistant message; int32[T], read-only.

        Raises:
            ValueError: tools are given and cannot be, a content is not text, or the template
                refuses.
        """
        self._tools_shape(tools)
        return self._prompt(self._marks.broken(to_json(messages, tools)))

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
            ValueError: tools are given and cannot be, or a content is not text.
        """
        tooled = self._tools_shape(tools)
        if any(m.get("role") == "assistant" for m in new_messages):
            return None
        reply = self.parse(sampled_ids, tools)
        if not self._keeps(reply, sampled_ids, new_messages, tooled):
            return None
        calls = [(call.id, call.name) for call in reply.tool_calls]
        answers = bool(new_messages) and new_messages[0].get("role") == "tool"
        new = self._marks.broken(to_json(new_messages))
        follows = None
        # Some templates refuse a reply of several calls. What follows one is read off them then.
        for past in [past_calls(calls), past_calls(calls[:1])] if answers and calls else [PAST]:
            follows = follows or self._continuation(self._marks.broken(to_json(past, tools)), new)
        if follows is None:
            return None
        closed, rest = follows
        last = int(sampled_ids[-1]) if len(sampled_ids) else None
        if last == int(closed[-1]):
            return ids_of(np.concatenate([prompt_ids, sampled_ids, rest]))
        if last in self._closes:  # it ended for another kind of message than the one that came
            return None
        return ids_of(np.concatenate([prompt_ids, sampled_ids, closed, rest]))

    def supervise(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Ids:
        """What the model would sample to say the last message, by the template; int32[T].

        Raises:
            ValueError: tools are given and cannot be, a content is not text, or the template
                writes a reply in another way than it asks for one.
        """
        self._tools_shape(tools)
        plain, declared = from_json(self._marks.broken_before(messages, tools))
        asked = self._text(plain[:-1], True, declared)
        written = self._text(plain, False, declared)
        reasoning = plain[-1].get("reasoning_content")
        said = reply_text(asked, written, reasoning if isinstance(reasoning, str) else None)
        ids = ids_of(self._tokenizer.encode(said))
        stopped = up_to_stop(ids, self.stop_token_ids)
        return ids_of([*ids, *self.stop_token_ids[:1]]) if stopped is None else stopped

    def parse(self, sampled_ids: Ids, tools: Sequence[Tool] | None = None) -> ParsedReply:
        """Read a completion up to its first stop token; its white space is kept.

        Calls are looked for where tools are declared, and only after reasoning.
        """
        reply = _split_reasoning(self._said(sampled_ids), self._shape)
        if not tools or isinstance(self._tools, str) or reply.content is None:
            return reply
        said = read_calls(self._tools.dialect, reply.content, tools, sampled_ids)
        return ParsedReply(said.content, reply.reasoning_content, said.calls, said.malformed)

    def decode(self, ids: Ids) -> str:
        """Text for people, special tokens included."""
        return self._tokenizer.decode(cast(list[int], ids.tolist()))

    def _said(self, sampled_ids: Ids) -> str:
        ends = np.flatnonzero(np.isin(sampled_ids, self._stops))
        return self.decode(sampled_ids[: ends[0]] if len(ends) else sampled_ids)

    def _tools_shape(self, tools: Sequence[Tool] | None) -> ToolShape | None:
        if not tools:
            return None
        if isinstance(self._tools, str):
            raise ValueError(self._tools)
        return self._tools

    def _keeps(
        self,
        reply: ParsedReply,
        sampled_ids: Ids,
        new_messages: Sequence[Message],
        tooled: ToolShape | None,
    ) -> bool:
        """Whether the template writes this reply, later on, as it was sampled."""
        reasoned = reply.reasoning_content is not None
        if reasoned and CLOSE not in self._said(sampled_ids):
            return False
        kept: list[bool] = []
        only_results = bool(new_messages) and all(m.get("role") == "tool" for m in new_messages)
        if tooled and (only_results or reply.tool_calls or reply.malformed_tool_calls):
            kept.append(tooled.keeps_reasoned if reasoned else tooled.keeps_calls)
        if not (tooled and only_results):
            talk = tooled.talk if tooled else self._shape
            kept.append(talk.extends_reasoned if reasoned else talk.extends_plain)
            kept.append(tooled is None or tooled.keeps_on)
        return all(kept)

    def _render(self, key: str) -> Ids:
        messages, tools = from_json(key)
        return ids_of(self._tokenizer.encode(self._text(messages, True, tools)))

    def _follow(self, past_key: str, new_key: str) -> tuple[Ids, Ids] | None:
        """Ids that close a reply and those after it, when some messages follow; None if unlike.

        The close is apart because a reply that was not cut has it already.
        """
        (past, tools), (new, _) = from_json(past_key), from_json(new_key)
        likely = NEXT
        if new and new[0].get("role") == "tool":
            likely = result_of(past[-1])
        written = self._past([*past, *new], tools)
        expected = self._past([*past, likely], tools)
        # What follows must leave alone what stood there before.
        if written is None or expected is None or written[0] != expected[0]:
            return None
        ids = ids_of(self._tokenizer.encode(written[1]))
        atomic = np.flatnonzero(np.isin(ids, self._atomic))
        if not len(atomic) or self.decode(ids[: atomic[0]]).strip():
            return None
        end = int(atomic[0]) + 1
        return ids[:end], ids[end:]

    def _past(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> tuple[str, str] | None:
        """The text of a conversation up to the end of its only reply, and after it."""
        calls = cast(Sequence[object], messages[1].get("tool_calls") or ())
        try:
            text = self._text(messages, True, tools)
            end: int | None = text.index(REPLY) + len(REPLY) if not calls else None
            if calls and not isinstance(self._tools, str):
                declared = partial(self._text, tools=tools)
                end = end_of_reply(declared, self._tools.dialect, text, len(calls))
        except ValueError:
            return None
        return None if end is None else (text[:end], text[end:])

    def _text(
        self, messages: Sequence[Message], ask: bool, tools: Sequence[Tool] | None = None
    ) -> str:
        return self._template.render(
            [self._formed(m) for m in messages],
            add_generation_prompt=ask,
            tools=[dict(tool) for tool in tools] if tools else None,
        )

    def _formed(self, message: Message) -> dict[str, object]:
        """A message with its content and its calls in the form that templates take."""
        formed = dict(message)
        content = message.get("content")
        if self._parts and isinstance(content, str):
            formed["content"] = [{"type": "text", "text": content}]
        if calls := message.get("tool_calls"):
            formed["tool_calls"] = [_opened(c) for c in cast(Sequence[Message], calls)]
        return formed


def _opened(call: Mapping[str, object]) -> dict[str, object]:
    """A call with its arguments as an object: templates write JSON themselves."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    function = dict(cast(Mapping[str, object], function))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except (ValueError, RecursionError):
            return dict(call)
    return {**call, "function": function}


def _split_reasoning(text: str, shape: Shape) -> ParsedReply:
    """Reasoning stands first, between marks that the prompt may open and a cut leave open."""
    opened = text.lstrip().startswith(OPEN)
    if not shape.splits_reasoning or not (opened or shape.opens_reasoning):
        return ParsedReply(content=text)
    body = text.partition(OPEN)[2] if opened else text
    reasoning, _, content = body.partition(CLOSE)
    return ParsedReply(content=content.lstrip("\n"), reasoning_content=reasoning.strip())
