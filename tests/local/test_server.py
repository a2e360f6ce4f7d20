"""The server's process: it ends when there is nothing left that could serve."""

import subprocess
import sys

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

PROGRAM = """
import socket
from loops_cookbook.local.operations import Operations
from loops_cookbook.local.server import serve
from loops_cookbook.local.worker import Worker


class Engine:
    model_name, max_seq_len, policy_version = "tiny", 32, 0

    @property
    def is_sampling(self):
        raise RuntimeError("lost count")


operations = Operations()
with socket.create_server(("127.0.0.1", 0)) as listener:
    serve(Worker(Engine(), operations), operations, listener)
"""


def test_a_process_whose_worker_died_ends_and_says_why() -> None:
    """It went on, with nobody to serve what it took in."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode != 0
    *_, last = done.stderr.splitlines()
    assert "WorkerDied: the engine's worker has died of RuntimeError: lost count" in last
