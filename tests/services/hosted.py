"""Hosted Loops in one function: a control plane, a trainer and a sampler, with a script of faults.

It stands behind `httpx.MockTransport`. What was applied is counted by idempotency key, as the real
service does, so a test can tell an operation that was repeated from one that was applied twice; the
weights are the batches that made them. Another run of the same workspace has its checkpoints.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import httpx
from tests.services.loops_server import digest

MODEL = "Qwen/Qwen3-8B"
KEY = "sk-of-the-workspace"

Fault = Callable[[Callable[[], httpx.Response]], httpx.Response]
"""Given the way to the usual answer, what is answered instead."""


def status(code: int, **headers: str) -> Fault:
    """Refuse, and do nothing."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: httpx.Response(code, json={"detail": f"scripted {code}"}, headers=named)


def dropped(act: Callable[[], httpx.Response]) -> httpx.Response:
    """Do it, and lose the answer."""
    act()
    raise httpx.ReadError("the connection was lost")


def usual(act: Callable[[], httpx.Response]) -> httpx.Response:
    """Answer as usual, for a fault that is to come later."""
    return act()


def unreachable(_: Callable[[], httpx.Response]) -> httpx.Response:
    """Nothing arrives."""
    raise httpx.ConnectError("no route")


@dataclass
class Hosted:
    """What the workspace has, and what became of it."""

    is_serverless: bool = False
    limit: int | None = 4096
    statuses: list[str] = field(default_factory=list[str])
    """Of the trainer's deployment, until the last of them it is not healthy."""
    sampler_statuses: list[str] = field(default_factory=lambda: ["ACTIVE"])
    faults: list[tuple[str, Fault]] = field(default_factory=list[tuple[str, Fault]])
    """By a pattern of `METHOD path`, each used once, in order."""
    requests: list[httpx.Request] = field(default_factory=list[httpx.Request])
    made: Counter[str] = field(default_factory=Counter[str])
    """How often sessions, runs, operations were made or applied."""
    operations: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    steps: int = 0
    run: str = "run-1"
    weights: list[str] = field(default_factory=list[str])
    gradients: list[str] = field(default_factory=list[str])
    saved: dict[str, tuple[list[str], int]] = field(default_factory=dict)
    """Of the workspace: weights and steps by path."""
    is_woken: bool = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        self.requests.append(request)
        line = f"{request.method} {unquote(request.url.path)}"
        for index, (pattern, fault) in enumerate(self.faults):
            if re.search(pattern, line):
                del self.faults[index]
                return fault(lambda: self.usual(request))
        return self.usual(request)

    def usual(self, request: httpx.Request) -> httpx.Response:
        """What is answered where no fault is scripted."""
        if request.headers.get("authorization") != f"Api-Key {KEY}":
            return httpx.Response(401, json={"detail": "no such key"})
        path = unquote(request.url.path)
        body = json.loads(request.content) if request.content else {}
        host = request.url.host
        if host == "control":
            return self.control(path, body)
        if host == "trainer":
            return self.trainer(request, path, body)
        return self.sampler(request, path, body)

    def control(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """The control plane."""
        if path.endswith("/capabilities"):
            model = {"model_name": MODEL, "max_context_length": self.limit}
            return httpx.Response(200, json={"supported_models": [model]})
        if path == "/v1/teams":
            return httpx.Response(200, json={"teams": [{"id": "t1", "name": "research"}]})
        if path.endswith("/sessions"):
            self.made["session"] += 1
            return httpx.Response(200, json={"session": {"id": "session-1"}})
        if path.endswith("/trainers"):
            self.made["run"] += 1
            run = {"id": self.run, "base_model": MODEL, "base_url": f"https://trainer/{self.run}"}
            deployment = None if self.is_serverless else "deployment-1"
            return httpx.Response(200, json={"run": {**run, "deployment_id": deployment}})
        if path.endswith("/samplers"):
            place = {"id": "sampler-1", "base_url": "https://sampler/s/sync"}
            if not self.is_serverless:
                place |= {"model_id": "model-1", "deployment_id": "deployment-2"}
            return httpx.Response(200, json={"sampler": place})
        if path.startswith("/v1/loops/deployments/"):
            name = self.statuses[0] if self.statuses else "RUNNING"
            return httpx.Response(200, json={"deployment": {"status": {"name": name}}})
        if path.startswith("/v1/models/"):
            name = self.sampler_statuses[0]
            if len(self.sampler_statuses) > 1:
                del self.sampler_statuses[0]
            return httpx.Response(200, json={"status": name})
        raise AssertionError(path)

    def trainer(self, request: httpx.Request, path: str, body: dict[str, Any]) -> httpx.Response:
        """The trainer, once it is healthy."""
        path = path.removeprefix(f"/{self.run}")
        if path == "/health":
            if self.statuses:
                del self.statuses[0]
                return httpx.Response(503, json={"detail": "starting"})
            return httpx.Response(200)
        assert request.headers["x-run-id"] == self.run
        if path.startswith("/operations/"):
            name, sent = self.operations[path.removeprefix("/operations/")]
            return done(self.result(name, sent))
        return self.accept(request, path.removeprefix("/"), body)

    def accept(self, request: httpx.Request, name: str, body: dict[str, Any]) -> httpx.Response:
        """Apply an operation once by its key."""
        key = request.headers["idempotency-key"]
        if key not in self.operations:
            self.operations[key] = (name, body)
            self.made[name] += 1
            self.apply(name, body)
        return httpx.Response(202, json={"operation_id": key, "schema_version": 1})

    def apply(self, name: str, body: dict[str, Any]) -> None:
        """What an operation does to the weights."""
        match name:
            case "forward_backward":
                self.gradients.append(digest(body["data"]))
            case "optim_step":
                self.weights = [*self.weights, "+".join(self.gradients)]
                self.gradients, self.steps = [], self.steps + 1
            case "save_state":
                path = f"bt://loops:{self.run}/weights/{body['name']}"
                self.saved[path] = (self.weights, self.steps)
            case "load_state" | "load_state_with_optimizer":
                self.weights, steps = self.saved[body["path"]]
                self.steps = steps if name.endswith("optimizer") else 0
            case _:
                pass

    def result(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """What an operation comes to."""
        match name:
            case "init_trainer_server":
                return {"step": 0, "lora_rank": body["lora_rank"]}
            case "forward" | "forward_backward":
                lengths = [len(row["model_input"]["chunks"][0]["tokens"]) for row in body["data"]]
                outputs = [
                    {"logprobs": {"data": [-1.0] * n, "dtype": "float32", "shape": [n]}}
                    for n in lengths
                ]
                return {"loss": 1.0, "loss_fn_outputs": outputs, "metrics": {}}
            case "optim_step":
                return {"metrics": {"grad_norm": 0.5}}
            case "save_weights_for_sampler":
                path = f"bt://loops:{self.run}/sampler_weights/{body['name']}"
                return {"version": self.steps, "path": path}
            case "save_state":
                path = f"bt://loops:{self.run}/weights/{body['name']}"
                return {"mode": "full", "path": path}
            case "load_state" | "load_state_with_optimizer":
                return {"step": self.steps}
            case "sample":
                return samples(body)
            case _:
                raise AssertionError(name)

    def sampler(self, request: httpx.Request, path: str, body: dict[str, Any]) -> httpx.Response:
        """The sampler; a serverless one queues."""
        if path == "/s/wake":
            self.is_woken = True
            return httpx.Response(202)
        path = path.removeprefix("/s/sync")
        if path.endswith("/cancel"):
            self.made["cancel"] += 1
            return httpx.Response(200)
        if path.startswith("/operations/"):
            name, sent = self.operations[path.removeprefix("/operations/")]
            return done(self.result(name, sent))
        assert path == "/sample"
        if self.is_serverless:
            return self.accept(request, "sample", body)
        version = {"x-trainers-policy-version": request.headers.get("x-min-policy-version", "0")}
        return httpx.Response(200, json=samples(body), headers=version)


def done(result: dict[str, Any]) -> httpx.Response:
    """An ended operation."""
    return httpx.Response(200, json={"status": "done", "result": result})


def samples(body: dict[str, Any]) -> dict[str, Any]:
    """As many completions as were asked for: two tokens, then one, in turn."""
    told = [
        {"tokens": ["token_id:7", "token_id:8"], "token_logprobs": [-0.5, -0.25]},
        {"tokens": ["token_id:7"], "token_logprobs": [-0.5]},
    ]
    choices = [{"finish_reason": "stop", "logprobs": told[i % 2]} for i in range(body["n"])]
    return {"choices": choices}
