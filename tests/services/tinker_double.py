"""The Tinker SDK and a service behind it, in memory: what it is asked for is kept, faults scripted.

A completion is a token that tells the version it was drawn from, twice in every second one, then
the stop token. Faults are by the name of a call, each used once, in order; `STUCK` never answers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anyio
import httpx

KEY = "tml-of-the-user"
MODEL = "Qwen/Qwen3-8B"
STOP = 2


class APIConnectionError(Exception):
    """As the SDK has it."""


class APIStatusError(Exception):
    """As the SDK has it."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


STUCK = Exception("never raised: the call does not answer")


@dataclass(frozen=True)
class Settings:
    """`AdamParams`, `SamplingParams` and `Datum`: what they were made of."""

    said: Mapping[str, Any]


class Answered:
    """A future of the SDK."""

    def __init__(self, service: "TinkerDouble", call: str, result: object) -> None:
        self._service, self._call, self._result = service, call, result

    async def result_async(self) -> Any:
        await self._service.act(self._call)
        return self._result


@dataclass
class TinkerDouble:
    """The module `tinker`, the service, and what became of both."""

    faults: list[tuple[str, Exception]] = field(default_factory=list[tuple[str, Exception]])
    models: list[str] | None = field(default_factory=lambda: [MODEL])
    is_up: bool = True
    metrics: dict[str, float] | None = field(default_factory=lambda: {"skyrl.ai/grad_norm": 0.5})
    logprob: float = -0.5
    """The trainer's, of every token."""
    completions: list[Any] | None = None
    """In place of the usual."""
    calls: list[str] = field(default_factory=list[str])
    opened: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    batches: list[Any] = field(default_factory=list[Any])
    scored: list[Any] = field(default_factory=list[Any])
    steps: list[Settings] = field(default_factory=list[Settings])
    saved: list[str] = field(default_factory=list[str])
    kept: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """Checkpoints of the service: the steps that made them, by their paths."""
    loaded: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])
    """Each with whether its optimizer was asked for."""
    samples: list[tuple[str, list[int], int, Mapping[str, Any]]] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list[httpx.Request])
    is_closed: bool = False

    __version__ = "0.24.1"
    APIConnectionError = APIConnectionError
    ModelInput = SimpleNamespace(from_ints=list)
    model_id: str = "model-1"

    # --- the module's classes

    def Datum(self, **said: Any) -> Settings:
        return Settings(said)

    def AdamParams(self, **said: Any) -> Settings:
        return Settings(said)

    def SamplingParams(self, **said: Any) -> Settings:
        return Settings(said)

    def ServiceClient(self, metadata: dict[str, str], **said: Any) -> "TinkerDouble":
        self.fault("ServiceClient")
        self.opened.append({"metadata": metadata, **said})
        return self

    # --- the clients, of which there is one each

    @property
    def holder(self) -> Any:
        return SimpleNamespace(close=self.close)

    def close(self) -> None:
        self.is_closed = True

    async def create_lora_training_client_async(self, **said: Any) -> "TinkerDouble":
        await self.act("create_model")
        self.opened.append(said)
        return self

    async def forward_backward_async(
        self, data: list[Any], loss_fn: str, loss_fn_config: dict[str, float] | None
    ) -> Answered:
        self.calls.append("forward_backward")
        self.batches.append((data, loss_fn, loss_fn_config))
        return Answered(self, "forward_backward result", self._passed(data))

    async def forward_async(
        self, data: list[Any], loss_fn: str, loss_fn_config: dict[str, float] | None
    ) -> Answered:
        self.calls.append("forward")
        self.scored.append((data, loss_fn, loss_fn_config))
        return Answered(self, "forward result", self._passed(data))

    def _passed(self, data: list[Any]) -> Any:
        rows = [len(row.said["loss_fn_inputs"]["target_tokens"]) for row in data]
        outputs = [{"logprobs": SimpleNamespace(data=[self.logprob] * n)} for n in rows]
        return SimpleNamespace(loss_fn_outputs=outputs)

    async def optim_step_async(self, adam_params: Settings) -> Answered:
        self.calls.append("optim_step")
        self.steps.append(adam_params)
        return Answered(self, "optim_step result", SimpleNamespace(metrics=self.metrics))

    async def save_weights_for_sampler_async(self, name: str, ttl_seconds: int) -> Answered:
        self.calls.append("save_weights_for_sampler")
        self.saved.append(name)
        return Answered(self, "saved", SimpleNamespace(path=f"tinker://{self.model_id}/{name}"))

    async def save_state_async(
        self, name: str, ttl_seconds: int | None, overwrite: bool
    ) -> Answered:
        self.calls.append("save_state")
        assert ttl_seconds is None
        assert overwrite
        path = f"tinker://{self.model_id}/weights/{name}"
        self.kept[path] = list(zip(self.batches, self.steps, strict=True))
        return Answered(self, "save_state result", SimpleNamespace(path=path))

    async def load_state_async(self, path: str) -> Answered:
        return self._load(path, with_optimizer=False)

    async def load_state_with_optimizer_async(self, path: str) -> Answered:
        return self._load(path, with_optimizer=True)

    def _load(self, path: str, *, with_optimizer: bool) -> Answered:
        self.calls.append("load_state")
        self.loaded.append((path, with_optimizer))
        self.batches, self.steps = map(list, zip(*self.kept[path], strict=True))
        return Answered(self, "load_state result", SimpleNamespace(path=path))

    async def create_sampling_client_async(self, model_path: str) -> "SamplingDouble":
        await self.act("create_sampling_session")
        return SamplingDouble(self, model_path)

    # --- faults

    def fault(self, call: str) -> Exception | None:
        """Raise what is scripted for a call."""
        self.calls.append(call)
        for index, (name, error) in enumerate(self.faults):
            if name == call:
                del self.faults[index]
                if error is STUCK:
                    return error
                raise error
        return None

    async def act(self, call: str) -> None:
        """Answer, or do as is scripted."""
        await anyio.sleep(1)
        if self.fault(call) is STUCK:
            await anyio.sleep_forever()

    # --- the requests that are not the SDK's

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if not self.is_up:
            raise httpx.ConnectError("connection refused")
        self.requests.append(request)
        path = request.url.path
        if request.headers["x-api-key"] != KEY:
            return httpx.Response(401, json={"detail": f"no: {request.headers['x-api-key']}"})
        if path.endswith("/get_server_capabilities"):
            if self.models is None:
                return httpx.Response(404)
            names = [{"model_name": name} for name in self.models]
            return httpx.Response(200, json={"supported_models": names})
        return httpx.Response(200, json={"status": "ok"})

    @property
    def unloaded(self) -> list[str]:
        """The adapters that were let go."""
        sent = [r for r in self.requests if r.url.path.endswith("/api/v1/unload_model")]
        return [json.loads(request.content)["model_id"] for request in sent]


@dataclass
class SamplingDouble:
    """Draws from one set of weights."""

    service: TinkerDouble
    path: str

    async def sample_async(self, prompt: list[int], num_samples: int, params: Settings) -> Any:
        self.service.samples.append((self.path, prompt, num_samples, params.said))
        await self.service.act("asample")
        version = int(self.path.rpartition("-v")[2])
        usual = [_usual(version, place) for place in range(num_samples)]
        return SimpleNamespace(sequences=self.service.completions or usual)


def _usual(version: int, place: int) -> Any:
    said = [10 + version] * (1 + place % 2)
    return sequence([*said, STOP], [-0.5] * len(said) + [-0.25])


def sequence(tokens: list[int], logprobs: list[float] | None, stop: str = "stop") -> Any:
    """One completion."""
    return SimpleNamespace(tokens=tokens, logprobs=logprobs, stop_reason=stop)
