"""One HTTP call: sent, retried while that can help, and at last an `Answer` or an error.

`decide` is the rule, pure: from a call's kind and what came of one try it says accept, try again
after so long, or give up and with which error. `Transport.call` does what it says. The same
headers and body leave on every try, so an idempotency key is kept. A call tries for at most
`Patience.seconds`; how long a caller waits in all is the caller's own cancel scope. The API key
stands in the transport's headers and nowhere else: it is in no error, log line or repr.

A request is handed to httpx's transport and not to its client: a third of a call would go into
cookies, redirects and authentication, of which services use none.

What is retried is the protocol's own list: servers that are still starting answer 400 or 404. A
chat API has another one, and its own word on when to come back; a call of it also ends where the
next try would begin after its caller's clock, so that the clock does not hide what went wrong.
"""

import json
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import lru_cache
from importlib.metadata import version
from typing import Literal, TypeAlias, cast

import anyio
import httpx

from loops_cookbook.clock import cuts_at
from loops_cookbook.errors import ServiceError, ServiceRefused, ServiceUnavailable
from loops_cookbook.problems import one_line
from loops_cookbook.services.network import sockets

Kind: TypeAlias = Literal["submit", "poll", "sample", "queue", "result", "control", "probe", "chat"]
"""`submit`: a trainer's operation, or a plain GET. `poll`: a wait for one's result, where 408
says not yet. `sample`: a direct sample, which may take as long as it takes. `queue`: a sample that
waits its turn, and `result` the wait for it. `control`: the control plane, asked once, since what
it makes must not be made twice. `probe`: whether a server is there; any answer will do. `chat`: a
completion of an OpenAI-compatible API, which may take as long as it takes too."""

KEY_SCHEME = "Api-Key "
KEY_HEADERS = ("authorization", "x-api-key")
"""Where a key stands: with its scheme before it, or alone."""
TIMEOUTS: Mapping[Kind, httpx.Timeout] = {
    "submit": httpx.Timeout(600.0, connect=10.0),
    "poll": httpx.Timeout(35.0, connect=10.0),
    "sample": httpx.Timeout(None, connect=10.0, pool=300.0),
    "queue": httpx.Timeout(600.0, connect=10.0, pool=300.0),
    "result": httpx.Timeout(35.0, connect=10.0, pool=300.0),
    "control": httpx.Timeout(300.0, connect=10.0),
    "probe": httpx.Timeout(10.0),
    "chat": httpx.Timeout(None, connect=10.0),
}
POLL_PAUSE_SECONDS = 2.0
"""Between tries of a poll that found no server."""
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "gzip, deflate"}
MAX_PAUSE_SECONDS = 30.0
MAX_RETRY_AFTER_SECONDS = 60.0
MAX_DETAIL_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Looked up by names in lower case."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Accept:
    """The answer is the call's result."""


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Send the same request again after a pause."""

    pause: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the call with this error."""

    error: type[ServiceError]


Decision: TypeAlias = Accept | TryAgain | GiveUp


@dataclass(frozen=True, slots=True)
class Patience:
    """For how long, and how, a call is tried again."""

    seconds: float = 600.0
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    chance: Callable[[], float] = random.random
    """A number in [0, 1) that spreads the retries of many callers."""


def decide(
    kind: Kind, outcome: Answer | httpx.RequestError, tries: int, chance: float = 0.0
) -> Decision:
    """What to do about one try's outcome.

    Args:
        kind: what sort of call it is.
        outcome: the server's answer, or how the connection failed.
        tries: how many there were, this one included.
        chance: in [0, 1), spreads the pause over 5 s.
    """
    backoff = min(2.0 ** min(tries - 1, 5) + 5.0 * chance, MAX_PAUSE_SECONDS)
    pause = POLL_PAUSE_SECONDS if kind in _POLLS else backoff
    if kind == "chat" and isinstance(outcome, Answer):
        advised = _advised_pause(outcome.headers)
        pause = backoff if advised is None else advised + chance
    if not isinstance(outcome, Answer):
        return TryAgain(pause) if _is_passing(kind, outcome) else GiveUp(ServiceUnavailable)
    if _is_taken(kind, outcome.status):
        return Accept()
    if kind in _QUEUED and outcome.status == 503:
        advised = _retry_after(outcome)
        return GiveUp(ServiceUnavailable) if advised is None else TryAgain(advised)
    if outcome.status in _RETRIED[kind] and (kind == "chat" or not _is_permanent(outcome)):
        return TryAgain(pause)
    return GiveUp(ServiceUnavailable if outcome.status in _PASSING else ServiceRefused)


