"""The server, asked over its own wire by hand and by our own clients, in virtual time."""

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import anyio
import anyio.lowlevel
import httpx
import numpy as np
import pytest
from starlette.types import ASGIApp
from trio.testing import MockClock

pytest.importorskip("starlette")

from loops_cookbook.errors import ServiceRefused, ServiceUnavailable
from loops_cookbook.learning.datums import Datum
from loops_cookbook.local.answers import OFF_LOADED_BYTES
from loops_cookbook.local.app import create_app
from loops_cookbook.local.errors import BadRequest
from loops_cookbook.local.operations import Operations
from loops_cookbook.local.places import Place
from loops_cookbook.local.requests import (
    Completion,
    LossOutput,
    Row,
    Sampled,
    SampleJob,
    TokenScore,
)
from loops_cookbook.local.routes import MOST_ANNOUNCED, Limits
from loops_cookbook.local.worker import Worker
from loops_cookbook.services.base import AdamParams, LossSpec, SampleParams
from loops_cookbook.services.direct import HttpSampler
from loops_cookbook.services.http import HttpTrainer
from loops_cookbook.services.transport import Patience, open_transport
from loops_cookbook.tokens import ids_of

pytestmark = pytest.mark.anyio

T = TypeVar("T")
MODEL = "Qwen/Tiny"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@dataclass(eq=False)
class Ticket:
    """A job that the engine was asked for."""

    job: SampleJob
    is_left: bool = False

    def leave(self) -> None:
        self.is_left = True


@dataclass
class ScriptedEngine:
    """An engine whose loss is the number of rows and whose completions are given."""

    model_name: str = MODEL
    max_seq_len: int = 32
    vocab_size: int = 50
    lora_rank: int = 0
    step: int = 0
    policy_version: int = 0
    gradients: int = 0
    ids: list[int] = field(default_factory=lambda: [7, 8])
    calls: list[str] = field(default_factory=list[str])
    rows: list[Row] = field(default_factory=list[Row])
    jobs: list[SampleJob] = field(default_factory=list[SampleJob])
    config: Mapping[str, object] | None = None
    waiting: list[Ticket] = field(default_factory=list[Ticket])
    broken: str = ""
    seeds: list[int | None] = field(default_factory=list[int | None])

    def init_trainer(self, lora_rank: int, *, seed: int | None = None) -> None:
        self.calls.append("init_trainer")
        self.seeds.append(seed)
        self.lora_rank, self.step, self.policy_version, self.gradients = lora_rank, 0, 0, 0

    def check_rank(self, lora_rank: int) -> None:
        if lora_rank > 64:
            raise BadRequest(f"lora_rank is {lora_rank}: too much")

    def check_rows(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
    ) -> None:
        if loss == "unknown":
            raise BadRequest("loss 'unknown' is not known")

    def check_job(self, job: SampleJob) -> None:
        if len(job.prompt_ids) >= self.max_seq_len:
            raise BadRequest("prompt is too long")

    def forward(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
    ) -> LossOutput:
        self.calls.append("forward")
        self.rows, self.config = list(rows), config
        metrics = {"skip_token_normalization": 1.0} if config else {}
        logprobs = [np.full(len(row.input_ids), -0.5, np.float32) for row in rows]
        return LossOutput(float(len(rows)), logprobs, metrics)

    def forward_backward(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
    ) -> LossOutput:
        output = self.forward(rows, loss, config)
        self.calls[-1] = "forward_backward"
        if self.broken:
            raise RuntimeError(self.broken)
        self.gradients += 1
        return output

    def optim_step(self, **settings: float) -> dict[str, float]:
        self.calls.append("optim_step")
        if not self.gradients:
            raise BadRequest("no gradients wait")
        self.gradients = 0
        self.step += 1
        return {"learning_rate": settings["learning_rate"]}

    def check_place(self, place: Place) -> None:
        raise BadRequest("this engine keeps no checkpoints")

    def pin(self, place: Place) -> str:
        raise BadRequest("this engine keeps no checkpoints")

    def publish(self) -> int:
        self.calls.append("publish")
        self.policy_version = self.step
        return self.step

    @property
    def is_sampling(self) -> bool:
        return bool(self.waiting)

    def ask(self, job: SampleJob) -> Ticket:
        self.jobs.append(job)
        self.waiting.append(Ticket(job))
        return self.waiting[-1]

    def draw(self) -> list[tuple[Ticket, Sampled | Exception]]:
        ended, self.waiting = [t for t in self.waiting if not t.is_left], []
        if self.broken:
            return [(ticket, RuntimeError(self.broken)) for ticket in ended]
        return [(ticket, self.sampled(ticket.job)) for ticket in ended]

    def sampled(self, job: SampleJob) -> Sampled:
        logprobs = [-1.0] * len(self.ids)
        completions = [Completion(self.ids, logprobs, "stop", "xx")] * job.n
        if job.prompt_logprobs is None:
            return Sampled(completions)
        following = job.prompt_ids[1:]
        return Sampled(completions, [None, *({t: TokenScore(-2.0, 5)} for t in following)])


