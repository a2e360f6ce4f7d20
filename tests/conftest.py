"""A process serves one config; a test session serves many, so each test forgets its own."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings

# The same examples on every machine, and no clock on them: machines differ.
settings.register_profile("loops", deadline=None, derandomize=True)
settings.load_profile("loops")

ROOT = Path(__file__).parents[1]
BUNDLED = (ROOT / "examples", ROOT / "patterns")


def pytest_configure(config: pytest.Config) -> None:
    """Take SIGHUP, which then ends nothing, and SIGINT where they are ignored.

    Under `nohup`, and behind a shell's `&`, they are, in each command that a test starts as well,
    and tests of a hangup and of Ctrl-C failed.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _take_it)


def _take_it(number: int, frame: FrameType | None) -> None: ...


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import torch and transformers before any test is on its clock.

    On a busy machine that alone took a minute, and the first test that needed them was blamed.
    """
    is_needed = any(item.get_closest_marker("torch") for item in session.items)
    if is_needed and not session.config.option.collectonly and find_spec("torch"):
        import_module("loops_cookbook.local.model")


@pytest.fixture(autouse=True)
def _forget_user_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Take back what a config put on `sys.path`, and what was imported from there."""
    path = [*sys.path]
    yield
    if sys.path == path:
        return
    sys.path[:] = path
    users = tuple(f"{folder}{os.sep}" for folder in (*BUNDLED, tmp_path_factory.getbasetemp()))
    for name, module in [*sys.modules.items()]:  # thousands: no `Path` is made of each
        if (getattr(module, "__file__", None) or "").startswith(users):
            del sys.modules[name]


class JudgeServer(ThreadingHTTPServer):
    """An OpenAI-compatible API on loopback, whose model is a function of the request's body."""

    daemon_threads = True

    def __init__(self, says: Callable[[dict[str, Any]], str]) -> None:
        super().__init__(("127.0.0.1", 0), _Completions)
        self.says = says
        self.asked: list[dict[str, Any]] = []
        """Every body, in order."""
        self.keys: set[str | None] = set()
        """What came as `Authorization`."""

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Completions(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.add(self.headers["Authorization"])
        message = {"role": "assistant", "content": self.server.says(body)}
        answer = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        is_known = self.path == "/v1/chat/completions"
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def judge_server() -> Iterator[Callable[[Callable[[dict[str, Any]], str]], JudgeServer]]:
    """Starts judges that say what a function of the request says; ends them with the test."""
    started: list[tuple[JudgeServer, threading.Thread]] = []

    def start(says: Callable[[dict[str, Any]], str]) -> JudgeServer:
        server = JudgeServer(says)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()
