"""A server of the Loops protocol in memory, whose weights are the batches that made them.

It stands behind `httpx.MockTransport`, answers as `loops serve` does, and can be copied whole: what
a copy holds is what the server held at that moment. What is sampled follows from the seed and from
the weights that are served, so a run that goes on with other weights than it had says other things.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import anyio
import httpx

from loops_cookbook.testing import ByteTokenizer

CHANGING = ("init_trainer_server", "forward_backward", "optim_step", "load_state")


def nobody(_: str) -> None:
    """Is told of nothing."""


@dataclass
class LoopsServer:
    """A trainer and its sampler, on one address."""

    tells_last: bool = True
    """Whether it tells the last operation on what is trained, as ours do."""
    keeps_checkpoints: bool = True
    seconds: float = 1.0
    """Of each operation."""
    watch: Callable[[str], None] = nobody
    """Told of each operation before it is accepted, and once it is."""
    weights: list[str] = field(default_factory=list[str])
    gradients: list[str] = field(default_factory=list[str])
    moments: int = 0
    served: list[str] = field(default_factory=list[str])
    version: int = 0
    step: int = 0
    last: str | None = None
    operations: dict[str, dict[str, Any]] = field(default_factory=dict)
    saved: dict[str, tuple[list[str], int]] = field(default_factory=dict)

    def copy(self) -> "LoopsServer":
        """The server as it is now, watched by nobody."""
        held = ("weights", "gradients", "served")
        copies = {name: list(getattr(self, name)) for name in held}
        plain = ("tells_last", "keeps_checkpoints", "seconds", "moments", "version", "step", "last")
        copies |= {name: getattr(self, name) for name in plain}
        return LoopsServer(
            **copies, operations=dict(self.operations), saved=dict(self.saved), watch=nobody
        )

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        path = unquote(request.url.path)
        body = json.loads(request.content) if request.content else {}
        match path:
            case "/health":
                return httpx.Response(200)
            case "/version":
                told = {"loops_cookbook": "0.1.0", "checkpoints": self.keeps_checkpoints}
                return httpx.Response(200, json=told)
            case "/policy_version":
                told = {"last_operation": self.last} if self.tells_last else {}
                return httpx.Response(200, json={"policy_version": self.step, **told})
            case "/sample":
                await anyio.sleep(2 * self.seconds)
                return self.sample(request, body)
            case _ if path.startswith("/operations/"):
                await anyio.sleep(self.seconds)
                return self.result(path.removeprefix("/operations/"))
            case _:
                return self.accept(request.headers["idempotency-key"], path[1:], body)

    def accept(self, key: str, name: str, body: dict[str, Any]) -> httpx.Response:
        """Apply an operation once by its key."""
        if key not in self.operations:
            if not self.keeps_checkpoints and name.endswith(("state", "optimizer")):
                return httpx.Response(422, json={"detail": "this engine keeps no checkpoints"})
            self.watch(name)
            self.operations[key] = self.apply(name, body)
            if name.startswith(CHANGING):
                self.last = key
            self.watch(name)
        return httpx.Response(202, json={"operation_id": key})

    def result(self, key: str) -> httpx.Response:
        """What an operation came to, if it is remembered."""
        if key not in self.operations:
            return httpx.Response(404, json={"detail": "unknown"})
        return httpx.Response(200, json={"status": "done", "result": self.operations[key]})

    def apply(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Do an operation; its result."""
        match name:
            case "init_trainer_server":
                self.weights, self.gradients, self.served = [], [], []
                self.moments = self.step = self.version = 0
                return {"step": 0, "lora_rank": body["lora_rank"]}
            case "forward":
                return outputs(body, -1.0 / (1 + len(self.weights)))
            case "forward_backward":
                self.gradients.append(digest(body["data"]))
                return outputs(body, -0.5)
            case "optim_step":
                rate = body["adam_params"]["learning_rate"]
                assert self.gradients, "no gradients wait"
                self.weights = [*self.weights, f"{'+'.join(self.gradients)} {rate}"]
                self.gradients = []
                self.step, self.moments = self.step + 1, self.moments + 1
                return {"metrics": {"grad_norm": 0.5, "learning_rate": rate}}
            case "save_weights_for_sampler":
                self.served, self.version = list(self.weights), self.step
                return {"version": self.version, "path": "here"}
            case "save_state":
                path = f"bt://loops:{body['run_id']}/weights/{body['name']}"
                self.saved[path] = (list(self.weights), self.moments)
                return {"mode": "full", "path": path}
            case "load_state" | "load_state_with_optimizer":
                weights, moments = self.saved[body["path"]]
                self.weights, self.gradients, self.served = list(weights), [], list(weights)
                self.moments = moments if name.endswith("optimizer") else 0
                self.step = self.version = self.moments
                return {"step": self.step}
            case _:
                raise AssertionError(name)

    def sample(self, request: httpx.Request, body: dict[str, Any]) -> httpx.Response:
        """Draw from what is served."""
        floor = int(request.headers.get("x-min-policy-version", "0"))
        if floor > self.version:
            return httpx.Response(408, json={"detail": "not published"})
        tokenizer = ByteTokenizer()
        prompt = tokenizer.decode(body["prompt"])
        word = prompt.split("<|user|>")[1].split("<|end|>")[0]
        choices: list[dict[str, Any]] = []
        for place in range(body["n"]):
            told = json.dumps([prompt, body["seed"], place, self.served])
            number = int(hashlib.sha256(told.encode()).hexdigest()[:8], 16)
            ids = tokenizer.encode(word if number % 2 else "no") + body["stop_token_ids"][:1]
            said = {"tokens": [f"token_id:{i}" for i in ids]}
            said |= {"token_logprobs": [-(number % 97 + 1) / 100] * len(ids)}
            choices.append({"finish_reason": "stop", "logprobs": said})
        headers = {"x-trainers-policy-version": str(self.version)}
        return httpx.Response(200, json={"choices": choices}, headers=headers)


def digest(data: object) -> str:
    """A batch in short."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:12]


def outputs(body: dict[str, Any], logprob: float) -> dict[str, Any]:
    """What a batch comes to."""
    lengths = [len(row["model_input"]["chunks"][0]["tokens"]) for row in body["data"]]
    logprobs = [{"data": [logprob] * n, "dtype": "float32", "shape": [n]} for n in lengths]
    loss = int(digest(body["data"]), 16) % 997
    told = [{"logprobs": each} for each in logprobs]
    return {"loss": loss, "loss_fn_outputs": told, "metrics": {}}