async def settle() -> None:
    for _ in range(30):
        await anyio.lowlevel.checkpoint()


async def at_once(work: Callable[[], T]) -> T:
    await anyio.lowlevel.checkpoint()
    return work()


@dataclass
class Served:
    """A running server, and a plain client of it."""

    engine: ScriptedEngine
    client: httpx.AsyncClient
    network: httpx.AsyncBaseTransport

    async def post(self, path: str, body: object, key: str = "k", **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(path, json=body, headers={"Idempotency-Key": key, **named})

    async def begin(self, run_id: str | None = "r", key: str = "init") -> httpx.Response:
        return await self.post("/init_trainer_server", init_body(run_id), key)

    async def result(self, key: str) -> dict[str, Any]:
        return (await self.client.get(f"/operations/{quote(key, safe='')}")).json()

    async def announce(self, seed: int) -> str:
        """A run that shall begin with a seed."""
        body = {"base_model": MODEL, "seed": seed}
        return (await self.client.post("/v1/loops/trainers", json=body)).json()["run"]["id"]

    async def train(self, key: str = "u") -> None:
        """One update, published."""
        await self.post("/forward_backward", loss_body(), f"{key}-fb")
        await self.post("/optim_step", step_body(), f"{key}-step")
        await self.post("/save_weights_for_sampler", publish_body(), f"{key}-publish")
        await self.result(f"{key}-publish")


@asynccontextmanager
async def serving(
    engine: ScriptedEngine | None = None,
    *,
    api_key: str | None = None,
    limits: Limits | None = None,
) -> AsyncGenerator[Served]:
    engine = engine or ScriptedEngine()
    operations = Operations()
    worker = Worker(engine, operations, off_load=at_once)
    app = create_app(worker, operations, api_key=api_key, limits=limits)
    network = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=network, base_url="http://engine", timeout=None) as client,
    ):
        yield Served(engine, client, network)


async def raw_request(app: ASGIApp, messages: list[dict[str, Any]]) -> list[Any]:
    """What the app sends to a `POST /sample` whose messages these are; takes those it reads."""
    sent: list[Any] = []

    async def receive() -> Any:
        await anyio.lowlevel.checkpoint()
        return messages.pop(0)

    async def send(message: Any) -> None:
        await anyio.lowlevel.checkpoint()
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/sample", "query_string": b""}
    await app({**scope, "headers": []}, receive, send)
    return sent


def init_body(run_id: str | None = "r", **changes: Any) -> dict[str, Any]:
    body = {"lora_rank": 8, "base_model": MODEL, "seq_id": 1, "run_id": run_id, "model": MODEL}
    return body | changes


def loss_body(**changes: Any) -> dict[str, Any]:
    row = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "loss_fn_inputs": {"mask": {"data": [1, 1], "dtype": "float32", "shape": [2]}},
        "routed_experts_ref": None,
    }
    body = {"data": [row], "loss_fn": "cross_entropy", "loss_fn_config": None, "run_id": "r"}
    return body | {"model": MODEL} | changes


def step_body(**changes: Any) -> dict[str, Any]:
    adam = {"learning_rate": 1e-4, "grad_clip_norm": 0.0}
    return {"adam_params": adam, "seq_id": 3, "run_id": "r", "model": MODEL} | changes


def publish_body(**changes: Any) -> dict[str, Any]:
    body = {"name": "step-1", "run_id": "r", "seq_id": 4, "bump_version": True, "model": MODEL}
    return body | changes


SAMPLE = {"prompt": [1, 2, 3], "n": 2, "logprobs": 0, "max_tokens": 2}


