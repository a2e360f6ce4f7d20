"""What carries HTTP requests: sockets to one server, as many as there are calls at once, as far as
this process may open them.

The answers and errors are httpx's, the sockets aiohttp's. Proxies of the environment are used, but
never for this machine itself.
"""

import ipaddress
import resource
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast
from urllib.request import getproxies, proxy_bypass

import httpx

MAX_BODY_BYTES = 1 << 30
"""Of an answer, more than any has: a whole group sampled by one request, of 128 attempts with
64 Ki tokens each, has up to 100 bytes for each token."""
KEEP_ALIVE_SECONDS = 60.0
"""Idle connections are closed sooner than servers close them (our own: 120 s), so that no call
leaves on one that is just being closed."""


def sockets(base_url: str) -> httpx.AsyncBaseTransport:
    """What carries requests to a server; to be entered, and left when it is no longer needed."""
    # httpx's own pool takes a time that grows with the square of the open connections.
    from httpx_aiohttp import AiohttpTransport

    url = httpx.URL(base_url)
    stays_here = is_loopback(url.host)
    return AiohttpTransport(
        limits=httpx.Limits(
            max_connections=_most_connections(), keepalive_expiry=KEEP_ALIVE_SECONDS
        ),
        trust_env=not stays_here,
        # Reading the system's certificates takes longer than a hundred calls.
        verify=not stays_here or url.scheme == "https",
        proxy=None if stays_here else _proxy(url),
    )


async def body_of(response: httpx.Response) -> bytes:
    """The body of an answer, and not the whole memory of this machine where it has no end.

    Raises:
        httpx.RequestError: the connection broke, or the body is none that can be read.
    """
    assert isinstance(response.stream, httpx.AsyncByteStream), "an asynchronous network gave it"
    response.stream = bounded = _Bounded(response.stream)
    parts: list[bytes] = []
    async for part in response.aiter_bytes():
        bounded.take(len(part))  # as it is unpacked: a body of zeros is a thousandth on its way
        parts.append(part)
    bounded.require_room()
    return b"".join(parts)


class _Bounded(httpx.AsyncByteStream):
    """What comes over a connection, for as long as what is made of it has room."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream
        self._room = MAX_BODY_BYTES

    def take(self, size: int) -> None:
        self._room -= size

    def require_room(self) -> None:
        if self._room < 0:
            raise httpx.DecodingError(f"its body has more than {MAX_BODY_BYTES >> 20} MiB")

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        # Of a network's streams it is a generator, which does not end by itself where it is left.
        async with aclosing(cast(AsyncGenerator[bytes], aiter(self._stream))) as parts:
            async for part in parts:
                yield part
                self.require_room()

    async def aclose(self) -> None:
        await self._stream.aclose()


def _most_connections() -> int:
    """How many connections there may be at once; 0 for no limit, for None would be aiohttp's own.

    How many calls there are is for `[concurrency]` and the agents to say, and a pool that is
    narrower makes them wait unseen. But where connections took all files that the process may open,
    its records could not be written.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if files == resource.RLIM_INFINITY else max(1, files // 2)


def _proxy(url: httpx.URL) -> httpx.Proxy | None:
    """The proxy that the environment puts before a server."""
    if proxy_bypass(url.netloc.decode()):
        return None
    proxies = getproxies()
    address = proxies.get(url.scheme) or proxies.get("all")
    if not address:
        return None
    return httpx.Proxy(address if "://" in address else f"http://{address}")


def is_loopback(host: str) -> bool:
    """Whether a host of a URL is this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
