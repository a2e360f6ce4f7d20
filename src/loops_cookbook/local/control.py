"""The control plane of one engine: sessions, its one trainer, its one sampler, its checkpoints.

Clients of hosted Loops ask it where to train and where to sample; here both are this server. It
presents itself as dedicated capacity, since its samples are answered directly. It makes nothing:
a run begins with `init_trainer_server`, which ends the one before it. What it cannot do (another
model, replicas, a longer window) is refused with 422 and never ignored.

A checkpoint's files are fetched without the key, as from a signed URL: it carries a token that is
good for that one checkpoint while this server runs.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from loops_cookbook.local.answers import json_answer, read_body
from loops_cookbook.local.errors import BadRequest
from loops_cookbook.local.places import Place, State, of_run, read_state, whole
from loops_cookbook.local.routes import Limits, Trainer
from loops_cookbook.local.worker import Engine
from loops_cookbook.services.bodies import read
from loops_cookbook.services.control_bodies import OpenSampler, OpenTrainer, ValidateCheckpoint

DEPLOYMENT = "embedded"
"""The id of the one deployment there is."""
OPEN_PREFIX = "/v1/loops/blobs/"
"""Under it a token in the URL stands for the key."""


class Control:
    """The routes of a control plane.

    Args:
        engine: what it tells of.
        trainer: told with which seed a run shall begin.
        checkpoints: where they are kept; None: there are none.
        limits: the server's bounds.
    """

    def __init__(
        self, engine: Engine, trainer: Trainer, checkpoints: Path | None, limits: Limits
    ) -> None:
        self._engine = engine
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._limits = limits
        self._secret = secrets.token_bytes(32)

    def routes(self) -> list[Route]:
        """Every route of a control plane that this server has."""
        checkpoint = "/v1/loops/checkpoints/{checkpoint_id}"
        return [
            Route("/v1/teams", self._teams, methods=["GET"]),
            Route("/v1/loops/capabilities", self._capabilities, methods=["GET"]),
            Route("/v1/loops/sessions", self._open_session, methods=["POST"]),
            Route("/v1/loops/trainers", self._open_trainer, methods=["POST"]),
            Route("/v1/loops/samplers", self._open_sampler, methods=["POST"]),
            Route("/v1/loops/deployments/{deployment_id}", self._deployment, methods=["GET"]),
            Route(
                "/v1/models/{model_id}/deployments/{deployment_id}",
                self._sampler_status,
                methods=["GET"],
            ),
            Route("/v1/loops/checkpoints", self._list, methods=["GET"]),
            Route("/v1/loops/checkpoints/validate", self._validate, methods=["POST"]),
            Route(f"{checkpoint}/files", self._files, methods=["GET"]),
            Route(f"{checkpoint}/source", self._source, methods=["GET"]),
            Route(f"{OPEN_PREFIX}{{token}}/{{checkpoint_id}}/{{file}}", self._blob),
        ]

    async def _teams(self, _: Request) -> Response:
        return json_answer({"teams": []})

    async def _capabilities(self, _: Request) -> Response:
        model = {
            "model_name": self._engine.model_name,
            "max_context_length": self._engine.max_seq_len,
        }
        return json_answer({"supported_models": [model]})

    async def _open_session(self, _: Request) -> Response:
        return json_answer({"session": {"id": f"session-{secrets.token_hex(8)}"}})

    async def _open_trainer(self, request: Request) -> Response:
        body = read(await read_body(request, self._limits.max_body_bytes), OpenTrainer)
        self._check_model(body.base_model, body.max_seq_len, body.replicas)
        if body.path is not None:
            self._state(Place.parse(body.path))
        if body.base_checkpoint is not None:
            raise BadRequest("base_checkpoint: load it with load_state after the trainer is there")
        if body.reuse_from_run_id or body.reuse_from_session_id:
            raise BadRequest("reuse_from: a new trainer here ends the one before; leave it out")
        run_id = f"run-{secrets.token_hex(8)}"
        if body.seed is not None:
            self._trainer.announce(run_id, body.seed)
        run = {
            "id": run_id,
            "base_model": self._engine.model_name,
            "base_url": _address(request),
            "deployment_id": DEPLOYMENT,
        }
        return json_answer({"run": run})

    async def _open_sampler(self, request: Request) -> Response:
        body = read(await read_body(request, self._limits.max_body_bytes), OpenSampler)
        self._check_model(
            body.base_model or self._engine.model_name, body.max_seq_length, body.num_replicas
        )
        if body.model_path is not None:
            self._state(Place.parse(body.model_path))
        sampler = {
            "id": "sampler-" + (body.run_id or "base"),
            "base_url": _address(request),
            "model_id": DEPLOYMENT,
            "deployment_id": DEPLOYMENT,
        }
        return json_answer({"sampler": sampler})

    async def _deployment(self, request: Request) -> Response:
        _check_deployment(request)
        return json_answer({"deployment": {"status": {"name": "RUNNING"}}})

    async def _sampler_status(self, request: Request) -> Response:
        _check_deployment(request)
        return json_answer({"status": "ACTIVE"})

    async def _list(self, request: Request) -> Response:
        path, run_id = (request.query_params.get(key) for key in ("checkpoint_path", "run_id"))
        if path:
            place = Place.parse(path)
            found = [(place, self._state(place))]
        elif run_id:
            found = of_run(self._root, run_id)
        else:
            raise BadRequest("checkpoints: give run_id or checkpoint_path")
        return json_answer({"checkpoints": [self._told(place, state) for place, state in found]})

    async def _validate(self, request: Request) -> Response:
        body = read(await read_body(request, self._limits.max_body_bytes), ValidateCheckpoint)
        self._state(Place.parse(body.checkpoint_path))
        return json_answer({})

    async def _source(self, request: Request) -> Response:
        self._state(_place_of_id(request.path_params["checkpoint_id"]))
        return json_answer({"source": {"kind": "s3"}})

    async def _files(self, request: Request) -> Response:
        checkpoint_id = request.path_params["checkpoint_id"]
        place = _place_of_id(checkpoint_id)
        self._state(place)
        blobs = f"{_address(request)}{OPEN_PREFIX}{self._token(checkpoint_id)}/{checkpoint_id}"
        files = [
            {
                "url": f"{blobs}/{quote(path.name)}",
                "relative_file_name": path.name,
                "node_rank": 0,
                "size_bytes": path.stat().st_size,
                "last_modified": _time(path.stat().st_mtime),
            }
            for path in self._files_of(place).values()
        ]
        return json_answer(
            {"presigned_urls": files, "next_page_token": None, "total_count": len(files)}
        )

    async def _blob(self, request: Request) -> Response:
        checkpoint_id = request.path_params["checkpoint_id"]
        if not hmac.compare_digest(request.path_params["token"], self._token(checkpoint_id)):
            raise BadRequest("this address is not, or no longer, good: ask for the files again")
        place = _place_of_id(checkpoint_id)
        self._state(place)
        path = self._files_of(place).get(request.path_params["file"])
        if path is None:
            raise BadRequest(f"{place} has no file of that name")
        return FileResponse(path, media_type="application/octet-stream")

    @property
    def _root(self) -> Path:
        if self._checkpoints is None:
            raise BadRequest("this server keeps no checkpoints: start it with a folder for them")
        return self._checkpoints

    def _state(self, place: Place) -> State:
        return read_state(place.folder(self._root))

    def _files_of(self, place: Place) -> Mapping[str, Path]:
        folder = whole(place.folder(self._root))
        return {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}

    def _token(self, checkpoint_id: str) -> str:
        return hmac.new(self._secret, checkpoint_id.encode(), hashlib.sha256).hexdigest()

    def _told(self, place: Place, state: State) -> dict[str, object]:
        files = self._files_of(place).values()
        return {
            "id": _id_of(place),
            "run_id": place.run_id,
            "checkpoint_id": place.name,
            "checkpoint_type": "training" if place.kind == "weights" else "sampler",
            "created_at": _time(state.saved_at),
            "base_model": state.base_model,
            "lora_adapter_config": {"r": state.lora_rank},
            "size_bytes": sum(path.stat().st_size for path in files),
            "sync_status": None,
            "target": "trainer" if place.kind == "weights" else "sampler",
        }

    def _check_model(self, model: str, length: int | None, replicas: int | None) -> None:
        if model != self._engine.model_name:
            raise BadRequest(
                f"model {model!r} is not served here: this engine holds {self._engine.model_name!r}"
            )
        if length is not None and length > self._engine.max_seq_len:
            raise BadRequest(
                f"max_seq_len is {length}, this engine takes {self._engine.max_seq_len}: ask for "
                "less, or serve the model with more"
            )
        if replicas is not None and replicas > 1:
            raise BadRequest(f"{replicas} replicas: this server is one engine, ask for 1")


def _address(request: Request) -> str:
    """This server, as the client called it."""
    return str(request.base_url).rstrip("/")


def _check_deployment(request: Request) -> None:
    for key, value in request.path_params.items():
        if value != DEPLOYMENT:
            raise BadRequest(f"{key} {value!r} is unknown here: {DEPLOYMENT!r} is all there is")


def _id_of(place: Place) -> str:
    return f"{place.run_id}:{place.kind}:{place.name}"


def _place_of_id(checkpoint_id: str) -> Place:
    return Place.parse("bt://loops:" + checkpoint_id.replace(":", "/"))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