class TestOperations:
    async def test_a_submit_is_accepted_under_its_key(self) -> None:
        async with serving() as served:
            answer = await served.begin(key="8877c5")
        assert answer.status_code == 202
        assert answer.json() == {"operation_id": "8877c5", "schema_version": 1}
        assert answer.headers["location"] == "/operations/8877c5"

    async def test_a_cycle_answers_with_what_the_protocol_says(self) -> None:
        async with serving() as served:
            await served.begin()
            assert (await served.result("init"))["result"] == {"step": 0, "lora_rank": 8}
            await served.train("u")
            assert await served.result("u-fb") == {
                "status": "done",
                "result": {
                    "loss": 1.0,
                    "loss_fn_output_type": "cross_entropy",
                    "metrics": {},
                    "loss_fn_outputs": [
                        {"logprobs": {"data": [-0.5, -0.5], "dtype": "float32", "shape": [2]}}
                    ],
                },
            }
            assert (await served.result("u-step"))["result"] == {"metrics": {"learning_rate": 1e-4}}
            assert (await served.result("u-publish"))["result"] == {
                "version": 1,
                "path": "bt://loops:r/sampler_weights/step-1",
            }
        assert served.engine.calls == ["init_trainer", "forward_backward", "optim_step", "publish"]

    async def test_the_same_key_is_the_same_operation_and_not_run_again(self) -> None:
        async with serving() as served:
            await served.begin()
            await served.post("/forward_backward", loss_body(), "a")
            first = await served.post("/optim_step", step_body(), "b")
            again = await served.post("/optim_step", step_body(), "b")
            assert first.json() == again.json()
            assert (await served.result("b"))["status"] == "done"
        assert served.engine.calls.count("optim_step") == 1

    async def test_forward_leaves_gradients_alone_and_reports_raw_sums(self) -> None:
        async with serving() as served:
            await served.begin()
            config = {"skip_token_normalization": True}
            await served.post("/forward", loss_body(loss_fn_config=config), "f")
            result = (await served.result("f"))["result"]
        assert result["metrics"] == {"skip_token_normalization": 1.0}
        assert served.engine.config == config
        assert served.engine.gradients == 0

    async def test_an_operation_that_fails_says_so_in_its_result(self) -> None:
        async with serving(ScriptedEngine(broken="out of memory")) as served:
            await served.begin()
            answer = await served.post("/forward_backward", loss_body(), "f")
            assert answer.status_code == 202
            assert await served.result("f") == {
                "status": "error",
                "error": "out of memory",
                "error_class": "RuntimeError",
            }

    async def test_a_poll_is_held_and_then_told_to_come_again(self) -> None:
        async def never(work: Callable[[], T]) -> T:
            await anyio.sleep_forever()
            return work()

        operations = Operations()
        worker = Worker(ScriptedEngine(), operations, off_load=never)
        app = create_app(worker, operations, api_key=None)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://e", timeout=None
            ) as client,
        ):
            headers = {"Idempotency-Key": "k"}
            await client.post("/init_trainer_server", json=init_body(), headers=headers)
            started = anyio.current_time()
            answer = await client.get("/operations/k")
        assert answer.status_code == 408
        assert anyio.current_time() - started == 30.0

    async def test_an_unknown_operation_is_the_only_404(self) -> None:
        async with serving() as served:
            answer = await served.client.get("/operations/nobody")
        assert answer.status_code == 404
        assert "unknown" in answer.json()["detail"]

    async def test_an_id_may_hold_slashes_and_spaces(self) -> None:
        async with serving() as served:
            answer = await served.begin(key="a/b c")
            assert answer.headers["location"] == "/operations/a%2Fb%20c"
            assert (await served.client.get(answer.headers["location"])).status_code == 200

    async def test_sequence_numbers_may_have_gaps_and_come_twice(self) -> None:
        async with serving() as served:
            await served.begin()
            for key, seq_id in (("a", 9), ("b", 9), ("c", 1)):
                answer = await served.post("/forward_backward", loss_body(seq_id=seq_id), key)
                assert answer.status_code == 202
                assert (await served.result(key))["status"] == "done"

    async def test_an_operation_that_nobody_polls_runs_all_the_same_and_in_order(self) -> None:
        async with serving() as served:
            await served.begin()
            await served.post("/forward_backward", loss_body(), "a")
            await served.post("/optim_step", step_body(), "b")
            await served.post("/save_weights_for_sampler", publish_body(), "c")
            assert (await served.result("c"))["result"]["version"] == 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "body", "told"),
        [
            ("/forward_backward", loss_body(loss_fn="unknown"), "unknown"),
            ("/forward_backward", loss_body(data=[{}]), "data.0.model_input"),
            ("/forward_backward", loss_body(model="other"), "other"),
            ("/forward", loss_body(top_k_logprobs=3), "top_k_logprobs"),
            ("/optim_step", step_body(adam_params={"learning_rate": "1"}), "learning_rate"),
            ("/optim_step", {"model": MODEL}, "adam_params"),
            ("/save_weights_for_sampler", publish_body(bump_version=False), "no checkpoints"),
            ("/save_weights_for_sampler", publish_body(name="../x"), "name is '../x'"),
            ("/save_state", {"name": "a", "run_id": "r", "model": MODEL}, "no checkpoints"),
            ("/load_state", {"path": "/etc", "run_id": "r", "model": MODEL}, "bt://"),
            ("/init_trainer_server", init_body(base_model="other"), "other"),
            ("/init_trainer_server", init_body(lora_rank=-1), "lora_rank"),
            ("/init_trainer_server", [], "body"),
        ],
    )
    async def test_an_invalid_operation_is_refused_at_once_by_name(
        self, path: str, body: object, told: str
    ) -> None:
        async with serving() as served:
            await served.begin()
            answer = await served.post(path, body)
            assert answer.status_code == 422
            assert told in answer.json()["detail"]
            assert (await served.client.get("/operations/k")).status_code == 404

    @pytest.mark.parametrize("raw", [b"", b"{", b'{"lora_rank":NaN}', b"\xff", b"[" * 50_000])
    async def test_a_body_that_is_no_json_is_refused(self, raw: bytes) -> None:
        async with serving() as served:
            answer = await served.client.post(
                "/init_trainer_server", content=raw, headers={"Idempotency-Key": "k"}
            )
        assert answer.status_code == 422
        assert "JSON" in answer.json()["detail"]

    @pytest.mark.parametrize("key", ["", "k" * 129])
    async def test_an_operation_needs_a_key_of_a_bounded_length(self, key: str) -> None:
        async with serving() as served:
            answer = await served.begin(key=key)
        assert answer.status_code == 422
        assert "Idempotency-Key" in answer.json()["detail"]

    @pytest.mark.parametrize("key", [".", "..", "a/../b", "/a", "a/"])
    async def test_a_key_that_an_address_would_lose_is_refused(self, key: str) -> None:
        """`..` was accepted, and asked for at `/operations/..`, which clients make `/` of."""
        async with serving() as served:
            answer = await served.begin(key=key)
        assert answer.status_code == 422
        assert f"Idempotency-Key is {key!r}" in answer.json()["detail"]

    @pytest.mark.parametrize("rate", [1e9, 1.5])
    async def test_a_learning_rate_that_is_a_slip_is_refused_at_once(self, rate: float) -> None:
        """Any was taken, and the weights were gone by the time that a NaN told."""
        async with serving() as served:
            await served.begin()
            answer = await served.post(
                "/optim_step", step_body(adam_params={"learning_rate": rate})
            )
        assert answer.status_code == 422
        assert f"learning_rate is {rate}: give 0 or more, and at most 1" in answer.json()["detail"]

    async def test_a_rank_that_the_engine_refuses_begins_no_run(self) -> None:
        """Any was taken, and memory ran out in the engine's thread."""
        async with serving() as served:
            await served.begin()
            answer = await served.post("/init_trainer_server", init_body("s", lora_rank=65), "l")
            assert answer.status_code == 422
            assert "lora_rank is 65" in answer.json()["detail"]
            assert (await served.post("/forward", loss_body(), "f")).status_code == 202

    async def test_a_key_cannot_name_two_different_operations(self) -> None:
        async with serving() as served:
            await served.begin(key="k")
            answer = await served.post("/optim_step", step_body(), "k")
        assert answer.status_code == 422
        assert "init_trainer_server" in answer.json()["detail"]

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/nothing"),
            ("POST", "/v1/completions"),
            ("GET", "/sample"),
            ("POST", "/health"),
            ("GET", "/health/"),
            ("POST", "/sample/"),
        ],
    )
    async def test_what_is_no_route_is_refused_and_never_redirected(
        self, method: str, path: str
    ) -> None:
        async with serving() as served:
            answer = await served.client.request(method, path)
        assert answer.status_code == 422
        assert f"{method} {path}" in answer.json()["detail"]

    async def test_a_body_over_the_bound_is_refused_unread(self) -> None:
        part = {"type": "http.request", "body": b"x" * 600, "more_body": True}
        parts = [part] * 4
        operations = Operations()
        worker = Worker(ScriptedEngine(), operations, off_load=at_once)
        limits = Limits(max_body_bytes=1000)
        app = create_app(worker, operations, api_key=None, limits=limits)
        sent = await raw_request(app, parts)
        assert sent[0]["status"] == 413
        assert b"1000 bytes" in sent[1]["body"]
        assert len(parts) == 2

    async def test_a_body_somewhat_over_the_clients_chunk_size_is_taken(self) -> None:
        async with serving() as served:
            await served.begin()
            padding = "x" * (25 * 1024 * 1024)
            answer = await served.post("/optim_step", step_body(padding=padding))
        assert answer.status_code == 202

    @pytest.mark.parametrize("given", [None, "Api-Key wrong", "Api-Key", "s3cret", "Basic s3cret"])
    async def test_without_the_key_nothing_is_served(self, given: str | None) -> None:
        async with serving(api_key="s3cret") as served:
            headers = {} if given is None else {"Authorization": given}
            for path in ("/health", "/nothing"):
                answer = await served.client.get(path, headers=headers)
                assert answer.status_code == 401
                assert "s3cret" not in answer.text

    @pytest.mark.parametrize("scheme", ["Api-Key", "api-key", "Bearer"])
    async def test_with_the_key_it_serves(self, scheme: str) -> None:
        async with serving(api_key="s3cret") as served:
            headers = {"Authorization": f"{scheme} s3cret"}
            assert (await served.client.get("/health", headers=headers)).status_code == 200


