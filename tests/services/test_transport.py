"""A call is retried while that can help, under one key, and ends in an answer or an error."""

import gzip
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager

import anyio
import anyio.abc
import httpx
import pytest
from trio.testing import MockClock

from loops_cookbook.errors import EngineDied, ServiceRefused, ServiceUnavailable
from loops_cookbook.services.transport import (
    TIMEOUTS,
    Answer,
    Kind,
    Patience,
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


class Endless(httpx.AsyncByteStream):
    """A body without an end: a part at a time, with a pause before each."""

    def __init__(self, part: bytes, pause: float = 0.0) -> None:
        self._part = part
        self._pause = pause
        self.given = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await anyio.sleep(self._pause)
            self.given += len(self._part)
            yield self._part


@pytest.mark.anyio
class TestAnswersWithoutAnEnd:
    async def asked(self, kind: Kind, body: Endless, patience: Patience) -> None:
        network = httpx.MockTransport(lambda _: httpx.Response(200, stream=body))
        async with open_transport(SERVER, network=network, patience=patience) as transport:
            await transport.call(kind, "GET", "/")

    async def test_no_more_is_read_than_any_answer_has(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All that came was kept, up to the last of this machine's memory."""
        monkeypatch.setattr("loops_cookbook.services.network.MAX_BODY_BYTES", 1 << 20)
        body = Endless(b"0" * 65_536)
        with pytest.raises(
            ServiceUnavailable, match=r"cannot be read \(its body has more than 1 M"
        ):
            await self.asked("sample", body, steady())
        assert body.given == (1 << 20) + 65_536

    async def test_what_is_packed_is_counted_as_it_is_unpacked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Half a MiB of packed zeros became 512 MiB, past any limit on what comes over the wire."""
        monkeypatch.setattr("loops_cookbook.services.network.MAX_BODY_BYTES", 1 << 20)
        body = gzip.compress(b"0" * (1 << 22))
        packed = httpx.Response(200, headers={"content-encoding": "gzip"}, content=body)
        network = httpx.MockTransport(lambda _: packed)
        async with open_transport(SERVER, network=network, patience=steady()) as transport:
            with pytest.raises(ServiceUnavailable, match="its body has more than 1 MiB"):
                await transport.call("sample", "GET", "/")

    @pytest.mark.parametrize(("kind", "seconds"), [("probe", 100.0), ("poll", 350.0)])
    async def test_one_that_comes_byte_by_byte_is_not_waited_for_for_ever(
        self, kind: Kind, seconds: float
    ) -> None:
        """A byte now and then was enough to hold a start, and an update, until they were killed."""
        began = anyio.current_time()
        with pytest.raises(ServiceUnavailable, match=f"in full took more than {seconds:g} s"):
            await self.asked(kind, Endless(b"0", pause=9.0), steady(seconds=0.0))
        assert anyio.current_time() - began == pytest.approx(seconds)

    async def test_a_sample_is_under_its_callers_clock_alone(self) -> None:
        with pytest.raises(TimeoutError), anyio.fail_after(10_000):
            await self.asked("sample", Endless(b"0", pause=9.0), steady(seconds=0.0))


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
        ],
    )
    async def test_a_garbled_answer_is_a_service_that_is_not_there(self, garbage: bytes) -> None:
        with pytest.raises(ServiceUnavailable, match="got no answer"):
            await self._asked(garbage)

    async def test_a_body_that_is_packed_otherwise_than_it_says_is_told_as_that(self) -> None:
        """It was told that there was no answer."""
        packed = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nplay"
        with pytest.raises(ServiceUnavailable, match=r"answered what cannot be read \(Error -3"):
            await self._asked(packed)

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
