"""Adapter over Prime Intellect's `renderers`: every model family that it registers.

Each of its renderers mirrors one family's chat template by hand, extends a prompt across turns
and parses that family's tool calls. It takes any object with a few methods as a tokenizer, so
transformers is not needed. The library is imported here at the top, which costs about a second,
and this module only inside functions.

Written against renderers 0.1.12. What it calls bridging is `extend` here; its promise that a
bridged prompt begins with the recorded ids is checked, not trusted. Images are refused.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import numpy as np
from renderers.base import MODEL_RENDERER_MAP, MULTIMODAL_MODELS
from renderers.base import create_renderer as create  # pyright: ignore[reportUnknownVariableType]
from renderers.configs import config_from_name

from loops_cookbook.errors import ModelError
from loops_cookbook.messages import MalformedToolCall, Message, Tool, ToolCall
from loops_cookbook.problems import one_line
from loops_cookbook.renderers.base import ParsedReply
from loops_cookbook.renderers.marks import TurnMarks
from loops_cookbook.renderers.plain import PlainMessages, from_json, to_json
from loops_cookbook.renderers.prime_tokenizer import PrimeTokenizer
from loops_cookbook.renderers.probe import ThinkingRetention
from loops_cookbook.renderers.supervised import reply_text, up_to_stop
from loops_cookbook.renderers.tokenizers import ChatTokenizer
from loops_cookbook.renderers.tool_calls import call_id
from loops_cookbook.renderers.tool_shape import TOOL
from loops_cookbook.tokens import Ids, ids_of

_DROPS = "the template drops the reasoning of earlier turns"
_ASKED: tuple[Message, ...] = ({"role": "user", "content": "?"},)
REMEMBERED = 64
"""Rendered conversations kept: the attempts of a group, and of its neighbours, share prompts."""


def prime_renderer_name(model_name: str) -> str | None:
    """The class that Prime registers for a model's exact name; needs no file of the model."""
    short = MODEL_RENDERER_MAP.get(model_name)
    return None if short is None else _class_name(short)


def prime_renderer_names() -> dict[str, str]:
    """Every class that Prime registers a model for, and its short name in Prime's configs."""
    return {_class_name(short): short for short in set(MODEL_RENDERER_MAP.values())}


def prime_takes_images(model_name: str) -> bool | None:
    """Whether Prime renders images for a model's exact name, None if it does not know the name."""
    if model_name not in MODEL_RENDERER_MAP:
        return None
    return "image" in MULTIMODAL_MODELS.get(model_name, ())