class TestLargeBodies:
    """They were read on the event loop, which served nobody meanwhile."""

    @asynccontextmanager
    async def held_back(self) -> AsyncGenerator[tuple[Served, list[anyio.Event]]]:
        """A server whose work off the event loop waits until it is let go."""
        held: list[anyio.Event] = []

        async def later(work: Callable[[], T]) -> T:
            held.append(anyio.Event())
            await held[-1].wait()
            return work()

        operations = Operations()
        worker = Worker(ScriptedEngine(), operations, off_load=later)
        app = create_app(worker, operations, api_key=None)
        network = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=network, base_url="http://engine", timeout=None) as client,
        ):
            yield Served(worker.engine, client, network), held

    async def test_others_are_served_while_one_is_read(self) -> None:
        large = loss_body(padding="x" * OFF_LOADED_BYTES)
        async with self.held_back() as (served, held), anyio.create_task_group() as tasks:
            await served.begin()
            await settle()
            held[0].set()  # the run begins
            tasks.start_soon(served.post, "/forward", large, "large")
            await settle()
            assert (await served.client.get("/health")).status_code == 200
            assert (await served.client.get("/operations/large")).status_code == 404
            held[1].set()
            await settle()
            held[2].set()
            assert (await served.result("large"))["status"] == "done"

    async def test_one_that_is_sent_twice_at_once_runs_once(self) -> None:
        large = loss_body(padding="x" * OFF_LOADED_BYTES)
        async with self.held_back() as (served, held):
            await served.begin()
            await settle()
            held[0].set()
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(served.post, "/forward", large, "large")
                await settle()
                held[2].set(), held[1].set()
            await settle()
            held[3].set()
            assert (await served.result("large"))["status"] == "done"
            assert len(held) == 4
            assert served.engine.calls == ["init_trainer", "forward"]


