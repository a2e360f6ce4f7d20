"""A judge is one POST a call: what is sent, what is read, what is tried again, who sees its key."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import anyio
import httpx
import pytest
from trio.testing import MockClock

from loops_cookbook.errors import ServiceRefused, ServiceUnavailable
from loops_cookbook.messages import ToolCall
from loops_cookbook.services.answers import Accept, Answer, GiveUp, TryAgain, decide
from loops_cookbook.services.base import ChatAnswer, ChatRequest
from loops_cookbook.services.chat import (
    ChatFormatError,
    ChatSettings,
    answer_of,
    body_of,
    open_chat,
)
from loops_cookbook.services.transport import Patience

KEY = "sk-0123456789-abcdefghij"
ASK = ChatRequest(({"role": "user", "content": "good?"},))
SETTINGS = ChatSettings("judge", "http://judge/v1", "j-1", KEY)

Outcome = httpx.Response | httpx.RequestError


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


def completion(message: Mapping[str, object], finish: str | None = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def says(text: str) -> httpx.Response:
    return httpx.Response(200, json=completion({"role": "assistant", "content": text}))


class Network:
    """Answers each request with the next outcome, the last one for ever."""

    def __init__(self, *outcomes: Outcome, seconds: float = 0.0) -> None:
        self._outcomes = list(outcomes)
        self._seconds = seconds
        self.requests: list[httpx.Request] = []
        self.times: list[float] = []
        self.under_way = self.most_under_way = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.times.append(anyio.current_time())
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await anyio.sleep(self._seconds)
        finally:
            self.under_way -= 1
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        if isinstance(outcome, httpx.RequestError):
            raise outcome
        return outcome

    def open(self, settings: ChatSettings = SETTINGS, seconds: float = 600.0) -> Any:
        patience = Patience(seconds, chance=lambda: 0.0)
        return open_chat(settings, patience=patience, network=httpx.MockTransport(self))


# --- What is sent


def test_only_what_is_said_is_sent() -> None:
    assert json.loads(body_of(ASK, SETTINGS)) == {
        "model": "j-1",
        "messages": [{"role": "user", "content": "good?"}],
        "temperature": 0.0,
    }


def test_a_call_goes_before_the_settings_and_extra_keys_before_both() -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    request = ChatRequest(
        ASK.messages, tools=(tool,), tool_choice="auto", max_tokens=8, stop=("\n",)
    )
    extra = {"temperature": 1, "response_format": {"type": "json_object"}}
    settings = ChatSettings("judge", "http://judge", "j-1", max_tokens=99, extra_body=extra)
    body = json.loads(body_of(request, settings))
    assert (body["max_tokens"], body["stop"], body["temperature"]) == (8, ["\n"], 1)
    assert (body["tools"], body["tool_choice"]) == ([tool], "auto")
    assert body["response_format"] == {"type": "json_object"}
    assert json.loads(body_of(ASK, settings))["max_tokens"] == 99


def test_messages_that_are_no_json_are_refused() -> None:
    with pytest.raises(ChatFormatError, match="not plain JSON"):
        body_of(ChatRequest(({"role": "user", "content": "a", "x": object()},)), SETTINGS)


# --- What is read


def read(message: Mapping[str, object], finish: str | None = "stop") -> ChatAnswer:
    return answer_of(json.dumps(completion(message, finish)).encode())


def test_a_text_is_read_with_its_reasoning() -> None:
    assert read({"content": "yes", "reasoning_content": "because"}) == ChatAnswer("yes", "because")
    assert read({"content": "yes", "reasoning": "because"}).reasoning_content == "because"
    assert read({"content": [{"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]}) == (
        ChatAnswer("yes")
    )


@pytest.mark.parametrize(
    ("finish", "told"),
    [("stop", "stop"), (None, "stop"), ("eos", "stop"), ("length", "length")],
)
def test_why_it_ended_is_one_of_three_words(finish: str | None, told: str) -> None:
    assert read({"content": "yes"}, finish).finish_reason == told


def test_tool_calls_are_read_and_those_that_cannot_be_are_told() -> None:
    calls = [
        {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "look", "arguments": "{at: 1}"}},
        {"id": "c", "type": "function", "function": {"name": "go", "arguments": ""}},
    ]
    answer = read({"content": None, "tool_calls": calls})
    assert answer.tool_calls == (ToolCall("a", "look", {"at": 1}), ToolCall("c", "go", {}))
    assert [each.problem for each in answer.malformed_tool_calls] == [
        "its arguments are not a JSON object"
    ]
    assert (answer.content, answer.finish_reason) == (None, "tool_calls")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>", "not JSON"),
        (b"[]", "no choices"),
        (b'{"error": {"message": "overloaded"}}', "no choices"),
        (b'{"choices": []}', "no choices"),
        (b'{"choices": [{"message": null}]}', "no choices"),
        (b'{"choices": [{"message": {"content": 3}}]}', "content must be"),
        (b'{"choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}]}', "filt"),
        (b'{"choices": [{"message": {"content": "1"}, "finish_reason": "error"}]}', "broke"),
        (b'{"choices": [{"message": {"content": "1"}, "finish_reason": "abort"}]}', "broke"),
    ],
)
def test_what_is_no_completion_is_no_verdict(body: bytes, words: str) -> None:
    """One that the service broke off was taken for all that the judge had to say."""
    with pytest.raises(ChatFormatError, match=words):
        answer_of(body)


# --- What is tried again


def test_what_may_pass_is_retried_and_nothing_else() -> None:
    retried = {s for s in range(300, 600) if isinstance(decide("chat", Answer(s), 1), TryAgain)}
    assert retried == {408, 409, 429, *range(500, 600)}
    assert isinstance(decide("chat", Answer(200), 1), Accept)
    assert decide("chat", Answer(401), 1) == GiveUp(ServiceRefused)


DATE = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("headers", "pause"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        (
            {
                "retry-after": format_datetime(DATE + timedelta(seconds=90), usegmt=True),
                "date": format_datetime(DATE, usegmt=True),
            },
            90.0,
        ),
        ({"retry-after": "soon"}, 1.0),
        ({"retry-after": "0"}, 1.0),
        ({"retry-after": "-3"}, 1.0),
        ({"retry-after": "inf"}, 1.0),
        ({"retry-after": f"Mon, 01 Jan {'9' * 20} 00:00:00 GMT"}, 1.0),  # was an OverflowError
        ({"retry-after": format_datetime(DATE, usegmt=True)}, 1.0),
        ({}, 1.0),
    ],
)
def test_a_service_says_when_to_come_back(headers: dict[str, str], pause: float) -> None:
    assert decide("chat", Answer(429, headers), 1) == TryAgain(pause)


@pytest.mark.anyio
async def test_a_busy_judge_is_asked_again_and_then_answers() -> None:
    busy = httpx.Response(429, headers={"Retry-After": "7"})
    network = Network(busy, httpx.ReadError("reset"), httpx.Response(503), says("yes"))
    async with network.open() as chat:
        assert (await chat.complete(ASK)).content == "yes"
    assert network.times == [0.0, 7.0, 9.0, 13.0]
    assert chat.retries == 3
    assert {str(r.url) for r in network.requests} == {"http://judge/v1/chat/completions"}


@pytest.mark.anyio
async def test_retries_end_with_their_patience() -> None:
    network = Network(httpx.Response(500, json={"error": {"message": "broken"}}))
    async with network.open(seconds=10.0) as chat:
        with pytest.raises(ServiceUnavailable, match=r"producer 'judge': .* 500: broken \(tried 4"):
            await chat.complete(ASK)
    assert anyio.current_time() == 7.0


@pytest.mark.anyio
async def test_a_call_that_its_callers_clock_would_cut_says_what_was_wrong_instead() -> None:
    """A judge out of quota was told as a grading clock that ran out, a minute later."""
    network = Network(httpx.Response(429, headers={"Retry-After": "3600"}))
    async with network.open() as chat:
        with (
            anyio.fail_after(60),
            pytest.raises(ServiceUnavailable, match=r"429: .* \(tried once\)"),
        ):
            await chat.complete(ASK)
    assert anyio.current_time() == 0.0


@pytest.mark.anyio
async def test_that_a_judge_is_asked_again_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """One that was not there was told after three clocks of a minute, and silence."""
    network = Network(httpx.ConnectError("refused"), httpx.Response(503), says("2"))
    async with network.open() as chat:
        await chat.complete(ASK)
        assert [record.getMessage() for record in caplog.records] == [
            "producer 'judge': POST http://judge/v1/chat/completions got no answer (ConnectError: "
            "refused); tried again for as long as the caller's clock allows, and not told again"
        ]


@pytest.mark.anyio
async def test_a_slow_answer_is_neither_cut_nor_asked_for_again() -> None:
    """C11: the one owner of time is the attempt's clock."""
    network = Network(says("yes"), seconds=5000.0)
    async with network.open() as chat:
        assert (await chat.complete(ASK)).content == "yes"
    assert len(network.requests) == 1


