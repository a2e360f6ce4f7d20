"""A double of the service Blaxel on loopback, for its real SDK.

Its machines are namespaces of this one, in which commands really run: a sandbox that is made is a
bubblewrap whose first program is `blaxel_box.py`. It can be told to fail as the service does.
"""

import json
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY, WORKSPACE = "bl-test-key-3f9a", "loops-tests"
PAGE = 2
"""Sandboxes of one page of a list, few so that there is a second one."""
_INIT = '"$@" & while :; do wait; sleep 3600; done'
_SEEN = ("bin", "sbin", "lib", "lib64")


@dataclass
class Service:
    """What the service has and was asked."""

    url: str = ""
    there: dict[str, dict[str, Any]] = field(default_factory=dict)
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    """Method, path and body of every request, machines' included."""
    answers: deque[tuple[int, str, bool]] = field(default_factory=deque)
    """What the next requests are answered instead: status, text, and whether it is done all the
    same."""
    lingers: int = 0
    """Looks at a deleted sandbox for which it still says that it is being deleted."""
    boxes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def paths(self, method: str) -> list[str]:
        return [path for asked, path, _ in self.asked if asked == method]

    def end(self, name: str) -> None:
        """As when a sandbox is lost."""
        box = self.boxes.pop(name, None)
        if box is not None:
            box.kill()
            box.communicate()


@contextmanager
def serving() -> Iterator[Service]:
    """The service, for the length of a block; nothing of it outlives the block."""
    service = Service()
    # Of one thread that lives as long as they do: they end with the thread that made them.
    with ThreadPoolExecutor(max_workers=1) as maker:

        def make(name: str) -> str:
            return maker.submit(_box, service, name).result()

        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(service, make))
        service.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield service
        finally:
            server.shutdown()
            thread.join()
            server.server_close()
            for name in [*service.boxes]:
                service.end(name)


def _box(service: Service, name: str) -> str:
    """Make a machine; its address."""
    python = Path(sys.base_prefix)
    argv = [
        "bwrap",
        "--unshare-all",
        "--share-net",
        "--die-with-parent",
        "--as-pid-1",
        "--clearenv",
    ]
    argv += ["--uid", "0", "--gid", "0", "--cap-drop", "ALL"]
    argv += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for folder in _SEEN:
        path = Path("/", folder)
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    argv += ["--ro-bind", str(python), str(python), "--tmpfs", "/tmp", "--tmpfs", "/var"]
    argv += ["--dir", "/work", "--ro-bind", str(Path(__file__).with_name("blaxel_box.py")), "/box"]
    argv += ["--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--setenv", "BL_CLOUD", "true"]
    program = python / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    box = subprocess.Popen(
        [*argv, "/bin/sh", "-c", _INIT, "sh", str(program), "-I", "/box"],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert box.stdout
    service.boxes[name] = box
    return f"http://127.0.0.1:{int(box.stdout.readline())}"


def _handler(service: Service, make: Callable[[str], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def answer(self, status: int, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def answer_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            told = json.loads(body) if body else None
            url = urlsplit(self.path)
            service.asked.append((self.command, url.path, told))
            if self.headers.get("x-blaxel-authorization") != f"Bearer {KEY}":
                why = {"code": 403, "error": "FORBIDDEN", "message": "not with this key"}
                self.answer(403, why)
                return
            instead = service.answers.popleft() if service.answers else None
            answer = (404, {}) if instead and not instead[2] else self.done(url, told)
            if instead:
                status, text, _ = instead
                answer = (status, {"code": status, "error": "UNKNOWN", "message": text})
            self.answer(*answer)

        do_GET = do_POST = do_PUT = do_DELETE = answer_any

        def done(self, url: Any, told: Any) -> tuple[int, object]:
            name = url.path.removeprefix("/v0/sandboxes").lstrip("/")
            if self.command == "POST":
                return self.made(told)
            if not name:
                return 200, self.page(int(parse_qs(url.query).get("cursor", ["0"])[0]))
            if name not in service.there:
                return 404, {"code": 404, "error": "NOT_FOUND", "message": f"no sandbox {name}"}
            record = service.there[name]
            if self.command == "DELETE":
                service.end(name)
                record["status"] = "DELETING" if service.lingers else "TERMINATED"
            elif record["status"] == "DELETING":
                service.lingers -= 1
                record["status"] = "DELETING" if service.lingers else "TERMINATED"
            return 200, record

        def made(self, told: Any) -> tuple[int, object]:
            name = told["metadata"]["name"]
            before = service.there.get(name)
            if before and before["status"] != "TERMINATED":
                return 409, {"code": 409, "error": "SANDBOX_ALREADY_EXISTS", "message": "taken"}
            told["metadata"]["url"] = make(name)
            told["status"] = "DEPLOYED"
            service.there[name] = told
            return 200, told

        def page(self, start: int) -> object:
            live = [each for each in service.there.values() if each["status"] != "TERMINATED"]
            more = start + PAGE < len(live)
            meta = {"hasMore": more, "nextCursor": str(start + PAGE) if more else ""}
            return {"data": live[start : start + PAGE], "meta": {**meta, "total": len(live)}}

    return Handler


def is_possible() -> bool:
    """Whether machines can be made here."""
    return shutil.which("bwrap") is not None