class TestRuns:
    async def test_a_run_without_a_name_is_a_run(self) -> None:
        async with serving() as served:
            assert (await served.begin(run_id=None)).status_code == 202
            answer = await served.post("/forward_backward", loss_body(run_id=None))
            assert answer.status_code == 202

    async def test_before_a_run_has_begun_nothing_is_trained(self) -> None:
        async with serving() as served:
            answer = await served.post("/forward_backward", loss_body())
        assert answer.status_code == 422
        assert "init_trainer_server" in answer.json()["detail"]

    async def test_a_new_run_ends_the_one_before_it(self) -> None:
        async with serving() as served:
            await served.begin("first", "a")
            await served.begin("second", "b")
            answer = await served.post("/forward_backward", loss_body(run_id="first"))
            assert answer.status_code == 422
            assert "'second'" in answer.json()["detail"]
            sample = await served.post("/sample", SAMPLE, X_Run_Id="first")
            assert sample.status_code == 422

    async def test_beginning_again_resets_the_trainer(self) -> None:
        async with serving() as served:
            await served.begin()
            await served.train()
            assert (await served.client.get("/policy_version")).json()["policy_version"] == 1
            await served.begin(key="again")
            await served.result("again")
            assert (await served.client.get("/policy_version")).json()["policy_version"] == 0

    async def test_a_repeated_beginning_does_not_take_the_run_back(self) -> None:
        async with serving() as served:
            await served.begin("first", "a")
            await served.begin("second", "b")
            await served.begin("first", "a")
            answer = await served.post("/forward_backward", loss_body(run_id="second"))
            assert answer.status_code == 202


