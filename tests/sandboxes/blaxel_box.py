"""The inside of a machine of the double of Blaxel: its API for processes and files.

It runs alone, in namespaces of its own, with nothing but the standard library. What it answers, and
how it starts and kills commands, is as in the service's own open source (blaxel-ai/sandbox): each
command in a new process group, its outputs straight into files, of which an answer tells the last
64 KiB, and a kill that goes to the group.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TAIL = 65_536
LOGS = Path("/var/log")


class Process:
    def __init__(self, name: str, command: str, folder: str) -> None:
        self.name, self.command, self.folder = name, command, folder
        self.is_killed = False
        self.files = [LOGS / f"{name}.{kind}" for kind in ("stdout", "stderr")]
        with self.files[0].open("wb") as out, self.files[1].open("wb") as err:
            self.child = subprocess.Popen(
                ["sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder or "/",
                process_group=0,
            )
        self.ended = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self.child.wait()
        self.ended.set()

    def kill(self) -> None:
        if self.child.poll() is None:
            self.is_killed = True
            os.killpg(self.child.pid, signal.SIGKILL)

    @property
    def told(self) -> dict[str, object]:
        code = self.child.returncode if self.ended.is_set() else None
        status = "running" if code is None else "completed" if code == 0 else "failed"
        stdout, stderr = (file.read_bytes()[-TAIL:].decode(errors="replace") for file in self.files)
        return {
            "pid": str(self.child.pid),
            "name": self.name,
            "command": self.command,
            "status": "killed" if self.is_killed and code is not None else status,
            "exitCode": -1 if code is not None and code < 0 else code or 0,
            "startedAt": "",
            "completedAt": "",
            "workingDir": self.folder,
            "stdout": stdout,
            "stderr": stderr,
            "logs": stdout + stderr,
        }


PROCESSES: dict[str, Process] = {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None: ...

    def answer(self, status: int, content: object) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        url = urlsplit(self.path)
        first, _, rest = url.path.lstrip("/").partition("/")
        try:
            if first == "process":
                self.answer(*self.process(rest, url.query, body))
            elif first == "filesystem":
                path = Path("/", unquote(rest).lstrip("/"))
                self.answer(*self.file(path, body))
            else:
                self.answer(404, {"error": f"no {url.path}"})
        except FileNotFoundError as error:
            self.answer(404, {"error": str(error)})
        except ConnectionError:
            self.close_connection = True  # who asked has gone

    do_GET = do_POST = do_PUT = do_DELETE = answer_any

    def process(self, rest: str, query: str, body: bytes) -> tuple[int, object]:
        name, _, what = rest.partition("/")
        if Path(f"/tmp/busy-{what or self.command}").exists():
            Path(f"/tmp/busy-{what or self.command}").unlink()
            return 504, {"error": "the edge had no answer in time"}
        if self.command == "POST":
            wanted = json.loads(body)
            before = PROCESSES.get(wanted["name"])
            if before and not before.ended.is_set():
                return 400, {"error": f"process with name '{wanted['name']}' already exists"}
            made = Process(wanted["name"], wanted["command"], wanted.get("workingDir", "/"))
            PROCESSES[made.name] = made
            return 200, made.told
        if name not in PROCESSES:
            return 404, {"error": "process not found"}
        found = PROCESSES[name]
        if what == "kill":
            found.kill()
            return 200, {"message": "killed"}
        if what == "wait":
            found.ended.wait(min(55, int(parse_qs(query)["timeout"][0])))
        return 200, found.told

    def file(self, path: Path, body: bytes) -> tuple[int, object]:
        if self.command == "GET":
            return 200, path.read_bytes()
        if self.command == "DELETE":
            shutil.rmtree(path)
            return 200, {"message": "removed"}
        head = f"content-type: {self.headers['content-type']}\r\n\r\n".encode()
        parts = BytesParser().parsebytes(head + body).get_payload()
        path.parent.mkdir(parents=True, exist_ok=True)
        for part in parts:
            if 'name="file"' in part["content-disposition"]:
                path.write_bytes(part.get_payload(decode=True))
        return 200, {"message": "written"}


if __name__ == "__main__":
    LOGS.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)  # noqa: T201
    sys.stdout.close()
    server.serve_forever()
