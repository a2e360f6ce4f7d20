"""Which sockets carry a request: a proxy of the environment, or none."""

import resource

import pytest
from httpx_aiohttp import AiohttpTransport

from loops_cookbook.services.network import is_loopback, sockets


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def proxy_of(base_url: str) -> str | None:
    network = sockets(base_url)
    assert isinstance(network, AiohttpTransport)
    return None if network.proxy is None else str(network.proxy.url)


@pytest.mark.parametrize(
    ("variables", "proxy"),
    [
        ({}, None),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ({"HTTPS_PROXY": "proxy:3128"}, "http://proxy:3128"),
        ({"all_proxy": "http://proxy:3128"}, "http://proxy:3128"),
        ({"http_proxy": "http://proxy:3128"}, None),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "a.test,example.test"}, None),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "*"}, None),
    ],
)
def test_a_proxy_of_the_environment_stands_before_a_server(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], proxy: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_of("https://api.example.test/v1") == proxy


def test_no_proxy_stands_before_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://proxy:3128")
    assert proxy_of("http://127.0.0.1:8000") is None
    assert proxy_of("http://localhost:8000") is None


def test_this_machine_is_known_by_its_names_and_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost", "a.localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "localhost.example.test", "")))


@pytest.mark.parametrize(
    ("files", "connections"), [(1024, 512), (64, 32), (resource.RLIM_INFINITY, 0)]
)
def test_connections_leave_files_for_all_else(
    monkeypatch: pytest.MonkeyPatch, files: int, connections: int
) -> None:
    """With more calls than files, a run ended at the first record that it could not open."""

    def limits(_: int) -> tuple[int, int]:
        return files, files

    monkeypatch.setattr(resource, "getrlimit", limits)
    network = sockets("http://127.0.0.1")
    assert isinstance(network, AiohttpTransport)
    assert network.limits.max_connections == connections