@pytest.mark.anyio
async def test_calls_beyond_the_limit_wait() -> None:
    network = Network(says("yes"), seconds=1.0)
    settings = ChatSettings("judge", "http://judge", "j", max_concurrency=3)
    async with network.open(settings) as chat, anyio.create_task_group() as group:
        for _ in range(9):
            group.start_soon(chat.complete, ASK)
    assert network.most_under_way == 3
    assert anyio.current_time() == 3.0


# --- Faults and the key


@pytest.mark.anyio
@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_refusal_is_one_line_that_names_the_producer_and_what_to_look_at(
    status: int,
) -> None:
    network = Network(httpx.Response(status, json={"error": {"message": "no\nsuch"}}))
    async with network.open() as chat:
        with pytest.raises(ServiceRefused) as caught:
            await chat.complete(ASK)
    assert str(caught.value) == (
        f"producer 'judge': POST http://judge/v1/chat/completions answered {status}: no such; "
        "see base_url, model and api_key_env in [producers.judge]"
    )
    assert len(network.requests) == 1


@pytest.mark.anyio
async def test_an_answer_that_is_no_completion_is_a_refusal() -> None:
    network = Network(httpx.Response(200, json={"error": {"message": "overloaded"}}))
    async with network.open() as chat:
        with pytest.raises(ServiceRefused, match=r"no chat completion .* overloaded"):
            await chat.complete(ASK)


