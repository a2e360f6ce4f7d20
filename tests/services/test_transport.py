"""A call is retried while that can help, under one key, and ends in an answer or an error."""

import socket
from collections.abc import Generator
from contextlib import contextmanager

import anyio
import anyio.abc
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from loops_cookbook.errors import EngineDied, ServiceRefused, ServiceUnavailable
from loops_cookbook.services.transport import (
    TIMEOUTS,
    Accept,
    Answer,
    GiveUp,
    Kind,
    Patience,
    TryAgain,
    decide,
    detail,
    open_transport,
)

BAD_REQUEST = b'{"error":{"type":"BadRequestError","message":"no"}}'
SERVER = "http://server/prefix/"

Outcome = httpx.Response | httpx.RequestError


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


class Script:
    """A network that answers each request with the next outcome, the last one for ever."""

    def __init__(self, *outcomes: Outcome) -> None:
        self._outcomes = list(outcomes)
        self.requests: list[httpx.Request] = []
        self.times: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        self.times.append(anyio.current_time())
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        if isinstance(outcome, httpx.RequestError):
            raise outcome
        return outcome

    @property
    def network(self) -> httpx.MockTransport:
        return httpx.MockTransport(self)


def steady(seconds: float = 600.0) -> Patience:
    return Patience(seconds, chance=lambda: 0.0)


def test_no_clock_of_the_client_cuts_a_sample_that_is_under_way() -> None:
    """A call that was silent for ten minutes was cut by its client, and sent again."""
    timeout = TIMEOUTS["sample"]
    assert (timeout.read, timeout.write) == (None, None)


class TestDecide:
    @pytest.mark.parametrize(
        ("kind", "statuses"),
        [
            ("submit", {400, 404, 408, 502}),
            ("poll", {502}),
            ("sample", {400, 404, 408, 502, 503}),
        ],
    )
    def test_the_statuses_of_the_protocol_are_retried_and_no_others(
        self, kind: Kind, statuses: set[int]
    ) -> None:
        every = range(300, 600)
        retried = {s for s in every if isinstance(decide(kind, Answer(s), 1), TryAgain)}
        assert retried == statuses

    @pytest.mark.parametrize(
        ("kind", "status", "is_accepted"),
        [
            ("submit", 200, True),
            ("submit", 202, True),
            ("poll", 200, True),
            ("poll", 202, True),
            ("poll", 408, True),
            ("sample", 200, True),
            ("sample", 202, False),
        ],
    )
    def test_what_counts_as_an_answer(self, kind: Kind, status: int, is_accepted: bool) -> None:
        assert isinstance(decide(kind, Answer(status), 1), Accept) == is_accepted

    @pytest.mark.parametrize("kind", ["submit", "poll", "sample"])
    @pytest.mark.parametrize(
        ("status", "error"),
        [
            (422, ServiceRefused),
            (401, ServiceRefused),
            (410, ServiceRefused),
            (301, ServiceRefused),
            (429, ServiceUnavailable),
            (500, ServiceUnavailable),
            (504, ServiceUnavailable),
        ],
    )
    def test_other_statuses_end_the_call(
        self, kind: Kind, status: int, error: type[Exception]
    ) -> None:
        decision = decide(kind, Answer(status), 1)
        assert isinstance(decision, GiveUp)
        assert decision.error is error

    def test_a_trainer_that_shuts_down_is_not_asked_again(self) -> None:
        assert decide("submit", Answer(503), 1) == GiveUp(ServiceUnavailable)
        assert decide("poll", Answer(503), 1) == GiveUp(ServiceUnavailable)

    @pytest.mark.parametrize(
        "answer",
        [
            Answer(400, {"x-baseten-error-source": "06"}),
            Answer(404, {"x-baseten-error-source": "06"}),
            Answer(408, {"x-baseten-error-source": "01", "x-baseten-error-code": "631"}),
            Answer(400, {}, b'{"type":"BadRequestError"}'),
            Answer(400, {}, BAD_REQUEST),
        ],
    )
    def test_an_answer_that_says_it_is_final_is_not_retried(self, answer: Answer) -> None:
        assert isinstance(decide("submit", answer, 1), GiveUp)

    @pytest.mark.parametrize(
        "answer",
        [
            Answer(404, {}, b'{"type":"BadRequestError"}'),
            Answer(400, {}, b'{"error":"BadRequestError"}'),
            Answer(400, {"x-baseten-error-source": "01", "x-baseten-error-code": "1"}),
            Answer(502, {"x-baseten-error-source": "06"}),
            Answer(400, {}, b"["),
        ],
    )
    def test_an_answer_that_only_resembles_a_final_one_is_retried(self, answer: Answer) -> None:
        assert isinstance(decide("submit", answer, 1), TryAgain)

    @pytest.mark.parametrize(
        ("failure", "submit", "poll"),
        [
            (httpx.ConnectError, True, True),
            (httpx.ConnectTimeout, True, True),
            (httpx.ReadError, True, True),
            (httpx.RemoteProtocolError, True, True),
            (httpx.ReadTimeout, False, True),
            (httpx.WriteTimeout, False, False),
            (httpx.PoolTimeout, False, False),
        ],
    )
    def test_broken_connections_are_retried_where_the_protocol_says(
        self, failure: type[httpx.RequestError], submit: bool, poll: bool
    ) -> None:
        broken = failure("")
        assert isinstance(decide("submit", broken, 1), TryAgain) == submit
        assert isinstance(decide("sample", broken, 1), TryAgain) == submit
        assert isinstance(decide("poll", broken, 1), TryAgain) == poll

    @settings(deadline=None)
    @given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
    def test_pauses_grow_to_thirty_seconds(self, attempt: int, chance: float) -> None:
        decision = decide("submit", Answer(502), attempt, chance)
        assert isinstance(decision, TryAgain)
        least = min(2.0 ** min(attempt - 1, 5), 30.0)
        assert least <= decision.pause <= min(least + 5.0, 30.0)

    def test_a_poll_that_finds_no_server_pauses_two_seconds(self) -> None:
        assert decide("poll", httpx.ReadError(""), 9, 0.9) == TryAgain(2.0)