class PrimeRenderer:
    """One of Prime's renderers behind our Protocol.

    Args:
        tokenizer: of the model, or of one that shares its format.
        class_name: as `prime_renderer_name` gives it.
        known_as: the model's name on the hub, by which some of them choose defaults.
        chosen: how it was chosen.
        thinking_retention: `all` extends across user turns too, and keeps their reasoning.

    Raises:
        ModelError: the tokenizer lacks a token that this format needs.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        class_name: str,
        *,
        known_as: str,
        chosen: str = "auto-detected by Prime",
        thinking_retention: ThinkingRetention = "template",
    ) -> None:
        self._name = class_name
        self._chosen = chosen
        self._tokenizer = tokenizer
        config = config_from_name(prime_renderer_names()[class_name])
        assert config is not None, "only `auto` has no config"
        if thinking_retention == "all":
            config = config.model_copy(update={"thinking_retention": "all"})
        self._atomic = tokenizer.atomic_ids()
        self._prompt = functools.lru_cache(REMEMBERED)(self._render)
        try:
            made = create(PrimeTokenizer(tokenizer, known_as), config)  # pyright: ignore[reportArgumentType]
            self._prime = cast(_Prime, cast(object, made))
            self._asked = self._prompt(to_json(_ASKED)).tolist()
        except Exception as error:  # foreign code, which asserts what it needs
            raise ModelError(
                f"{class_name} does not fit the tokenizer of {tokenizer.name} ({error}): "
                'leave [model] renderer out, or set it to "ChatTemplateRenderer"'
            ) from error
        self._marks = TurnMarks(tokenizer, lambda said: self._written(to_json(said), ask=True))
        self._why_no_tools = self._no_tools()

    @property
    def name(self) -> str:
        """The class in Prime's library, such as `Qwen35Renderer`."""
        return self._name

    @property
    def chosen(self) -> str:
        """How it was chosen."""
        return self._chosen

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end the model's turn, the format's own close first."""
        return tuple(self._prime.get_stop_token_ids())

    @property
    def why_not_extended(self) -> str | None:
        """Why a user's message begins a new sequence."""
        return None if self._retention == "all" else _DROPS

    @property
    def extends_results(self) -> bool:
        """Whether the results of calls extend a prompt; not where reasoning is always dropped."""
        return self._why_no_tools is None and self._retention != "template"

    @property
    def why_no_tools(self) -> str | None:
        """Why tools cannot be declared, None if they can."""
        return self._why_no_tools

    @property
    def _retention(self) -> str:
        """`all`, `tool_cycle` (until a user speaks again) or `template` (never kept)."""
        return str(getattr(self._prime, "effective_thinking_retention", "all"))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Ids:
        """The prompt that asks for the next assistant message; int32[T], read-only.

        Raises:
            ValueError: a content is not text, tools are given and cannot be, or the format
                refuses these messages.
        """
        if tools and self._why_no_tools:
            raise ValueError(self._why_no_tools)
        return self._prompt(self._marks.broken(to_json(messages, tools)))

    def extend(
        self,
        prompt_ids: Ids,
        sampled_ids: Ids,
        new_messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
    ) -> Ids | None:
        """The next prompt, beginning exactly with `prompt_ids + sampled_ids`; int32[T].

        Raises:
            ValueError: a content is not text.
        """
        new, declared = _unpack(self._marks.broken(to_json(new_messages, tools)))
        try:
            bridged = self._prime.bridge_to_next_turn(
                cast(list[int], prompt_ids.tolist()),
                cast(list[int], sampled_ids.tolist()),
                new,
                tools=declared,
            )
        except Exception:  # foreign code: what it cannot extend is rendered, or refused, anew
            return None
        if bridged is None:
            return None
        ids = ids_of(bridged.token_ids)
        recorded = np.concatenate([prompt_ids, sampled_ids])
        return ids if np.array_equal(ids[: len(recorded)], recorded) else None

    def supervise(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> Ids:
        """What the model would sample to say the last message, in this format; int32[T].

        Raises:
            ValueError: a content is not text, or the format refuses these messages.
        """
        asked = self.render(messages[:-1], tools)
        written = self._written(self._marks.broken_before(messages, tools), ask=False)
        ids = written[len(asked) :]
        if not np.array_equal(written[: len(asked)], asked):
            reasoning = messages[-1].get("reasoning_content")
            said = reply_text(
                self.decode(asked),
                self.decode(written),
                reasoning if isinstance(reasoning, str) else None,
            )
            ids = ids_of(self._tokenizer.encode(said))
        stopped = up_to_stop(ids, self.stop_token_ids)
        return ids_of([*ids, self._close(messages, tools)]) if stopped is None else stopped

    def parse(self, sampled_ids: Ids, tools: Sequence[Tool] | None = None) -> ParsedReply:
        """Read a completion by the format's own grammar; a call it cannot read is kept as text.

        Calls are looked for where tools are declared. What is said after a call is kept: most of
        Prime's grammars leave it out.
        """
        ids = cast(list[int], sampled_ids.tolist())
        declared = [dict(tool) for tool in tools] if tools else None
        try:
            parsed = self._prime.parse_response(ids, tools=declared, prompt_ids=self._asked)
        except Exception:  # foreign code on what a model may say: the text is always a reading
            return ParsedReply(content=self._said(ids))
        if not parsed.tool_calls:
            return ParsedReply(parsed.content, parsed.reasoning_content)
        said = self._ended(ids)
        spans = [call.token_span for call in parsed.tool_calls if call.token_span]
        if not tools:
            raw = [call.raw for call in parsed.tool_calls]
            whole = self._tokenizer.decode(said[spans[0][0] :]) if spans else _joined(raw) or ""
            before = "" if parsed.content in whole else parsed.content
            return ParsedReply(_joined([before, whole]) or "", parsed.reasoning_content)
        calls, malformed = _tool_calls(parsed.tool_calls, sampled_ids)
        after = [piece for piece in self._after(said, spans) if piece not in parsed.content]
        return ParsedReply(
            content=_joined([parsed.content, *after]),
            reasoning_content=parsed.reasoning_content,
            tool_calls=calls,
            malformed_tool_calls=malformed,
        )

    def decode(self, ids: Ids) -> str:
        """Text for people, special tokens included."""
        return self._tokenizer.decode(cast(list[int], ids.tolist()))

    def _close(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> int:
        """What ends a reply in a format that closes a message with the mark of the next one."""
        role = "tool" if messages[-1].get("tool_calls") else "user"
        longer = [*messages, {"role": role, "content": "?"}]
        written = self._written(to_json(longer, tools), ask=False)
        marks = written[np.isin(written, self.stop_token_ids)]
        return int(marks[-1]) if len(marks) else self.stop_token_ids[0]

    def _said(self, ids: list[int]) -> str:
        return self._tokenizer.decode(self._ended(ids))

    def _ended(self, ids: list[int]) -> list[int]:
        ends = [i for i, token in enumerate(ids) if token in self.stop_token_ids]
        return ids[: ends[0]] if ends else ids

    def _after(self, ids: list[int], spans: Sequence[tuple[int, int]]) -> list[str]:
        """The words that follow each call at once, where a call ends in a mark of its own."""
        pieces: list[str] = []
        for place, (_, end) in enumerate(spans):
            stop = spans[place + 1][0] if place + 1 < len(spans) else len(ids)
            following = ids[end:stop]
            marks = [i for i, token in enumerate(following) if token in self._atomic]
            if ids[end - 1] in self._atomic:
                pieces.append(self._tokenizer.decode(following[: marks[0] if marks else None]))
        return [piece.strip() for piece in pieces if piece.strip()]

    def _no_tools(self) -> str | None:
        try:
            declared = self._prompt(to_json(_ASKED, [TOOL]))
        except ValueError as error:
            return str(error)
        shown = str(cast(Mapping[str, object], TOOL["function"])["name"])
        return None if shown in self.decode(declared) else "the format does not show any tools"

    def _render(self, key: str) -> Ids:
        return self._written(key, ask=True)

    def _written(self, key: str, *, ask: bool) -> Ids:
        messages, tools = _unpack(key)
        try:
            rendered = self._prime.render(messages, tools=tools, add_generation_prompt=ask)
        except Exception as error:  # foreign code: any exception is its way to refuse
            reason = one_line(str(error))
            raise ValueError(
                f"{self._name} refuses these messages ({type(error).__name__}: {reason})"
            ) from error
        return ids_of(rendered.token_ids)


class _Rendered(Protocol):
    token_ids: list[int]


class _PrimeToolCall(Protocol):
    raw: str
    name: str | None
    arguments: Mapping[str, object] | str | None
    token_span: tuple[int, int] | None
    status: str
    id: str | None


class _Parsed(Protocol):
    content: str
    reasoning_content: str | None
    tool_calls: list[_PrimeToolCall]


class _Prime(Protocol):
    """What is called of Prime's own renderer Protocol."""

    def render(
        self, messages: PlainMessages, *, tools: PlainMessages | None, add_generation_prompt: bool
    ) -> _Rendered: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: PlainMessages,
        *,
        tools: PlainMessages | None,
    ) -> _Rendered | None: ...

    def parse_response(
        self, token_ids: list[int], *, tools: PlainMessages | None, prompt_ids: list[int]
    ) -> _Parsed: ...

    def get_stop_token_ids(self) -> list[int]: ...


def _class_name(short: str) -> str:
    return type(config_from_name(short)).__name__.removesuffix("Config")


def _unpack(key: str) -> tuple[PlainMessages, PlainMessages | None]:
    """Messages that all have a content, as Prime's type of them demands, and tools."""
    messages, tools = from_json(key)
    return [{"content": "", **message} for message in messages], tools


def _joined(pieces: Sequence[str]) -> str | None:
    return "\n".join(piece for piece in pieces if piece) or None


def _tool_calls(
    found: Sequence[_PrimeToolCall], sampled_ids: Ids
) -> tuple[tuple[ToolCall, ...], tuple[MalformedToolCall, ...]]:
    """Calls in their order, those that could not be read apart.

    A format without ids of its own gets them from the sampled tokens.
    """
    calls: list[ToolCall] = []
    malformed: list[MalformedToolCall] = []
    for place, call in enumerate(found):
        arguments = _object(call.arguments)
        if call.status == "ok" and call.name and arguments is not None:
            calls.append(ToolCall(call.id or call_id(sampled_ids, place), call.name, arguments))
        else:
            problem = "arguments are not an object" if call.status == "ok" else call.status
            malformed.append(MalformedToolCall(call.raw, problem.replace("_", " ")))
    return tuple(calls), tuple(malformed)


def _object(arguments: object) -> Mapping[str, object] | None:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        return {}
    return cast(Mapping[str, object], arguments) if isinstance(arguments, Mapping) else None