_POLLS = frozenset({"poll", "result"})
_QUEUED = frozenset({"queue", "result"})
_EXACTLY: Mapping[str, int] = {"sample": 200, "queue": 202}
"""The one status that says yes, for kinds where another success means another protocol."""
_RETRIED: Mapping[Kind, frozenset[int]] = {
    "submit": frozenset({400, 404, 408, 502}),
    "poll": frozenset({502}),
    "sample": frozenset({400, 404, 408, 502, 503}),
    "queue": frozenset({408, 502, 504}),
    "result": frozenset({502, 504}),
    "control": frozenset(),
    "probe": frozenset(),
    "chat": frozenset({408, 409, 429, *range(500, 600)}),
}
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses that are about the server's state and not about the request."""


def _is_taken(kind: Kind, status: int) -> bool:
    """Whether an answer is the call's result."""
    if kind == "probe" or (kind in _POLLS and status == 408):
        return True
    return status == _EXACTLY[kind] if kind in _EXACTLY else 200 <= status < 300


def _retry_after(answer: Answer) -> float | None:
    """Seconds; a date, which the header may hold too, counts as nothing."""
    told = answer.headers.get("retry-after", "")
    return min(float(told), MAX_RETRY_AFTER_SECONDS) if told.isdecimal() else None


def _is_passing(kind: Kind, failure: httpx.RequestError) -> bool:
    """Whether a broken connection is worth another try."""
    if kind in ("control", "probe"):
        return False
    passing = (
        httpx.ConnectError,
        httpx.ConnectTimeout,
        httpx.ReadError,
        httpx.RemoteProtocolError,
    )
    return isinstance(failure, passing) or (
        kind in _POLLS and isinstance(failure, httpx.ReadTimeout)
    )


def _is_permanent(answer: Answer) -> bool:
    """Whether a retried status says of itself that it won't change."""
    source = answer.headers.get("x-baseten-error-source")
    if source == "06" and 400 <= answer.status < 500:
        return True
    if source == "01" and answer.headers.get("x-baseten-error-code") == "631":
        return True
    if answer.status != 400:
        return False
    body = object_of(answer)
    return "BadRequestError" in (body.get("type"), _object(body.get("error")).get("type"))


