"""A Tinker service as it looks from here: whether it is there, and its SDK's errors as ours.

The SDK looks for a lost server for as long as it likes. So the server is looked at from here as
well, and a wait ends once it has not been there for `GONE_SECONDS`. Whatever the SDK raises becomes
a `ServiceError`, without the key.
"""

import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import anyio

from loops_cookbook.errors import ServiceError, ServiceRefused, ServiceUnavailable
from loops_cookbook.problems import one_line
from loops_cookbook.services.heartbeat import beside
from loops_cookbook.services.tinker_sdk import Sdk
from loops_cookbook.services.transport import Transport

logger = logging.getLogger(__name__)

HEALTH = "/api/v1/healthz"
PROBE_SECONDS = 30.0
"""Between two looks at whether the server is there."""
GONE_SECONDS = 300.0
"""After which a server that was not there is not waited for any more."""

_PASSING = frozenset({408, 409, 425, 429})
"""Statuses that are about the server's state and not about the request, those from 500 apart."""


class TinkerServer:
    """A Tinker service and the SDK that it is spoken to with.

    Args:
        sdk: the module `tinker`.
        transport: to the service, for the requests that are not the SDK's.
    """

    def __init__(self, sdk: Sdk, transport: Transport) -> None:
        self.sdk = sdk
        self.transport = transport
        self._gone = ""
        """Why it is not waited for; empty: it is."""
        self._waiting: set[anyio.CancelScope] = set()

    @contextmanager
    def told(self, what: str) -> Generator[None]:
        """Around a call of the SDK: its errors become ours, and no wait outlasts the server."""
        scope = anyio.CancelScope()
        self._waiting.add(scope)
        try:
            with scope:
                yield
        except ServiceError:
            raise
        except Exception as error:  # of the SDK, of httpx, a ValueError, an AssertionError
            raise self._ours(what, error) from error
        finally:
            self._waiting.discard(scope)
        if scope.cancelled_caught:
            raise ServiceUnavailable(f"{what}: {self._gone}")

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        """Look whether the server is there, for the length of the block."""
        async with beside(self._watch):
            yield

    async def _watch(self) -> None:
        seen, is_lost = anyio.current_time(), False
        while True:
            await anyio.sleep(PROBE_SECONDS)
            try:
                await self.transport.call("probe", "GET", HEALTH)
            except ServiceUnavailable as error:
                lost = anyio.current_time() - seen
                if not is_lost:
                    logger.warning("%s; waited for up to %.0f s", error, GONE_SECONDS)
                is_lost = True
                if lost >= GONE_SECONDS:
                    self._give_up(f"{error} (for {lost:.0f} s): see whether the service runs")
            else:
                seen, is_lost = anyio.current_time(), False

    def _give_up(self, why: str) -> None:
        self._gone = why
        for scope in self._waiting:
            scope.cancel()

    def _ours(self, what: str, error: Exception) -> ServiceError:
        said = self.transport.without_key(one_line(str(error))) or type(error).__name__
        told = f"{self.transport.base_url}: {what} failed: {said}"
        status = getattr(error, "status_code", None)
        is_passing = isinstance(status, int) and (status in _PASSING or status >= 500)
        is_lost = isinstance(error, (self.sdk.APIConnectionError, OSError))
        is_its_own = str(getattr(error, "category", "")) == "server"
        if is_passing or is_lost or is_its_own:
            return ServiceUnavailable(f"{told}; see whether the service runs, then run again")
        return ServiceRefused(
            f"{told}; see TINKER_API_KEY, and what of the config the service cannot do"
        )
