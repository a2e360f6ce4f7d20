"""One worker behind a listening socket, until the process is told to end or the worker dies.

Signals that the process ignores stay ignored. Answers under way get a moment at the end.
"""

import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from loops_cookbook.local.app import create_app
from loops_cookbook.local.operations import Operations
from loops_cookbook.local.worker import Worker, WorkerDied

KEEP_ALIVE_SECONDS = 120
"""Longer than clients keep idle connections, so that none of them sends into a closing one."""
GRACE_SECONDS = 1
"""For answers under way, once the process is told to end."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            yield
            return
        with super().capture_signals():
            yield


def serve(
    worker: Worker,
    operations: Operations,
    listener: socket.socket,
    *,
    api_key: str | None = None,
    checkpoints: Path | None = None,
) -> None:
    """Serve until told to end.

    Args:
        worker, operations, api_key, checkpoints: as `create_app` takes them.
        listener: already listens.

    Raises:
        WorkerDied: nothing could be served any more.
    """

    def stop() -> None:
        server.should_exit = True

    app = create_app(worker, operations, api_key=api_key, checkpoints=checkpoints, on_fault=stop)
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            ws="none",
            lifespan="on",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
    )
    server.run(sockets=[listener])
    if worker.fault is not None:
        raise WorkerDied(worker.fault)