def _advised_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds that `Retry-After` asks for: as a number, or as a date beside that of the answer."""
    advice = headers.get("retry-after", "").strip()
    try:
        seconds = float(advice)
    except ValueError:
        try:
            then = parsedate_to_datetime(advice)
            seconds = (then - parsedate_to_datetime(headers.get("date", ""))).total_seconds()
        except (TypeError, ValueError):
            return None
    return seconds if 0 < seconds < math.inf else None


def object_of(answer: Answer) -> dict[str, object]:
    """The JSON object that an answer holds; empty where it holds none."""
    try:
        return _object(json.loads(answer.body))
    except (ValueError, RecursionError):
        return {}


def _object(value: object) -> dict[str, object]:
    return cast(dict[str, object], value) if isinstance(value, dict) else {}


def detail(answer: Answer) -> str:
    """What a server says went wrong, in one line."""
    body = object_of(answer)
    told = [body.get(key) for key in ("detail", "error", "message")]
    told.append(_object(body.get("error")).get("message"))
    text = next((t for t in told if isinstance(t, str) and t), None)
    text = text or answer.body.decode(errors="replace")
    return one_line(text) or "no detail"


class Transport:
    """HTTP calls to one base URL; made by `open_transport`."""

    def __init__(
        self,
        network: httpx.AsyncBaseTransport,
        base_url: str,
        headers: Mapping[str, str],
        *,
        patience: Patience = Patience(),
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_retry: Callable[[str], None] | None = None,
    ) -> None:
        self._network = network
        self._headers = httpx.Headers({**_HEADERS, **headers})  # its repr hides the key
        self._patience = patience
        self._guard = guard
        self._on_retry = on_retry
        self.base_url = base_url.rstrip("/")

    async def call(
        self,
        kind: Kind,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request until it is answered, or can't be.

        Raises:
            ServiceUnavailable: no answer within the patience, or one that may change later.
            ServiceRefused: the server said no.
        """
        sent = self._headers.copy()
        sent.update(headers or {})
        with self._guard():
            return await self._call(kind, method, path, body, sent)

    async def _call(
        self, kind: Kind, method: str, path: str, body: bytes | None, headers: httpx.Headers
    ) -> Answer:
        started = anyio.current_time()
        tries = 1
        while True:
            outcome = await self._try(kind, method, path, body, headers)
            decision = decide(kind, outcome, tries, self._patience.chance())
            if isinstance(decision, Accept):
                assert isinstance(outcome, Answer)
                return outcome
            what = f"{method} {self.base_url}{path} {self._told(outcome)}"
            if isinstance(decision, GiveUp):
                raise decision.error(what)
            spent = anyio.current_time() - started
            if spent + decision.pause > self._patience.seconds or (
                kind == "chat" and _outlasts_the_caller(decision.pause)
            ):
                tried = "once" if tries == 1 else f"{tries} times in {spent:.0f} s"
                raise ServiceUnavailable(
                    f"{what} (tried {tried}): see whether the service runs, then resume"
                )
            if self._on_retry is not None:
                self._on_retry(what)
            await self._patience.sleep(decision.pause)
            tries += 1

    async def _try(
        self, kind: Kind, method: str, path: str, body: bytes | None, headers: httpx.Headers
    ) -> Answer | httpx.RequestError:
        request = httpx.Request(
            method,
            _url(self.base_url + path),
            content=body,
            headers=headers,
            extensions={"timeout": TIMEOUTS[kind].as_dict()},
        )
        try:
            response = await self._network.handle_async_request(request)
            try:
                content = await response.aread()
            finally:
                await response.aclose()
        except httpx.RequestError as error:
            return error
        except Exception as error:
            # httpx-aiohttp lets a few of aiohttp's errors through: that of a garbled answer, say.
            if not type(error).__module__.startswith("aiohttp."):
                raise
            lost = httpx.RemoteProtocolError(str(error))
            lost.__cause__ = error
            return lost
        return Answer(response.status_code, response.headers, content)

    def _told(self, outcome: Answer | httpx.RequestError) -> str:
        """What came of a try, in short."""
        # Before it is cut short: of a key in the middle of the cut, a part would be left.
        text = self.without_key(_told(outcome))
        return text if len(text) <= MAX_DETAIL_CHARACTERS else text[:MAX_DETAIL_CHARACTERS] + "..."

    def without_key(self, text: str) -> str:
        """A server may repeat the key in what it says of it."""
        for header in KEY_HEADERS:
            key = self._headers.get(header, "").rpartition(" ")[2]
            if key:
                text = text.replace(key, "[key]")
        return text


@lru_cache(maxsize=64)
def _url(text: str) -> httpx.URL:
    """A model is asked at one address again and again, and httpx takes long to read one."""
    return httpx.URL(text)


def _told(outcome: Answer | httpx.RequestError) -> str:
    if isinstance(outcome, Answer):
        return f"answered {outcome.status}: {detail(outcome)}"
    reason = one_line(str(outcome))
    return f"got no answer ({type(_cause(outcome)).__name__}{': ' if reason else ''}{reason})"


def _cause(failure: BaseException) -> BaseException:
    """The innermost error that says something, such as a `ConnectionRefusedError`.

    httpx-aiohttp calls whatever becomes of a connection a `ConnectTimeout`, in the words of the
    error that it stands for.
    """
    cause = None if failure.__cause__ is None else _cause(failure.__cause__)
    return failure if cause is None or not str(cause) else cause


def _outlasts_the_caller(pause: float) -> bool:
    return anyio.current_time() + pause >= cuts_at()


@asynccontextmanager
async def open_transport(
    base_url: str,
    *,
    api_key: str | None = None,
    patience: Patience = Patience(),
    guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    network: httpx.AsyncBaseTransport | None = None,
) -> AsyncGenerator[Transport]:
    """Hold connections to one server for the length of a `with` block.

    Args:
        base_url: with or without a path prefix.
        api_key: sent as `Authorization: Api-Key ...`; None for servers without keys.
        patience: for how long a call is tried again.
        guard: a context around each call, which may end it with an error of its own.
        network: what carries the requests; None for sockets. `httpx.MockTransport` in tests.
    """
    headers = {
        "User-Agent": f"loops-cookbook/{version('loops-cookbook')}",
        "X-Baseten-Accept-Error": "1",
    }
    if api_key is not None:
        headers["Authorization"] = f"{KEY_SCHEME}{api_key}"
    async with network or sockets(base_url) as network:
        yield Transport(network, base_url, headers, patience=patience, guard=guard)
