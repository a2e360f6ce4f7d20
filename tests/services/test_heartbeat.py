import anyio
import httpx
import pytest
from trio.testing import MockClock

from loops_cookbook.services.heartbeat import Pulse, beating
from loops_cookbook.services.transport import open_transport

pytestmark = pytest.mark.anyio

PULSE = Pulse("/health", every_seconds=10, headers={"X-Run-Id": "r"})


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


async def test_silence_is_told_for_as_long_as_it_lasts() -> None:
    told: list[float] = []
    heard: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        heard.append(request.headers["x-run-id"])
        if 15 < anyio.current_time() - began < 45:
            raise httpx.ConnectError("refused")
        return httpx.Response(200 if len(heard) != 6 else 503)

    network = httpx.MockTransport(answer)
    async with open_transport("http://server", network=network) as transport:
        began = anyio.current_time()
        async with beating(transport, PULSE, told.append):
            await anyio.sleep(75)
    assert told == pytest.approx([10, 20, 30, 10])
    assert heard == ["r"] * 7


async def test_an_error_of_the_block_passes_as_it_is() -> None:
    network = httpx.MockTransport(lambda _: httpx.Response(200))
    async with open_transport("http://server", network=network) as transport:
        with pytest.raises(KeyError):
            async with beating(transport, PULSE, print):
                raise KeyError
