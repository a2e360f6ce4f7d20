"""The Loops wire over one worker: a trainer, its sampler and a control plane on one address.

A request that can't be served is refused at once with 422 and `{"detail": ...}`, never with a
plain 400 or 404: clients of this protocol take those for a server that is still starting and
ask again for an hour. The only 404 is that of an operation nobody remembers. Work that was
accepted fails inside its operation. A poll, and a sample that waits for a version, is held for
up to 30 s and then told 408. One run at a time: `init_trainer_server` begins a run and ends the
one before it, whose requests are refused from then on.

Headers: `Idempotency-Key` names an operation, `X-Run-Id` the run, `X-Min-Policy-Version` the
oldest version that may sample; without it the untrained weights do. Unknown headers and keys are
ignored, nothing is unpickled, and no redirect is ever sent.
"""

import hmac
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loops_cookbook.local.answers import refusal
from loops_cookbook.local.control import OPEN_PREFIX, Control
from loops_cookbook.local.errors import BadRequest
from loops_cookbook.local.metrics import Tally, Watched
from loops_cookbook.local.operations import Operations
from loops_cookbook.local.routes import Limits, Trainer
from loops_cookbook.local.samples import Sampler
from loops_cookbook.local.worker import Worker, WorkerDied
from loops_cookbook.services.bodies import WireError

logger = logging.getLogger(__name__)

SCHEMES = (b"api-key", b"bearer")


def create_app(
    worker: Worker,
    operations: Operations,
    *,
    api_key: str | None,
    checkpoints: Path | None = None,
    limits: Limits | None = None,
    on_fault: Callable[[], None] | None = None,
) -> Starlette:
    """The ASGI app; its lifespan runs the worker.

    Args:
        worker: in front of the engine.
        operations: the same that the worker writes to.
        api_key: asked of every request; None asks for none.
        checkpoints: where the engine keeps them; None: it keeps none.
        limits: the server's bounds; None: the usual ones.
        on_fault: told that the worker's own loop has died, so that nothing will be served any more.
    """
    limits = limits or Limits()
    tally = Tally()
    trainer = Trainer(worker, operations, limits, tally)
    sampler = Sampler(worker, trainer, limits, tally)
    control = Control(worker.engine, trainer, checkpoints, limits)
    watched = Watched(worker.engine, tally, keeps_checkpoints=checkpoints is not None)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_work, worker, on_fault)
            yield
            tasks.cancel_scope.cancel()

    app = Starlette(
        routes=[*trainer.routes(), *sampler.routes(), *control.routes(), *watched.routes()],
        middleware=[Middleware(_KeyAsked, api_key=api_key)],
        exception_handlers={
            BadRequest: _refused,
            WireError: _refused,
            HTTPException: _no_route,
            Exception: _broken,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


async def _work(worker: Worker, on_fault: Callable[[], None] | None) -> None:
    """Run the worker; a fault of its own must be told, for nothing else would end by it."""
    try:
        await worker.run()
    except WorkerDied as died:
        logger.critical("%s", died, exc_info=died.__cause__)
        if on_fault is not None:
            on_fault()


class _KeyAsked:
    """Answers 401 to whoever does not bring the key."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and self._key is not None
            and not scope["path"].startswith(OPEN_PREFIX)
        ):
            given: bytes = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            if scheme.lower() not in SCHEMES or not hmac.compare_digest(key, self._key):
                no = refusal(401, "Authorization: send `Api-Key <key>` with this server's key")
                await no(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _refused(_: Request, error: Exception) -> Response:
    return refusal(422, str(error))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        return refusal(422, f"{request.method} {request.url.path} is no route of this server")
    return refusal(error.status_code, error.detail)


async def _broken(_: Request, error: Exception) -> Response:
    return refusal(500, f"a fault of this server: {type(error).__name__}: {error}")
