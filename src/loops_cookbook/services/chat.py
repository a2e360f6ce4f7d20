"""One call of a model behind an OpenAI-compatible API: `POST <base_url>/chat/completions`.

`body_of` and `answer_of` are the two halves of the format, pure. `HttpChat` is the door: it holds
back calls beyond its limit, while the clock of their callers stands still, sends one request a call
and lets `transport` retry what may pass. A call that waits to be retried keeps its place, so a
service that is short of breath is asked less.
No timeout cuts a call that is under way: how long it may take is its caller's clock. The key is in
no error, log line, repr or answer. That calls of a model are tried again is told once: until their
clocks run out, nothing else would tell of a model that is not there.
"""

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Literal, TypeAlias, cast

import anyio
import httpx

from loops_cookbook.clock import room_in
from loops_cookbook.errors import ServiceError, ServiceRefused
from loops_cookbook.messages import MalformedToolCall, ToolCall, text_of, well_formed
from loops_cookbook.services.answers import Answer, detail
from loops_cookbook.services.base import ChatAnswer, ChatRequest
from loops_cookbook.services.network import sockets
from loops_cookbook.services.transport import Patience, Transport

logger = logging.getLogger(__name__)

PATIENCE = Patience()
COMPLETIONS = "/chat/completions"
SHORTEST_SECRET = 16
"""Characters from which a key is taken out of answers too; `EMPTY` is a word like any other."""

Object: TypeAlias = Mapping[str, object]

_FINISHES: Mapping[str, Literal["stop", "length", "tool_calls"]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}
_BROKEN_OFF: Mapping[str, str] = {
    "content_filter": "the service's content filter ended the reply",
    "sensitive": "the service's content filter ended the reply",
    "error": "the service broke the reply off",
    "abort": "the service broke the reply off",
    "network_error": "the service broke the reply off",
    "insufficient_system_resource": "the service broke the reply off, for want of resources",
}
"""Why a reply is not all that a model would have said, in the words of services (OpenRouter, vLLM,
SGLang, DeepSeek, Zhipu): half a verdict may read as another one."""


class ChatFormatError(ValueError):
    """An answer is not what the format says."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What a config says of a producer."""

    name: str
    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    max_concurrency: int = 16
    temperature: float = 0.0
    max_tokens: int | None = None
    """None: not sent, so the service's own."""
    extra_body: Object = field(default_factory=dict[str, object])
    """More keys of every request."""