class TestHealth:
    async def test_it_is_healthy_for_its_model_and_for_no_other(self) -> None:
        async with serving() as served:
            codes = [
                (await served.client.get(f"/health{query}")).status_code
                for query in ("", f"?base_model={quote(MODEL, safe='')}", "?base_model=other")
            ]
        assert codes == [200, 200, 422]

    async def test_steps_and_the_published_version_are_told_apart(self) -> None:
        engine = ScriptedEngine(step=3, policy_version=2)
        async with serving(engine) as served:
            trained = await served.client.get("/policy_version")
            published = await served.client.get("/trainers_policy_version")
        assert trained.json()["policy_version"] == 3
        assert published.json() == {"policy_version": 2}

    @pytest.mark.parametrize(("version", "parents"), [(0, [None]), (2, [None, MODEL])])
    async def test_the_models_are_the_base_and_what_was_trained(
        self, version: int, parents: list[str | None]
    ) -> None:
        async with serving(ScriptedEngine(policy_version=version)) as served:
            models = (await served.client.get("/v1/models")).json()["data"]
        assert models[0]["id"] == MODEL
        assert [model["parent"] for model in models] == parents


class TestSamples:
    async def test_a_sample_is_answered_in_the_shape_of_the_protocol(self) -> None:
        async with serving(ScriptedEngine(ids=[100, 101])) as served:
            answer = await served.post("/sample", SAMPLE | {"n": 1})
        assert answer.status_code == 200
        assert answer.headers["x-trainers-policy-version"] == "0"
        assert answer.json() == {
            "choices": [
                {
                    "index": 0,
                    "text": "xx",
                    "finish_reason": "stop",
                    "logprobs": {
                        "tokens": ["token_id:100", "token_id:101"],
                        "token_logprobs": [-1.0, -1.0],
                    },
                }
            ]
        }

    async def test_a_completion_that_begins_with_the_prompt_is_told_to_be_no_echo(self) -> None:
        async with serving(ScriptedEngine(ids=[5, 6])) as served:
            answer = await served.post("/sample", SAMPLE | {"prompt": [5]})
        assert [choice["prompt_token_ids"] for choice in answer.json()["choices"]] == [[], []]

    async def test_logprobs_of_the_prompt_stand_with_the_first_completion(self) -> None:
        async with serving() as served:
            answer = await served.post("/sample", SAMPLE | {"prompt_logprobs": 0})
        first, second = answer.json()["choices"]
        told = {"logprob": -2.0, "rank": 5}
        assert first["prompt_logprobs"] == [None, {"2": told}, {"3": told}]
        assert "prompt_logprobs" not in second

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"prompt": ["a"]}, "prompt.0"),
            ({"prompt": [1] * 40}, "too long"),
            ({"n": 0}, "n"),
            ({"temperature": -1}, "temperature"),
            ({"prompt_logprobs": "all"}, "prompt_logprobs"),
            ({"structured_outputs": {}}, "structured_outputs"),
        ],
    )
    async def test_an_invalid_sample_is_refused_by_name(
        self, changes: dict[str, Any], told: str
    ) -> None:
        async with serving() as served:
            answer = await served.post("/sample", SAMPLE | changes)
        assert answer.status_code == 422
        assert told in answer.json()["detail"]
        assert served.engine.jobs == []

    @pytest.mark.parametrize(
        ("header", "value", "told"),
        [
            ("X-Checkpoint-Path", "bt://x", "'bt://x' is no checkpoint of this server"),
            ("X-Checkpoint-Path", "bt://loops:r/weights/a", "keeps no checkpoints"),
            ("X-Min-Policy-Version", "new", "X-Min-Policy-Version"),
        ],
    )
    async def test_a_header_that_cannot_be_followed_is_refused(
        self, header: str, value: str, told: str
    ) -> None:
        async with serving() as served:
            answer = await served.client.post("/sample", json=SAMPLE, headers={header: value})
        assert answer.status_code == 422
        assert told in answer.json()["detail"]

    async def test_without_a_floor_a_run_is_sampled_as_it_began(self) -> None:
        async with serving(ScriptedEngine(policy_version=2)) as served:
            answer = await served.post("/sample", SAMPLE, X_Run_Id="r")
        assert answer.headers["x-trainers-policy-version"] == "0"
        assert served.engine.jobs[0].weights == "start"

    async def test_without_a_floor_the_untrained_weights_serve(self) -> None:
        async with serving(ScriptedEngine(policy_version=2)) as served:
            answer = await served.post("/sample", SAMPLE)
        assert answer.headers["x-trainers-policy-version"] == "0"
        assert served.engine.jobs[0].weights == "base"

    async def test_with_a_floor_the_trained_weights_serve(self) -> None:
        async with serving(ScriptedEngine(policy_version=2)) as served:
            answer = await served.post("/sample", SAMPLE, X_Min_Policy_Version="1")
        assert answer.headers["x-trainers-policy-version"] == "2"
        assert served.engine.jobs[0].weights == "live"

    async def test_a_sample_is_held_until_its_version_is_published(self) -> None:
        async with serving() as served, anyio.create_task_group() as tasks:
            await served.begin()
            answers: list[httpx.Response] = []

            async def sample() -> None:
                answers.append(await served.post("/sample", SAMPLE, X_Min_Policy_Version="1"))

            tasks.start_soon(sample)
            await anyio.sleep(10)
            assert not answers
            await served.train()
        assert answers[0].headers["x-trainers-policy-version"] == "1"

    async def test_a_version_that_does_not_come_is_408_after_half_a_minute(self) -> None:
        async with serving() as served:
            started = anyio.current_time()
            answer = await served.post("/sample", SAMPLE, X_Min_Policy_Version="1")
        assert answer.status_code == 408
        assert anyio.current_time() - started == 30.0
        assert served.engine.jobs == []

    async def test_a_sample_that_fails_is_a_500_that_says_why(self) -> None:
        async with serving(ScriptedEngine(broken="out of memory")) as served:
            answer = await served.post("/sample", SAMPLE)
        assert answer.status_code == 500
        assert answer.json() == {"detail": "RuntimeError: out of memory"}

    async def test_a_client_that_goes_away_takes_its_sample_with_it(self) -> None:
        engine = ScriptedEngine()
        operations = Operations()
        worker = Worker(engine, operations, off_load=at_once)
        app = create_app(worker, operations, api_key=None)
        body = {"type": "http.request", "body": json.dumps(SAMPLE).encode()}
        await raw_request(app, [body, {"type": "http.disconnect"}])  # the worker does not run yet
        async with app.router.lifespan_context(app):
            await anyio.sleep(1)
        assert engine.jobs == []


