"""The control plane and its checkpoints, over the real engine and the wire."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

pytest.importorskip("torch")

from safetensors.torch import load

from loops_cookbook.local.app import create_app
from loops_cookbook.local.engine import Engine
from loops_cookbook.local.operations import Operations
from loops_cookbook.local.worker import Worker

pytestmark = [pytest.mark.anyio, pytest.mark.torch]

MakeEngine = Callable[..., Engine]
PROMPT = {"prompt": [3, 4, 5], "max_tokens": 3, "temperature": 0.0}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Client:
    """A plain client of a served engine."""

    http: httpx.AsyncClient
    run_id: str = ""
    keys: int = 0

    async def open(self, path: str, /, **body: Any) -> dict[str, Any]:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def operate(self, name: str, /, **body: Any) -> dict[str, Any]:
        """The ended operation."""
        self.keys += 1
        key = f"k{self.keys}"
        body = {"run_id": self.run_id, "model": "tiny", **body}
        answer = await self.http.post(f"/{name}", json=body, headers={"Idempotency-Key": key})
        assert answer.status_code == 202, answer.text
        return (await self.http.get(f"/operations/{key}")).json()

    async def result(self, name: str, /, **body: Any) -> dict[str, Any]:
        ended = await self.operate(name, **body)
        assert ended["status"] == "done", ended
        return ended["result"]

    async def begin(self, **settings: Any) -> None:
        run = (await self.open("/v1/loops/trainers", base_model="tiny", **settings))["run"]
        self.run_id = run["id"]
        await self.result("init_trainer_server", lora_rank=4, base_model="tiny")

    async def teach(self) -> None:
        row = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [4, 5, 6], "dtype": "int64", "shape": [3]}
            },
        }
        await self.result("forward_backward", data=[row], loss_fn="cross_entropy")
        await self.result("optim_step", adam_params={"learning_rate": 0.1})

    async def sampled(self, **headers: str) -> list[float]:
        """Greedy logprobs, a fingerprint of the weights."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await self.http.post("/sample", json=PROMPT, headers=named)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["logprobs"]["token_logprobs"]


@asynccontextmanager
async def serving(
    engine: Engine, checkpoints: Path, key: str | None = None
) -> AsyncGenerator[Client]:
    operations = Operations()
    app = create_app(Worker(engine, operations), operations, api_key=key, checkpoints=checkpoints)
    headers = {} if key is None else {"Authorization": f"Api-Key {key}"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://engine", headers=headers
        ) as client,
    ):
        yield Client(client)


@pytest.fixture
def engine(make_engine: MakeEngine, tmp_path: Path) -> Engine:
    return make_engine(lora_rank=4, checkpoints=tmp_path)


async def test_a_client_of_the_control_plane_is_sent_to_this_server(
    engine: Engine, tmp_path: Path
) -> None:
    async with serving(engine, tmp_path) as client:
        assert (await client.open("/v1/loops/sessions"))["session"]["id"]
        body = {"base_model": "tiny", "lora_rank": 4, "availability_model": "dedicated"}
        run = (await client.open("/v1/loops/trainers", **body))["run"]
        assert (run["base_url"], run["base_model"]) == ("http://engine", "tiny")
        sampler = (await client.open("/v1/loops/samplers", run_id=run["id"]))["sampler"]
        assert sampler["base_url"] == "http://engine"
        deployment = await client.http.get(f"/v1/loops/deployments/{run['deployment_id']}")
        assert deployment.json() == {"deployment": {"status": {"name": "RUNNING"}}}
        path = f"/v1/models/{sampler['model_id']}/deployments/{sampler['deployment_id']}"
        assert (await client.http.get(path)).json() == {"status": "ACTIVE"}
        told = (await client.http.get("/v1/loops/capabilities")).json()
        assert told == {"supported_models": [{"model_name": "tiny", "max_context_length": 32}]}


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("trainers", {"base_model": "other"}, "'other' is not served here"),
        ("trainers", {"base_model": "tiny", "replicas": 2}, "2 replicas"),
        ("trainers", {"base_model": "tiny", "max_seq_len": 64}, "max_seq_len is 64"),
        ("trainers", {"base_model": "tiny", "reuse_from_run_id": "r"}, "reuse_from"),
        ("trainers", {"base_model": "tiny", "base_checkpoint": "bt://x"}, "base_checkpoint"),
        ("trainers", {"base_model": "tiny", "path": "bt://loops:r/weights/no"}, "no checkpoint"),
        ("samplers", {"base_model": "tiny", "max_seq_length": 64}, "max_seq_len is 64"),
        ("samplers", {"model_path": "bt://loops:r/weights/../x"}, "no checkpoint of this server"),
    ],
)
async def test_what_this_server_cannot_do_is_refused_and_never_ignored(
    engine: Engine, tmp_path: Path, path: str, body: dict[str, Any], why: str
) -> None:
    async with serving(engine, tmp_path) as client:
        answer = await client.http.post(f"/v1/loops/{path}", json=body)
    assert answer.status_code == 422
    assert why in answer.json()["detail"]