class TestDetail:
    @pytest.mark.parametrize(
        ("body", "told"),
        [
            (b'{"detail":"a","error":"b"}', "a"),
            (b'{"detail":["a"],"error":"","message":"c"}', "c"),
            (b'{"other":1}', '{"other":1}'),
            (b"plain\n text", "plain text"),
            (b"", "no detail"),
            (b"\xff", "\N{REPLACEMENT CHARACTER}"),
        ],
    )
    def test_the_server_is_quoted_in_one_line(self, body: bytes, told: str) -> None:
        assert detail(Answer(500, {}, body)) == told

    def test_an_error_in_openai_form_is_read(self) -> None:
        assert detail(Answer(400, {}, b'{"error":{"type":"t","message":"a"}}')) == "a"


@pytest.mark.anyio
class TestCall:
    async def test_retries_keep_the_key_and_the_body(self) -> None:
        script = Script(httpx.Response(502), httpx.ConnectError("no"), httpx.Response(202))
        async with open_transport(SERVER, patience=steady(), network=script.network) as transport:
            answer = await transport.call(
                "submit", "POST", "/op", body=b"{}", headers={"Idempotency-Key": "k"}
            )
        assert answer.status == 202
        assert {str(r.url) for r in script.requests} == {"http://server/prefix/op"}
        assert [(r.headers["idempotency-key"], r.content) for r in script.requests] == [
            ("k", b"{}")
        ] * 3
        assert script.times == [0.0, 1.0, 3.0]

    async def test_patience_ends_before_a_pause_that_would_outlast_it(self) -> None:
        script = Script(httpx.Response(404, json={"detail": "starting"}))
        async with open_transport(
            SERVER, patience=steady(10.0), network=script.network
        ) as transport:
            with pytest.raises(ServiceUnavailable, match=r"404: starting \(tried 4 times in 7 s\)"):
                await transport.call("sample", "POST", "/sample")
        assert anyio.current_time() == 7.0

    async def test_the_callers_deadline_cuts_a_retry(self) -> None:
        script = Script(httpx.Response(502))
        async with open_transport(SERVER, patience=steady(), network=script.network) as transport:
            with anyio.move_on_after(2.5) as scope:
                await transport.call("sample", "POST", "/sample")
        assert scope.cancelled_caught
        assert len(script.requests) == 2

    async def test_a_refusal_names_status_method_address_and_detail_in_one_line(self) -> None:
        script = Script(httpx.Response(422, json={"detail": "n: at\nleast 1"}))
        async with open_transport(SERVER, network=script.network) as transport:
            with pytest.raises(ServiceRefused) as caught:
                await transport.call("sample", "POST", "/sample")
        assert str(caught.value) == ("POST http://server/prefix/sample answered 422: n: at least 1")

    async def test_a_page_of_html_is_cut(self) -> None:
        script = Script(httpx.Response(422, text="x" * 10_000))
        async with open_transport(SERVER, network=script.network) as transport:
            with pytest.raises(ServiceRefused) as caught:
                await transport.call("sample", "POST", "/sample")
        assert len(str(caught.value)) < 600

    async def test_the_key_is_sent_and_told_to_nobody_else(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG")
        script = Script(httpx.Response(401, json={"detail": "bad key s3cret"}))
        async with open_transport(SERVER, api_key="s3cret", network=script.network) as transport:
            with pytest.raises(ServiceRefused, match="bad key") as caught:
                await transport.call("submit", "POST", "/op")
            assert "s3cret" not in repr(transport) + repr(vars(transport))
        assert script.requests[0].headers["authorization"] == "Api-Key s3cret"
        assert "s3cret" not in str(caught.value) + caplog.text

    async def test_without_a_key_no_authorization_is_sent(self) -> None:
        script = Script(httpx.Response(200))
        async with open_transport(SERVER, network=script.network) as transport:
            await transport.call("submit", "GET", "/health")
        headers = script.requests[0].headers
        assert "authorization" not in headers
        assert headers["user-agent"].startswith("loops-cookbook/")
        assert headers["x-baseten-accept-error"] == "1"

    async def test_a_guard_may_end_a_call_with_its_own_error(self) -> None:
        @contextmanager
        def guard() -> Generator[None]:
            with anyio.move_on_after(5) as scope:
                yield
            if scope.cancelled_caught:
                raise EngineDied("gone")

        script = Script(httpx.ConnectError("refused"))
        async with open_transport(
            SERVER, patience=steady(), guard=guard, network=script.network
        ) as transport:
            with pytest.raises(EngineDied):
                await transport.call("submit", "POST", "/op")
        assert anyio.current_time() == 5.0


@contextmanager
def closed_port() -> Generator[int]:
    """A port that refuses connections for the length of the block."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
class TestSockets:
    """Over real sockets, in real time."""

    @staticmethod
    async def _asked(answers: bytes) -> Answer:
        async def handle(stream: anyio.abc.ByteStream) -> None:
            async with stream:
                await stream.receive()
                await stream.send(answers)

        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        answer = Answer(0)
        failure: Exception | None = None
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, handle)
            try:
                async with open_transport(
                    f"http://127.0.0.1:{port}", patience=steady(0.0)
                ) as transport:
                    answer = await transport.call("submit", "POST", "/op", body=b"{}")
            except ServiceUnavailable as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return answer

    async def test_no_proxy_stands_between_this_machine_and_itself(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with closed_port() as port:
            for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
            answer = await self._asked(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        assert (answer.status, answer.body) == (200, b"ok")

    async def test_a_proxy_of_the_environment_stands_before_other_machines(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with closed_port() as port:
            for name in ("HTTP_PROXY", "http_proxy"):
                monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
            for name in ("NO_PROXY", "no_proxy"):
                monkeypatch.delenv(name, raising=False)
            async with open_transport("http://192.0.2.1", patience=steady(0.0)) as transport:
                with pytest.raises(ServiceUnavailable, match=f"127.0.0.1:{port}"):
                    await transport.call("submit", "GET", "/health")

    async def test_a_refused_connection_is_told_as_that_with_its_address(self) -> None:
        """It was called a `ConnectTimeout`, after no time at all."""
        with closed_port() as port:
            async with open_transport(f"http://127.0.0.1:{port}", patience=steady(0.0)) as asked:
                with pytest.raises(ServiceUnavailable) as caught:
                    await asked.call("chat", "POST", "/chat/completions")
        told = str(caught.value)
        assert f"POST http://127.0.0.1:{port}/chat/completions got no answer (Connection" in told
        assert f"(ConnectionRefusedError: Cannot connect to host 127.0.0.1:{port}" in told
        assert "Timeout" not in told

    async def test_a_connection_that_is_cut_is_told_as_that(self) -> None:
        with pytest.raises(ServiceUnavailable, match=r"\(ServerDisconnectedError: Server disc"):
            await self._asked(b"")

    @pytest.mark.parametrize(
        "garbage",
        [
            b"",
            b"SSH-2.0-OpenSSH\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nplay",
        ],
    )
    async def test_a_garbled_answer_is_a_service_that_is_not_there(self, garbage: bytes) -> None:
        with pytest.raises(ServiceUnavailable, match="got no answer"):
            await self._asked(garbage)

    async def test_three_hundred_calls_at_once_have_a_connection_each(self) -> None:
        waiting = 0
        everybody = anyio.Event()

        async def handle(stream: anyio.abc.ByteStream) -> None:
            nonlocal waiting
            async with stream:
                await stream.receive()
                waiting += 1
                if waiting == 300:
                    everybody.set()
                await everybody.wait()
                await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        listener = await anyio.create_tcp_listener(
            local_host="127.0.0.1", local_port=0, backlog=1024
        )
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, handle)
            async with (
                open_transport(f"http://127.0.0.1:{port}") as transport,
                anyio.create_task_group() as calls,
            ):
                for _ in range(300):
                    calls.start_soon(transport.call, "sample", "POST", "/sample")
            tasks.cancel_scope.cancel()
        assert waiting == 300
