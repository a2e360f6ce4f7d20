"""The trainer's client against a scripted server, in virtual time."""

import json
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import numpy as np
import pytest
from trio.testing import MockClock

from loops_cookbook.errors import ServiceRefused
from loops_cookbook.learning.datums import Datum
from loops_cookbook.services.base import AdamParams, LossSpec
from loops_cookbook.services.http import HttpCheckpointer, HttpTrainer, idempotency_key
from loops_cookbook.services.transport import Patience, open_transport
from loops_cookbook.tokens import ids_of

pytestmark = pytest.mark.anyio

LOSS = LossSpec("cispo", {"temperature": 1.0})
ADAM = AdamParams(learning_rate=1e-4)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


def datum(length: int) -> Datum:
    return Datum(
        input_ids=ids_of(range(length)),
        target_ids=ids_of(range(1, length + 1)),
        logprobs=np.zeros(length, np.float32),
        advantages=np.ones(length, np.float32),
    )


@dataclass
class FakeTrainer:
    """Accepts operations and answers their polls; `log` is what arrived, in order."""

    log: list[str] = field(default_factory=list[str])
    requests: list[httpx.Request] = field(default_factory=list[httpx.Request])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    operations: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    results: dict[str, Callable[[dict[str, Any]], httpx.Response]] = field(default_factory=dict)
    """By operation; instead of the usual result."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        path = request.url.path
        if request.method == "POST":
            body = json.loads(request.content)
            self.bodies.append(body)
            self.log.append(f"submit {path[1:]}")
            key = request.headers["idempotency-key"]
            self.operations[key] = (path[1:], body)
            return httpx.Response(202, json={"operation_id": key, "schema_version": 1})
        name, body = self.operations[path.removeprefix("/operations/")]
        self.log.append(f"poll {name}")
        if name in self.results:
            return self.results[name](body)
        return done(self.usual(name, body))

    @staticmethod
    def usual(name: str, body: dict[str, Any]) -> dict[str, Any]:
        match name:
            case "forward" | "forward_backward":
                lengths = [len(row["model_input"]["chunks"][0]["tokens"]) for row in body["data"]]
                outputs = [logprobs([-float(n)] * n) for n in lengths]
                mean = sum(lengths) / max(1, len(lengths))
                return {"loss": mean, "loss_fn_outputs": outputs, "metrics": {"ratio": 1.0}}
            case "optim_step":
                return {"metrics": {"grad_norm": 0.5}}
            case "save_weights_for_sampler":
                return {"version": 3, "path": "bt://x"}
            case _:
                return {"step": 0, "lora_rank": body["lora_rank"]}


def logprobs(values: list[float | None]) -> dict[str, Any]:
    return {"logprobs": {"data": values, "dtype": "float32", "shape": [len(values)]}}


def done(result: dict[str, Any]) -> httpx.Response:
    return httpx.Response(200, json={"status": "done", "result": result})


@asynccontextmanager
async def training(
    server: Callable[[httpx.Request], httpx.Response],
    kind: type[HttpTrainer] = HttpTrainer,
    **options: Any,
) -> AsyncGenerator[HttpTrainer]:
    async with open_transport(
        "http://trainer", patience=Patience(60.0), network=httpx.MockTransport(server)
    ) as transport:
        named = {"run_id": "run_x", "beginning": "b", **options}
        yield kind(transport, model="m", **named)


class TestKeys:
    def test_a_key_is_32_hex_digits_and_follows_from_its_arguments_alone(self) -> None:
        key = idempotency_key("run", "u7", "optim_step")
        assert re.fullmatch("[0-9a-f]{32}", key)
        assert key == idempotency_key("run", "u7", "optim_step", 0)

    def test_beginning_key_operation_and_chunk_each_make_another_key(self) -> None:
        keys = [
            idempotency_key("run", "u7", "forward_backward"),
            idempotency_key("run", "u7", "forward_backward", 1),
            idempotency_key("run", "u7", "optim_step"),
            idempotency_key("run", "u8", "forward_backward"),
            idempotency_key("runu", "7", "forward_backward"),
            idempotency_key("", "u7", "forward_backward"),
        ]
        assert len(set(keys)) == len(keys)


class TestTrainer:
    async def test_both_operations_of_an_update_leave_before_the_first_result(self) -> None:
        server = FakeTrainer()
        async with training(server) as trainer:
            await trainer.train([datum(2)], LOSS, ADAM, key="u0")
        assert server.log == [
            "submit forward_backward",
            "submit optim_step",
            "poll forward_backward",
            "poll optim_step",
        ]

    async def test_operations_are_numbered_from_one_in_the_order_they_leave(self) -> None:
        server = FakeTrainer()
        async with training(server) as trainer:
            await trainer.init_trainer(16)
            await trainer.train([datum(2)], LOSS, ADAM, key="u0")
            await trainer.publish(key="u0")
        assert [body["seq_id"] for body in server.bodies] == [1, 2, 3, 4]
        assert {body["run_id"] for body in server.bodies} == {"run_x"}
        assert {body["model"] for body in server.bodies} == {"m"}

    async def test_every_request_names_the_run_and_only_submits_have_a_key(self) -> None:
        server = FakeTrainer()
        async with training(server) as trainer:
            await trainer.publish(key="u0")
        submit, poll = server.requests
        assert submit.headers["x-run-id"] == poll.headers["x-run-id"] == "run_x"
        assert submit.headers["idempotency-key"] == idempotency_key(
            "b", "u0", "save_weights_for_sampler"
        )
        assert "idempotency-key" not in poll.headers

    async def test_without_a_run_the_header_is_left_out_and_the_body_says_null(self) -> None:
        server = FakeTrainer()
        async with training(server, run_id=None) as trainer:
            await trainer.publish(key="u0")
        assert "x-run-id" not in server.requests[0].headers
        assert server.bodies[0]["run_id"] is None

    async def test_the_loss_is_the_sum_over_the_batch(self) -> None:
        async with training(FakeTrainer()) as trainer:
            result = await trainer.train([datum(2), datum(4)], LOSS, ADAM, key="u0")
        assert result.loss == 6.0
        assert [values.tolist() for values in result.logprobs] == [[-2.0] * 2, [-4.0] * 4]
        assert result.metrics == {"grad_norm": 0.5}

    async def test_a_large_batch_leaves_in_chunks_and_steps_after_all_of_them(self) -> None:
        server = FakeTrainer()
        async with training(server, chunk_bytes=4096 + 700) as trainer:
            batch = [datum(n) for n in (2, 3, 4)]
            result = await trainer.train(batch, LOSS, ADAM, key="u0")
        assert [len(b["data"]) for b in server.bodies if "data" in b] == [2, 1]
        assert result.loss == 9.0
        assert [len(values) for values in result.logprobs] == [2, 3, 4]
        assert server.log.index("submit optim_step") > server.log.index("poll forward_backward")
        assert len(server.operations) == 3

    async def test_no_step_is_taken_when_one_chunk_of_several_failed(self) -> None:
        failed = httpx.Response(200, json={"status": "error", "error": "out of memory"})
        server = FakeTrainer(results={"forward_backward": lambda _: failed})
        async with training(server, chunk_bytes=4096 + 700) as trainer:
            with pytest.raises(ServiceRefused):
                await trainer.train([datum(n) for n in (2, 3, 4)], LOSS, ADAM, key="u0")
        assert "submit optim_step" not in server.log

    async def test_scoring_asks_forward_alone_and_tells_the_logprobs(self) -> None:
        server = FakeTrainer()
        async with training(server, chunk_bytes=4096 + 700) as trainer:
            told = await trainer.score([datum(n) for n in (2, 3, 4)], key="e0")
        assert [len(values) for values in told] == [2, 3, 4]
        assert set(server.log) == {"submit forward", "poll forward"}
        assert {body["loss_fn"] for body in server.bodies} == {"cross_entropy"}
        assert len({r.headers.get("idempotency-key") for r in server.requests[:2]}) == 2

    async def test_publishing_bumps_the_version_and_tells_it(self) -> None:
        server = FakeTrainer()
        async with training(server) as trainer:
            assert await trainer.publish(key="u2") == 3
        assert server.bodies[0]["bump_version"] is True

    async def test_a_version_that_an_update_did_not_raise_is_refused(self) -> None:
        """Samples of weights older than the update would have passed for on-policy ones."""
        server = FakeTrainer()
        async with training(server) as trainer:
            await trainer.train([datum(2)], LOSS, ADAM, key="u0")
            assert await trainer.publish(key="u0") == 3
            assert await trainer.publish(key="again") == 3
            await trainer.train([datum(2)], LOSS, ADAM, key="u1")
            with pytest.raises(ServiceRefused, match="told version 3, where at least 4 is due"):
                await trainer.publish(key="u1")

    async def test_a_load_may_set_the_version_back(self) -> None:
        server = FakeTrainer(results={"load_state": lambda _: done({"step": 0})})
        async with training(server, kind=HttpCheckpointer) as trainer:
            assert await trainer.publish(key="u0") == 3
            assert isinstance(trainer, HttpCheckpointer)
            await trainer.load("bt://x", with_optimizer=False)
            server.results["save_weights_for_sampler"] = lambda _: done({"version": 0})
            assert await trainer.publish(key="u1") == 0

    async def test_a_publish_sent_while_an_update_is_submitted_comes_after_it(self) -> None:
        server = FakeTrainer()
        async with training(server) as trainer, anyio.create_task_group() as tasks:

            async def train() -> None:
                await trainer.train([datum(2)], LOSS, ADAM, key="u0")

            async def publish() -> None:
                await trainer.publish(key="u0")

            tasks.start_soon(train)
            await anyio.lowlevel.checkpoint()
            tasks.start_soon(publish)
        submits = [line for line in server.log if line.startswith("submit")]
        assert submits == [
            "submit forward_backward",
            "submit optim_step",
            "submit save_weights_for_sampler",
        ]

    async def test_an_operation_that_still_runs_is_waited_for(self) -> None:
        answers = iter(
            [
                httpx.Response(408),
                httpx.Response(200, json={"status": "pending"}),
                httpx.Response(502),
                done({"version": 1}),
            ]
        )
        server = FakeTrainer(results={"save_weights_for_sampler": lambda _: next(answers)})
        async with training(server) as trainer:
            assert await trainer.publish(key="u0") == 1
        assert anyio.current_time() == 1.0 + 1.0 + 2.0

    async def test_a_failed_operation_tells_what_the_trainer_said(self) -> None:
        failed = httpx.Response(
            200, json={"status": "error", "error": "loss is NaN", "error_class": "NotFinite"}
        )
        server = FakeTrainer(results={"forward_backward": lambda _: failed})
        async with training(server) as trainer:
            with pytest.raises(
                ServiceRefused, match=r"forward_backward failed .*NotFinite.*loss is NaN"
            ):
                await trainer.train([datum(2)], LOSS, ADAM, key="u0")

    async def test_an_operation_that_the_trainer_forgot_is_not_waited_for(self) -> None:
        forgotten = httpx.Response(404, json={"detail": "unknown operation"})
        server = FakeTrainer(results={"optim_step": lambda _: forgotten})
        async with training(server) as trainer:
            with pytest.raises(ServiceRefused, match="unknown operation"):
                await trainer.train([datum(2)], LOSS, ADAM, key="u0")

    @pytest.mark.parametrize(
        "result",
        [
            {"loss": 0.0},
            {"loss": None, "loss_fn_outputs": [logprobs([0.0, 0.0])]},
            {"loss_fn_outputs": [logprobs([0.0])]},
            {"loss_fn_outputs": [logprobs([0.0, 0.0])] * 2},
            {"loss_fn_outputs": [{}]},
        ],
    )
    async def test_a_result_that_does_not_fit_the_batch_is_refused(
        self, result: dict[str, Any]
    ) -> None:
        server = FakeTrainer(results={"forward_backward": lambda _: done(result)})
        async with training(server) as trainer:
            with pytest.raises(ServiceRefused, match="breaks the Loops protocol"):
                await trainer.train([datum(2)], LOSS, ADAM, key="u0")

    async def test_masked_logprobs_are_nan(self) -> None:
        server = FakeTrainer(
            results={
                "forward_backward": lambda _: done({"loss_fn_outputs": [logprobs([None, -1])]})
            }
        )
        async with training(server) as trainer:
            result = await trainer.train([datum(2)], LOSS, ADAM, key="u0")
        np.testing.assert_array_equal(result.logprobs[0], [np.nan, -1.0])

    async def test_an_acceptance_without_an_id_is_refused(self) -> None:
        async with training(lambda _: httpx.Response(202, json={})) as trainer:
            with pytest.raises(ServiceRefused, match="operation_id"):
                await trainer.publish(key="u0")