class TestOurClients:
    @asynccontextmanager
    async def clients(self, served: Served) -> AsyncGenerator[tuple[HttpTrainer, HttpSampler]]:
        async with open_transport(
            "http://engine", patience=Patience(120.0), network=served.network
        ) as transport:
            yield (
                HttpTrainer(transport, model=MODEL, run_id="r"),
                HttpSampler(transport, run_id="r"),
            )

    @staticmethod
    def datum() -> Datum:
        return Datum(
            input_ids=ids_of([1, 2, 3]),
            target_ids=ids_of([2, 3, 4]),
            logprobs=np.array([0, -0.25, -0.5], np.float32),
            advantages=np.array([0, 1, 1], np.float32),
        )

    async def test_a_whole_update_goes_through(self) -> None:
        async with serving() as served, self.clients(served) as (trainer, sampler):
            assert await trainer.init_trainer(8) == 0
            loss = LossSpec("cispo", {"temperature": 0.5})
            batch = [self.datum(), self.datum()]
            result = await trainer.train(batch, loss, AdamParams(1e-3), key="u0")
            version = await trainer.publish(key="u0")
            samples = await sampler.sample(
                ids_of([1, 2]), SampleParams(max_tokens=2), n=3, min_policy_version=version
            )
        assert result.loss == 2 * 2.0
        assert result.metrics == {"learning_rate": 1e-3}
        assert [logprobs.tolist() for logprobs in result.logprobs] == [[-0.5] * 3] * 2
        assert served.engine.config == {"temperature": 0.5}
        assert served.engine.rows[1].logprobs is not None
        assert served.engine.rows[1].logprobs.tolist() == [0, -0.25, -0.5]
        assert version == 1
        assert [tokens.ids.tolist() for tokens in samples] == [[7, 8]] * 3
        assert {tokens.policy_version for tokens in samples} == {1}

    async def test_the_same_update_sent_again_is_not_applied_again(self) -> None:
        async with serving() as served, self.clients(served) as (trainer, _):
            await trainer.init_trainer(8)
            for _ in range(2):
                await trainer.train([self.datum()], LossSpec("cispo"), AdamParams(1e-3), key="u0")
        assert served.engine.step == 1

    async def test_a_failed_update_leaves_no_step_behind(self) -> None:
        engine = ScriptedEngine(broken="out of memory")
        async with serving(engine) as served, self.clients(served) as (trainer, _):
            await trainer.init_trainer(8)
            with pytest.raises(ServiceRefused, match="out of memory"):
                await trainer.train([self.datum()], LossSpec("cispo"), AdamParams(1e-3), key="u0")
            await anyio.sleep(1)
        assert engine.step == 0

    async def test_a_refusal_arrives_as_one(self) -> None:
        async with serving() as served, self.clients(served) as (trainer, sampler):
            with pytest.raises(ServiceRefused, match="init_trainer_server"):
                await trainer.publish(key="u0")
            with pytest.raises(ServiceRefused, match="too long"):
                await sampler.sample(ids_of([1] * 40), SampleParams(max_tokens=1))

    async def test_a_version_that_never_comes_is_unavailable_and_not_stale(self) -> None:
        async with serving() as served, self.clients(served) as (_, sampler):
            with pytest.raises(ServiceUnavailable, match="not published"):
                await sampler.sample(ids_of([1]), SampleParams(max_tokens=1), min_policy_version=7)