async def test_a_run_begins_with_the_seed_that_it_was_opened_with(
    engine: Engine, tmp_path: Path
) -> None:
    async with serving(engine, tmp_path) as client:
        trained: list[list[float]] = []
        for seed in (1, 2, 1):
            await client.begin(seed=seed)
            await client.teach()
            await client.result("save_weights_for_sampler", name="s", bump_version=True)
            trained.append(await client.sampled(X_Min_Policy_Version="1"))
    assert trained[0] == trained[2] != trained[1]


async def test_a_checkpoint_is_saved_listed_loaded_and_sampled(
    engine: Engine, tmp_path: Path
) -> None:
    async with serving(engine, tmp_path) as client:
        await client.begin()
        untrained = await client.sampled()
        await client.teach()
        saved = await client.result("save_state", name="ck", ttl_seconds=None)
        assert saved == {"mode": "full", "path": f"bt://loops:{client.run_id}/weights/ck"}
        for_sampler = await client.result("save_weights_for_sampler", name="w", bump_version=False)
        assert for_sampler["version"] == 0
        pinned = await client.sampled(X_Checkpoint_Path=for_sampler["path"])
        assert pinned != pytest.approx(untrained, abs=1e-3)
        assert await client.sampled() == pytest.approx(untrained, abs=1e-5)

        query = f"run_id={client.run_id}"
        listed = (await client.http.get(f"/v1/loops/checkpoints?{query}")).json()["checkpoints"]
        assert [(each["checkpoint_id"], each["target"]) for each in listed] == [
            ("ck", "trainer"), ("w", "sampler")
        ]  # fmt: skip
        query = f"checkpoint_path={quote(saved['path'], safe='')}"
        (one,) = (await client.http.get(f"/v1/loops/checkpoints?{query}")).json()["checkpoints"]
        assert one == listed[0]

        path = saved["path"]
        await client.begin(path=path)
        assert await client.result("load_state_with_optimizer", path=path) == {"step": 1}
        assert await client.sampled(X_Min_Policy_Version="1") == pytest.approx(pinned, abs=1e-5)
        assert await client.result("load_state", path=path) == {"step": 0}
        run = {"X_Run_Id": client.run_id}
        assert await client.sampled(**run) == pytest.approx(pinned, abs=1e-5)
        assert await client.sampled() == pytest.approx(untrained, abs=1e-5)


async def test_a_pinned_checkpoint_is_served_until_the_policy_is_at_the_version_asked_for(
    engine: Engine, tmp_path: Path
) -> None:
    """A client that pins a checkpoint sends the next version as its floor; it waited for ever."""
    async with serving(engine, tmp_path) as client:
        await client.begin()
        body = {"name": "w", "bump_version": False}
        path = (await client.result("save_weights_for_sampler", **body))["path"]
        headers = {"X-Checkpoint-Path": path, "X-Min-Policy-Version": "1"}
        pinned = await client.http.post("/sample", json=PROMPT, headers=headers)
        assert pinned.status_code == 200
        assert "x-trainers-policy-version" not in pinned.headers
        await client.teach()
        await client.result("save_weights_for_sampler", name="next", bump_version=True)
        live = await client.http.post("/sample", json=PROMPT, headers=headers)
        assert live.headers["x-trainers-policy-version"] == "1"


async def test_files_are_fetched_without_the_key_by_the_address_that_was_told(
    engine: Engine, tmp_path: Path
) -> None:
    async with serving(engine, tmp_path, key="secret") as client:
        await client.begin()
        await client.result("save_state", name="ck")
        checkpoint = f"/v1/loops/checkpoints/{client.run_id}:weights:ck"
        source = await client.http.get(f"{checkpoint}/source")
        assert source.json() == {"source": {"kind": "s3"}}
        told = (await client.http.get(f"{checkpoint}/files?page_size=1000&page_token=0")).json()
        assert told["next_page_token"] is None
        urls = {each["relative_file_name"]: each["url"] for each in told["presigned_urls"]}
        plain = {"Authorization": ""}
        fetched = await client.http.get(urls["adapter_model.safetensors"], headers=plain)
        assert load(fetched.content)
        wrong = urls["state.json"].replace(":weights:ck", ":weights:other")
        assert (await client.http.get(wrong, headers=plain)).status_code == 422
        assert (await client.http.get(f"{checkpoint}/files", headers=plain)).status_code == 401


async def test_a_checkpoint_that_is_not_there_is_refused_at_once(
    engine: Engine, tmp_path: Path
) -> None:
    async with serving(engine, tmp_path) as client:
        await client.begin()
        headers = {"X-Checkpoint-Path": "bt://loops:r/sampler_weights/no"}
        answer = await client.http.post("/sample", json=PROMPT, headers=headers)
        assert answer.status_code == 422
        ended = await client.operate("load_state", path="bt://loops:r/weights/no")
    assert ended["status"] == "error"
    assert "no checkpoint" in ended["error"]