def body_of(request: ChatRequest, settings: ChatSettings) -> bytes:
    """A request as JSON; what is not said is not sent.

    Raises:
        ChatFormatError: the messages or tools are not plain JSON.
    """
    max_tokens = settings.max_tokens if request.max_tokens is None else request.max_tokens
    body: dict[str, object] = {
        "model": settings.model,
        "messages": list(request.messages),
        "temperature": settings.temperature,
    }
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if request.stop:
        body["stop"] = list(request.stop)
    if request.tools:
        body["tools"] = list(request.tools)
    if request.tool_choice is not None:
        body["tool_choice"] = request.tool_choice
    try:
        text = json.dumps({**body, **settings.extra_body}, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ChatFormatError(f"the messages are not plain JSON: {error}") from error
    return well_formed(text).encode()


def answer_of(body: bytes) -> ChatAnswer:
    """The first choice of a completion.

    Raises:
        ChatFormatError: there is none that can be read, or a filter took it.
    """
    try:
        completion = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ChatFormatError("the body is not JSON") from error
    choices = _object(completion).get("choices")
    choice = _object(cast(list[object], choices)[0] if isinstance(choices, list) and choices else 0)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise ChatFormatError("there is no choices[0].message")
    finish = str(choice.get("finish_reason") or "stop")
    if (broken := _BROKEN_OFF.get(finish)) is not None:
        raise ChatFormatError(f"{broken} (finish_reason {finish!r})")
    return _said(cast(Object, message), _FINISHES.get(finish, "stop"))


def _said(message: Object, finish: Literal["stop", "length", "tool_calls"]) -> ChatAnswer:
    calls, malformed = _tool_calls(message.get("tool_calls"))
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    try:
        content = text_of(message.get("content"))
    except ValueError as error:
        raise ChatFormatError(str(error)) from error
    return ChatAnswer(
        content=content,
        reasoning_content=reasoning if isinstance(reasoning, str) else None,
        tool_calls=calls,
        malformed_tool_calls=malformed,
        # Some services say "stop" where there are calls.
        finish_reason="tool_calls" if calls and finish == "stop" else finish,
    )


def _tool_calls(said: object) -> tuple[tuple[ToolCall, ...], tuple[MalformedToolCall, ...]]:
    calls: list[ToolCall] = []
    malformed: list[MalformedToolCall] = []
    for part in cast(list[object], said) if isinstance(said, list) else []:
        function = _object(_object(part).get("function"))
        name, arguments = function.get("name"), function.get("arguments")
        try:
            parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(name, str) and isinstance(parsed, dict):
            call_id = str(_object(part).get("id") or f"call_{len(calls)}")
            calls.append(ToolCall(call_id, name, cast(Object, parsed)))
        else:
            raw = json.dumps(part, ensure_ascii=False)
            malformed.append(MalformedToolCall(raw, "its arguments are not a JSON object"))
    return tuple(calls), tuple(malformed)


def _object(value: object) -> Object:
    return cast(Object, value) if isinstance(value, dict) else {}


class HttpChat:
    """A `Chat` over HTTP; made by `open_chat`."""

    def __init__(self, transport: Transport, settings: ChatSettings) -> None:
        self._transport = transport
        self._settings = settings
        self._limiter = anyio.CapacityLimiter(settings.max_concurrency)

    @property
    def retries(self) -> int:
        """Requests that were sent once more, so far."""
        return self._transport.retries

    async def complete(self, request: ChatRequest) -> ChatAnswer:
        """The next assistant message.

        Raises:
            ServiceUnavailable: no answer in time, or one that may change later.
            ServiceRefused: the service said no, or something that makes no sense.
        """
        name = self._settings.name
        try:
            body = body_of(request, self._settings)
            async with room_in(self._limiter):
                headers = {"Content-Type": "application/json"}
                answer = await self._transport.call(
                    "chat", "POST", COMPLETIONS, body=body, headers=headers
                )
        except ChatFormatError as error:
            raise ServiceRefused(f"producer {name!r}: {error}") from error
        except ServiceError as error:
            refused = isinstance(error, ServiceRefused)
            keys = f"; see base_url, model and api_key_env in [producers.{name}]" if refused else ""
            raise type(error)(f"producer {name!r}: {error}{keys}") from error
        return self._read(answer)

    def _read(self, answer: Answer) -> ChatAnswer:
        key = self._settings.api_key or ""
        body = answer.body
        if len(key) >= SHORTEST_SECRET:
            body = body.replace(key.encode(), b"[key]")
        try:
            return answer_of(body)
        except ChatFormatError as error:
            told = self._transport.without_key(detail(answer))[:200]
            raise ServiceRefused(
                f"producer {self._settings.name!r}: POST {self._transport.base_url}{COMPLETIONS} "
                f"answered what is no chat completion ({error}): {told}"
            ) from error


@asynccontextmanager
async def open_chat(
    settings: ChatSettings,
    *,
    patience: Patience = PATIENCE,
    network: httpx.AsyncBaseTransport | None = None,
) -> AsyncGenerator[HttpChat]:
    """Hold connections to a producer for the length of a `with` block.

    Args:
        settings: which, and how it is called.
        patience: for how long a call is tried again.
        network: what carries the requests; None for sockets. `httpx.MockTransport` in tests.
    """
    is_told = False

    def on_retry(what: str) -> None:
        nonlocal is_told
        if not is_told:
            is_told = True
            logger.warning(
                "producer %r: %s; tried again for as long as the caller's clock allows, and not "
                "told again",
                settings.name,
                what,
            )

    headers = {"User-Agent": f"loops-cookbook/{version('loops-cookbook')}"}
    if settings.api_key is not None:
        headers["Authorization"] = f"Bearer {settings.api_key}"
    async with network or sockets(settings.base_url) as network:
        transport = Transport(
            network, settings.base_url, headers, patience=patience, on_retry=on_retry
        )
        yield HttpChat(transport, settings)
