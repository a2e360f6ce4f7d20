"""Our client and the public one say the same on the wire for the same calls.

    python .ci/same_wire.py

Run by a Python 3.12 that has this package and `baseten-loops`. Both clients talk to one recording
server on loopback, which answers as the protocol says. Bodies must have the same keys in the same
order with the same values; headers must be equal but for those that trace a call, name the client
or name an operation.
"""

import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio
import numpy as np
from baseten import loops
from baseten.loops import models as wire
from baseten.loops.sampling_client import LocalDeployment

from loops_cookbook.learning.datums import Datum
from loops_cookbook.services.base import AdamParams, LossSpec, SampleParams
from loops_cookbook.services.direct import HttpSampler
from loops_cookbook.services.http import HttpCheckpointer
from loops_cookbook.services.transport import open_transport
from loops_cookbook.tokens import ids_of

MODEL, RUN, KEY = "Qwen/Qwen3-8B", "run_x", "sk-test"
THEIRS_ALONE = {"traceparent", "baggage"}
OF_THE_CLIENT = {"host", "user-agent", "accept-encoding", "content-length", "connection", "accept"}


@dataclass
class Said:
    """One request."""

    line: str
    headers: dict[str, str]
    body: bytes


class Server(ThreadingHTTPServer):
    """Keeps what is said and answers it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.said: list[Said] = []
        self.names: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """Accepts every operation, and ends it at once."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.keep(body)
        if self.path == "/sample":
            told = {"tokens": ["token_id:7"], "token_logprobs": [-0.5]}
            self.answer(200, {"choices": [{"finish_reason": "stop", "logprobs": told}] * 2})
            return
        key = self.headers["idempotency-key"]
        self.server.names[key] = self.path[1:]
        self.answer(202, {"operation_id": key, "schema_version": 1})

    def do_GET(self) -> None:
        if not self.path.startswith("/operations/"):
            self.keep(b"")
            self.answer(200, {})
            return
        output = {"logprobs": {"data": [-0.5] * 4, "dtype": "float32", "shape": [4]}}
        results = {
            "init_trainer_server": {"step": 0, "lora_rank": 16},
            "forward_backward": {"loss": 1.0, "loss_fn_outputs": [output]},
            "optim_step": {"metrics": {"grad_norm": 0.5}},
            "save_weights_for_sampler": {"version": 1, "path": "bt://x"},
            "save_state": {"mode": "full", "path": "bt://loops:run_x/weights/ck"},
        }
        name = self.server.names[self.path.removeprefix("/operations/")]
        self.answer(200, {"status": "done", "result": results.get(name, {"step": 1})})

    def keep(self, body: bytes) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.said.append(Said(f"{self.command} {self.path}", headers, body))

    def answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("x-trainers-policy-version", "1")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def theirs(url: str) -> None:
    trainer = loops.TrainingClient(
        url,
        lora_rank=16,
        base_model=MODEL,
        run_id=RUN,
        api_key=KEY,
        paired_sampling_deployment=LocalDeployment(url),
    )

    def tensor(values: list[float], dtype: str) -> wire.TensorData:
        return wire.TensorData(data=values, dtype=dtype, shape=[4])

    row = wire.Datum(
        model_input=wire.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={
            "target_tokens": tensor([2, 3, 4, 5], "int64"),
            "logprobs": tensor([0.0, 0.0, -0.5, -1.5], "float32"),
            "advantages": tensor([0.0, 0.0, 0.25, 0.25], "float32"),
        },
    )
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    trainer.forward_backward([row], "cispo", bounds).result()
    trainer.optim_step(wire.AdamParams(learning_rate=1e-5)).result()
    sampler = trainer.save_weights_and_get_sampling_client("update-1")
    params = wire.SamplingParams(
        max_tokens=3, temperature=0.7, top_p=0.9, top_k=40, seed=7, stop=["\n"]
    )
    sampler.sample(wire.ModelInput.from_ints([11, 12]), 2, params, affinity_key="g1")
    path = trainer.save_state("ck").result().path
    trainer.load_state(path).result()
    trainer.load_state_with_optimizer(path).result()
    trainer.close()


def ours(url: str) -> None:
    async def run() -> None:
        async with open_transport(url, api_key=KEY) as transport:
            trainer = HttpCheckpointer(transport, model=MODEL, run_id=RUN)
            await trainer.init_trainer(16)
            row = Datum(
                input_ids=ids_of([1, 2, 3, 4]),
                target_ids=ids_of([2, 3, 4, 5]),
                logprobs=np.array([0.0, 0.0, -0.5, -1.5], np.float32),
                advantages=np.array([0.0, 0.0, 0.25, 0.25], np.float32),
            )
            loss = LossSpec("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
            await trainer.train([row], loss, AdamParams(learning_rate=1e-5), key="update-1")
            await trainer.publish(key="update-1")
            params = SampleParams(
                max_tokens=3, temperature=0.7, top_p=0.9, top_k=40, seed=7, stop=("\n",)
            )
            await HttpSampler(transport, run_id=RUN).sample(
                ids_of([11, 12]), params, n=2, min_policy_version=1, affinity_key="g1"
            )
            path = await trainer.save("ck")
            await trainer.load(path, with_optimizer=False)
            await trainer.load(path, with_optimizer=True)

    anyio.run(run)


def recorded(client: Callable[[str], None]) -> list[Said]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        client(server.url)
        server.shutdown()
    return [said for said in server.said if said.line.startswith("POST")]


def comparable(said: Said) -> tuple[dict[str, str], object]:
    headers = {k: v for k, v in said.headers.items() if k not in OF_THE_CLIENT | THEIRS_ALONE}
    form = (
        r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
        if said.line.endswith("/sample")
        else "[0-9a-f]{32}"
    )
    if not re.fullmatch(form, headers.pop("idempotency-key")):
        raise SystemExit(f"{said.line}: the key is not of the form {form}")
    body = said.body.replace(b'"ttl_seconds":null,', b"")  # absent and null mean the same
    return headers, json.loads(body, object_pairs_hook=list)


def main() -> None:
    """Compare."""
    pairs = list(zip(recorded(theirs), recorded(ours), strict=True))
    for their, our in pairs:
        if their.line != our.line:
            raise SystemExit(f"they say {their.line}, we say {our.line}")
        for theirs_part, ours_part in zip(comparable(their), comparable(our), strict=True):
            if theirs_part != ours_part:
                raise SystemExit(f"{their.line}\n  they: {theirs_part}\n  we:   {ours_part}")
        print(f"the same: {their.line}")
    print(f"{len(pairs)} requests, equal key for key")


if __name__ == "__main__":
    main()
