"""`python -m loops_cookbook.local serve`: the embedded engine as a server of its own process.

When it serves, one JSON line on stdout says so: `{"url": ..., "engine": {...}}`. stdout carries
nothing else; logs go to stderr. Arguments that do not parse and models that do not load are one
line on stderr and exit status 2, the first of them before torch is imported. The API key comes in
the environment, never as an argument. With `--end-with-stdin` the process ends as soon as its
stdin does: that is how it outlives no parent, however that one ended.
"""

import argparse
import json
import logging
import os
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

from loops_cookbook.errors import LoopsError, UsageError
from loops_cookbook.services.spawn import API_KEY_VARIABLE

logger = logging.getLogger("loops_cookbook.local")

KEEP_ALIVE_SECONDS = 120
"""Longer than clients keep idle connections, so that none of them sends into a closing one."""
GRACE_SECONDS = 1
"""For answers under way, once the process is told to end."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Parse, load, serve; ends the process."""
    options = _parser().parse_args(arguments)
    if options.end_with_stdin:
        threading.Thread(target=end_with_stdin, name="end-with-stdin", daemon=True).start()
    ready_fd = _claim_stdout()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        _serve(options, ready_fd)
    except KeyboardInterrupt:
        _end(130)
    except LoopsError as error:
        _end(error.exit_status, str(error))
    except Exception:
        logger.exception("a fault of this program")
        _end(70)
    _end(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loops_cookbook.local", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve one model over HTTP", allow_abbrev=False)
    serve.add_argument("--model-dir", type=Path, required=True)
    serve.add_argument("--model-name", required=True, help="what requests call the model")
    serve.add_argument("--max-seq-len", type=int, required=True)
    serve.add_argument("--lora-rank", type=int, required=True, help="0 trains every weight")
    serve.add_argument("--lora-alpha", type=float, default=32.0)
    serve.add_argument("--seed", type=int, default=0)
    serve.add_argument("--device", help="as torch names it; default: cuda where there is one")
    serve.add_argument("--dtype", help="float32, bfloat16 or float16; default: by the device")
    serve.add_argument("--threads", type=int, help="default: by the model's size")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=0, help="0: a free one")
    serve.add_argument("--end-with-stdin", action="store_true")
    return parser


def _serve(options: argparse.Namespace, ready_fd: int) -> None:
    api_key = os.environ.pop(API_KEY_VARIABLE, None)
    if not api_key and options.host not in ("127.0.0.1", "::1", "localhost"):
        raise UsageError(f"{options.host} can be reached by others: set {API_KEY_VARIABLE}")
    listener = _listener(options.host, options.port)
    # Here and not above: torch takes seconds, and a mistyped argument should not.
    import uvicorn

    from loops_cookbook.local.app import create_app
    from loops_cookbook.local.engine import Engine, EngineSettings
    from loops_cookbook.local.operations import Operations
    from loops_cookbook.local.worker import Worker

    engine = Engine(
        EngineSettings(
            model_dir=options.model_dir,
            model_name=options.model_name,
            max_seq_len=options.max_seq_len,
            lora_rank=options.lora_rank,
            lora_alpha=options.lora_alpha,
            seed=options.seed,
            device=options.device,
            dtype=options.dtype,
            threads=options.threads,
        )
    )
    operations = Operations()
    app = create_app(Worker(engine, operations), operations, api_key=api_key)
    server = uvicorn.Server(
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
    host, port = listener.getsockname()[:2]
    url = f"http://{host}:{port}"
    logger.info("serving %s on %s", options.model_name, url)
    line = json.dumps({"url": url, "engine": engine.description()})
    # The socket listens already: whoever reads the line may connect before the server has begun.
    os.write(ready_fd, line.encode() + b"\n")
    os.close(ready_fd)
    server.run(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port} ({error}): give another") from error


def _claim_stdout() -> int:
    """Keep stdout for the ready line: what libraries print goes to stderr."""
    sys.stdout.flush()
    ready_fd = os.dup(1)
    os.dup2(2, 1)
    return ready_fd


def end_with_stdin() -> None:
    """Wait until stdin ends, which it does with the parent, and end the process."""
    while os.read(0, 4096):
        pass
    os._exit(0)  # nothing here is worth saving, and the engine may be in the middle of a call


def _end(status: int, last_words: str = "") -> NoReturn:
    """End now: an engine call that still runs in its thread must not hold the process."""
    logging.shutdown()
    if last_words:
        sys.stderr.write(f"{last_words}\n")
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