class TestSeeds:
    """Those of runs that were announced stayed for as long as the server."""

    async def test_a_run_that_was_replaced_begins_again_with_its_seed(self) -> None:
        """It had the engine's own, and nobody was told."""
        async with serving() as served:
            first, second = await served.announce(1), await served.announce(2)
            for key, run in enumerate((first, first, second, first)):
                await served.begin(run, f"init-{key}")
            await served.result("init-3")
        assert served.engine.seeds == [1, 1, 2, 1]

    async def test_a_seed_that_is_forgotten_for_newer_ones_is_told(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving() as served:
            trained = await served.announce(-1)
            await served.begin(trained, "first")
            runs = [await served.announce(seed) for seed in range(MOST_ANNOUNCED + 1)]
            for key, run in enumerate((trained, runs[0], runs[1], runs[-1])):
                await served.begin(run, f"init-{key}")
            await served.result("init-3")
        assert served.engine.seeds == [-1, -1, None, 1, MOST_ANNOUNCED]
        assert [runs[0] in told for told in caplog.messages] == [True]


@dataclass
class Faulty(ScriptedEngine):
    """An engine that breaks the worker's own loop, and no call of it."""

    is_faulty: bool = False

    @property
    def is_sampling(self) -> bool:
        if self.is_faulty:
            raise RuntimeError("lost count")
        return bool(self.waiting)


class TestDeath:
    """A server whose worker had died said that it was healthy, and held every call for good."""

    async def test_a_server_whose_worker_died_says_so_to_whoever_asks(self) -> None:
        engine = Faulty()
        async with serving(engine) as served:
            assert (await served.client.get("/health")).status_code == 200
            engine.is_faulty = True
            dead = "the engine's worker has died of RuntimeError: lost count"
            for _ in range(2):  # what killed it, and what comes later
                sampled = await served.client.post("/sample", json=SAMPLE)
                assert sampled.status_code == 500
                assert dead in sampled.json()["detail"]
            await served.begin()
            assert dead in (await served.result("init"))["error"]
            health = await served.client.get("/health")
            assert health.status_code == 500
            assert dead in health.json()["detail"]

    async def test_whoever_waits_when_it_dies_is_told(self) -> None:
        engine = Faulty()
        async with serving(engine) as served:
            await served.begin()
            engine.is_faulty = True
            await served.post("/forward", loss_body(), "f")
            assert (await served.result("f"))["error_class"] == "WorkerDied"

    async def test_it_dies_of_a_panic_too_and_tells_whom_the_engine_was_at_work_for(self) -> None:
        """That of a library in Rust is no Exception: it ended the worker, and nobody was told."""

        class Panic(BaseException):
            pass

        class Panicking(ScriptedEngine):
            def forward(
                self, rows: Sequence[Row], loss: str, config: Mapping[str, object] | None
            ) -> LossOutput:
                raise Panic("index out of range")

        async with serving(Panicking()) as served:
            await served.begin()
            await served.post("/forward", loss_body(), "f")
            told = await served.result("f")
            assert told["error_class"] == "WorkerDied"
            assert "has died of Panic: index out of range" in told["error"]

    async def test_whoever_waits_for_a_version_when_it_dies_is_told(self) -> None:
        """It was held for 30 s, and then told to ask again."""
        engine = Faulty()
        async with serving(engine) as served, anyio.create_task_group() as tasks:

            async def ask() -> None:
                began = anyio.current_time()
                sampled = await served.client.post(
                    "/sample", json=SAMPLE, headers={"X-Min-Policy-Version": "1"}
                )
                assert (sampled.status_code, anyio.current_time()) == (500, began + 1)
                assert "the engine's worker has died" in sampled.json()["detail"]

            await served.begin()
            await served.result("init")
            tasks.start_soon(ask)
            await anyio.sleep(1)
            engine.is_faulty = True
            await served.post("/forward", loss_body(), "f")

    async def test_whoever_must_end_the_process_is_told(self) -> None:
        engine, told = Faulty(is_faulty=True), anyio.Event()
        operations = Operations()
        app = create_app(
            Worker(engine, operations, off_load=at_once),
            operations,
            api_key=None,
            on_fault=told.set,
        )
        async with app.router.lifespan_context(app):
            await told.wait()