@pytest.mark.anyio
async def test_the_key_is_sent_and_told_to_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    refused = Network(httpx.Response(401, json={"error": {"message": f"bad key {KEY}"}}))
    async with refused.open() as chat:
        with pytest.raises(ServiceRefused, match="bad key") as caught:
            await chat.complete(ASK)
    assert refused.requests[0].headers["authorization"] == f"Bearer {KEY}"
    repeating = Network(says(f"your key is {KEY}"))
    async with repeating.open() as chat:
        answer = await chat.complete(ASK)
    broken = Network(httpx.Response(200, text=f"<p>{KEY}</p>"))
    async with broken.open() as chat:
        with pytest.raises(ServiceRefused) as garbled:
            await chat.complete(ASK)
    told = f"{caught.value}{garbled.value}{answer}{caplog.text}{SETTINGS!r}"
    assert KEY not in told
    assert answer.content == "your key is [key]"


@pytest.mark.anyio
async def test_a_key_where_a_message_is_cut_leaves_no_part_of_itself() -> None:
    """Messages were cut to their length first: of a key across the cut, a part stayed."""
    for before in range(440, 500):
        network = Network(httpx.Response(401, text="x" * before + KEY))
        async with network.open() as chat:
            with pytest.raises(ServiceRefused) as caught:
                await chat.complete(ASK)
        assert KEY[:8] not in str(caught.value)


def test_half_a_character_in_a_message_is_sent_as_the_sign_for_it() -> None:
    """A judge of a reply whose call had `\\ud800` in its arguments could not be asked."""
    request = ChatRequest(({"role": "user", "content": "a\ud800b"},))
    assert json.loads(body_of(request, SETTINGS))["messages"][0]["content"] == "a\ufffdb"


@pytest.mark.anyio
async def test_without_a_key_none_is_sent() -> None:
    network = Network(says("EMPTY"))
    async with network.open(ChatSettings("judge", "http://judge", "j")) as chat:
        assert (await chat.complete(ASK)).content == "EMPTY"
    assert "authorization" not in network.requests[0].headers
    assert "x-baseten-accept-error" not in network.requests[0].headers


@pytest.mark.anyio
async def test_a_word_that_stands_for_no_key_is_no_secret() -> None:
    network = Network(says("the list is EMPTY"))
    async with network.open(ChatSettings("judge", "http://judge", "j", "EMPTY")) as chat:
        assert (await chat.complete(ASK)).content == "the list is EMPTY"
