"""One HTTP call: sent, retried while that can help, and at last an `Answer` or an error.

`answers.decide` says what is to be done about what came of a try, and `Transport.call` does it. The
same headers and body leave on every try, so an idempotency key is kept. A call tries for at most
`Patience.seconds`; how long a caller waits in all is the caller's own cancel scope. The API key
stands in the transport's headers and nowhere else: it is in no error, log line or repr.

A request is handed to httpx's transport and not to its client: a third of a call would go into
cookies, redirects and authentication, of which services use none.

A call of a chat API also ends where the next try would begin after its caller's clock, so that the
clock does not hide what went wrong.
"""

import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version

import anyio
import httpx

from loops_cookbook.clock import cuts_at
from loops_cookbook.errors import ServiceUnavailable
from loops_cookbook.problems import one_line
from loops_cookbook.services.answers import Accept, Answer, GiveUp, Kind, decide, detail
from loops_cookbook.services.network import body_of, sockets

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
_SLOWEST = 10
"""By so much may a whole answer take longer than its next byte."""
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "gzip, deflate"}
MAX_DETAIL_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Patience:
    """For how long, and how, a call is tried again."""

    seconds: float = 600.0
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    chance: Callable[[], float] = random.random
    """A number in [0, 1) that spreads the retries of many callers."""


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
        self.retries = 0
        """Requests that were sent once more."""
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
            self.retries += 1
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
            with anyio.fail_after(_longest(kind)):
                response = await self._network.handle_async_request(request)
                try:
                    content = await body_of(response)
                finally:
                    await response.aclose()
        except httpx.RequestError as error:
            return error
        except TimeoutError:
            return httpx.ReadTimeout(f"an answer in full took more than {_longest(kind):g} s")
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


def _longest(kind: Kind) -> float:
    """Seconds for a whole answer. A server may say a byte now and then, or take none of a body, and
    no timeout between two bytes ends that; of what the caller's clock is for, nothing else does."""
    between = TIMEOUTS[kind].read
    return math.inf if between is None else _SLOWEST * between


def _told(outcome: Answer | httpx.RequestError) -> str:
    if isinstance(outcome, Answer):
        return f"answered {outcome.status}: {detail(outcome)}"
    reason = one_line(str(outcome))
    if isinstance(outcome, httpx.DecodingError):
        return f"answered what cannot be read ({reason})"
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
