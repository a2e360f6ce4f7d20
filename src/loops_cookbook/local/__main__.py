"""`python -m loops_cookbook.local`: what needs the extra `local`, in a process of its own.

`serve` is the embedded engine as a server. When it serves, one JSON line on stdout says so:
`{"url": ..., "engine": {...}}`. The API key comes in the environment, never as an argument. With
`--end-with-stdin` the process ends as soon as its stdin does, and by no signal but SIGKILL: that is
how it outlives no parent, however that one ended, and serves it to its end where a whole job is
sent SIGTERM. `convert` makes a model folder from a GGUF file, without torch; `export`
makes one from a checkpoint. `device` says in one JSON line on what the engine would compute:
`{"device": ..., "memory_bytes": ...}`.

stdout carries nothing else; logs go to stderr. Arguments that do not parse and models that do not
load are one line on stderr and exit status 2, the first of them before torch is imported.
"""

import argparse
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from loops_cookbook.errors import LoopsError, UsageError
from loops_cookbook.services.command import API_KEY_VARIABLE, STAGES

logger = logging.getLogger("loops_cookbook.local")
stages = logging.getLogger(STAGES)

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Parse and carry out; ends the process."""
    options = _parser().parse_args(arguments)
    answer_fd = _claim_stdout()
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        options.carry_out(options, answer_fd)
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
    serve.add_argument("--init", choices=("pretrained", "random"), default="pretrained")
    serve.add_argument("--device", help="as torch names it; default: cuda where there is one")
    serve.add_argument("--dtype", help="float32, bfloat16 or float16; default: by the device")
    serve.add_argument("--threads", type=int, help="default: by the model's size")
    serve.add_argument("--deterministic", action="store_true", help="sample each request alone")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=0, help="0: a free one")
    serve.add_argument("--checkpoints", type=Path, help="a folder; made with the first of them")
    serve.add_argument("--end-with-stdin", action="store_true")
    serve.set_defaults(carry_out=_serve)
    convert = commands.add_parser("convert", help="read a GGUF file", allow_abbrev=False)
    convert.add_argument("--gguf", type=Path, required=True)
    convert.add_argument("--out", type=Path, required=True, help="a folder that is there")
    convert.set_defaults(carry_out=_convert)
    export = commands.add_parser("export", help="write a trained model", allow_abbrev=False)
    export.add_argument("--model-dir", type=Path, required=True)
    export.add_argument("--checkpoint", type=Path, required=True)
    export.add_argument("--out", type=Path, required=True, help="a folder that is there")
    export.add_argument("--lora-rank", type=int, required=True, help="0: every weight")
    export.add_argument("--lora-alpha", type=float, required=True)
    export.add_argument("--random-seed", type=int, help="of first weights that were random")
    export.set_defaults(carry_out=_export)
    device = commands.add_parser("device", help="say what serve computes on", allow_abbrev=False)
    device.set_defaults(carry_out=_device)
    return parser


def _convert(options: argparse.Namespace, _: int) -> None:
    from loops_cookbook.local.convert import convert

    convert(options.gguf, options.out)


def _export(options: argparse.Namespace, _: int) -> None:
    from loops_cookbook.local.export import export

    export(
        options.model_dir,
        options.checkpoint,
        options.out,
        lora_rank=options.lora_rank,
        lora_alpha=options.lora_alpha,
        random_seed=options.random_seed,
    )


def _device(_: argparse.Namespace, answer_fd: int) -> None:
    import torch

    answer: dict[str, object] = {"device": "cpu"}
    if torch.cuda.is_available():
        memory = torch.cuda.mem_get_info()[1]
        answer = {"device": "cuda", "memory_bytes": memory}
    os.write(answer_fd, json.dumps(answer).encode() + b"\n")


def _serve(options: argparse.Namespace, ready_fd: int) -> None:
    if options.end_with_stdin:
        for number in _ENDING:
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=end_with_stdin, name="end-with-stdin", daemon=True).start()
    api_key = os.environ.pop(API_KEY_VARIABLE, None)
    if not api_key and options.host not in ("127.0.0.1", "::1", "localhost"):
        raise UsageError(f"{options.host} can be reached by others: set {API_KEY_VARIABLE}")
    listener = _listener(options.host, options.port)
    began = time.monotonic()
    stages.info("importing torch and transformers")
    # Here and not above: they take seconds, and a mistyped argument should not.
    from loops_cookbook.local.engine import Engine, EngineSettings
    from loops_cookbook.local.operations import Operations
    from loops_cookbook.local.server import serve
    from loops_cookbook.local.worker import Worker

    imported = time.monotonic()
    stages.info("loading %s from %s", options.model_name, options.model_dir)
    engine = Engine(
        EngineSettings(
            model_dir=options.model_dir,
            model_name=options.model_name,
            max_seq_len=options.max_seq_len,
            lora_rank=options.lora_rank,
            lora_alpha=options.lora_alpha,
            seed=options.seed,
            init=options.init,
            device=options.device,
            dtype=options.dtype,
            checkpoints=options.checkpoints,
            threads=options.threads,
            deterministic=options.deterministic,
        )
    )
    operations = Operations()
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    logger.info(
        "serving %s on %s; importing took %.1f s, loading %.1f s",
        options.model_name,
        url,
        imported - began,
        time.monotonic() - imported,
    )
    line = json.dumps({"url": url, "engine": engine.description()})
    # The socket listens already: whoever reads the line may connect before the server has begun.
    os.write(ready_fd, line.encode() + b"\n")
    os.close(ready_fd)
    worker = Worker(engine, operations)
    serve(worker, operations, listener, api_key=api_key, checkpoints=options.checkpoints)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise UsageError(f"cannot listen on {host}:{port} ({reason}): give another") from error


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
