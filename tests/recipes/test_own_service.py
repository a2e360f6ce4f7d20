"""A service of the user's own: named by the config, told in the report, blamed for its faults."""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest

from loops_cookbook.errors import (
    ConfigError,
    EpisodeError,
    RunStopped,
    ServiceError,
    ServiceRefused,
)
from loops_cookbook.learning.datums import Datum
from loops_cookbook.recipes.check import check_report, warnings_of
from loops_cookbook.recipes.launch import open_service, require_service
from loops_cookbook.recipes.own_service import OwnService, open_own_service
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.services.base import (
    AdamParams,
    LossSpec,
    SampleParams,
    ServiceContext,
    StepResult,
)
from loops_cookbook.testing import RecordingTrainer, ScriptedService
from loops_cookbook.tokens import ids_of

pytestmark = pytest.mark.anyio

CODE = """
from contextlib import asynccontextmanager

from pydantic import BaseModel

from loops_cookbook.testing import ScriptedService


class Options(BaseModel):
    address: str


class Create:
    options_model = Options

    @asynccontextmanager
    async def __call__(self, context):
        service = ScriptedService(["a"])
        service.given = context
        yield service


create = Create()
plain = lambda context: None
"""
OWN = 'compute={scope="mine:create", options={address="here"}}'
CONTEXT = ServiceContext("run", Path("run"), "m", None, 64, 8, 8.0, 0, None)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def mine(project: Path) -> None:
    (project / "mine.py").write_text(CODE)


def test_the_report_names_the_service(make_plan) -> None:
    plan = make_plan(OWN)
    assert check_report(plan, {}).lines[4] == "Service: mine:create; model a/policy; max_seq_len 64"
    assert not any("Loops" in warning for warning in warnings_of(plan, {}))


def test_its_trainer_may_not_know_of_the_temperature(make_plan) -> None:
    plan = make_plan(OWN, "sampling.temperature=0.6")
    assert any(w.startswith("sampling.temperature = 0.6: ") for w in warnings_of(plan, {}))


def test_it_may_train_every_weight(make_plan) -> None:
    assert make_plan(OWN, "model.lora_rank=0").own_service is not None


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (('compute.scope="none:create"',), EpisodeError, "compute.scope: no module 'none'"),
        (('compute.scope="mine:creat"',), EpisodeError, "did you mean create?"),
        (('compute.scope="mine:create"',), ConfigError, "compute.options.address: missing"),
        (('compute={scope="mine:plain", options={a=1}}',), ConfigError, "takes no options"),
        (("compute.options={a=1}",), ConfigError, "only a service of your own takes options"),
        (('compute.scope="mine:Options"', "model.seed=-1"), ConfigError, "model.seed"),
    ],
)
def test_what_cannot_stand_is_refused_before_a_run(
    make_plan, settings: tuple[str, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_plan(*settings)


def test_a_scope_of_the_command_line_is_told_as_such(make_plan) -> None:
    with pytest.raises(EpisodeError, match="--scope: no module 'none'"):
        make_plan(scope="none:create")


async def test_a_run_opens_it_with_what_the_config_says(runnable, project: Path) -> None:
    plan = runnable(OWN, "model.seed=7")
    require_service(plan, {})
    async with open_service(plan, RunFolder(project / "runs" / "r1"), {}) as service:
        sampler: Any = service.sampler
        assert await sampler.sample(*asked()) is not None
        assert service.description == {"service": "scripted"}


async def test_the_factory_is_given_a_context(runnable, project: Path) -> None:
    given: list[ServiceContext] = []
    plan = runnable(OWN, "model.seed=7", "model.lora_rank=4")
    assert plan.own_service is not None

    def kept(context: ServiceContext) -> Any:
        given.append(context)
        return ScriptedService([])()

    own = OwnService("mine:create", kept, plan.own_service.options)
    folder = RunFolder(project / "runs" / "r1")
    async with open_service(replace(plan, own_service=own), folder, {}):
        pass
    (context,) = given
    assert (context.run_id, context.model, context.max_seq_len) == ("r1", "a/policy", 64)
    assert (context.seed, context.lora_rank) == (7, 4)
    options: Any = context.options
    assert options.address == "here"


def asked() -> tuple[Any, Any]:
    return ids_of([1]), SampleParams(max_tokens=4)


def own(factory: Any) -> OwnService:
    return OwnService("mine:create", factory, None)


async def test_a_factory_that_opens_nothing_is_told_what_to_return() -> None:
    with pytest.raises(EpisodeError, match="'mine:create' returned null; return an async context"):
        async with open_own_service(own(lambda _: None), CONTEXT):
            pass


async def test_what_is_no_service_is_told_by_what_it_lacks() -> None:
    class Half:
        async def __aenter__(self) -> Any:
            return SimpleNamespace(trainer=SimpleNamespace(train=None), sampler=None)

        async def __aexit__(self, *exc: object) -> None: ...

    with pytest.raises(EpisodeError, match=r"opened has no trainer\.publish; give it what"):
        async with open_own_service(own(lambda _: Half()), CONTEXT):
            pass


@pytest.mark.parametrize("error", [KeyError("gpu"), SystemExit("gpu")], ids=repr)
@pytest.mark.parametrize("where", ["factory", "enter", "exit"])
async def test_a_fault_of_its_life_is_told_as_its_own(where: str, error: BaseException) -> None:
    """It was told as a bug of this package, with a traceback."""

    class Faulty:
        async def __aenter__(self) -> Any:
            if where == "enter":
                raise error
            return ScriptedService([])

        async def __aexit__(self, *exc: object) -> None:
            if where == "exit":
                raise error

    def create(_: ServiceContext) -> Any:
        if where == "factory":
            raise error
        return Faulty()

    with pytest.raises(
        ServiceError, match=rf"mine:create: \w+: .*{type(error).__name__}.*gpu.* \(.*test_own_serv"
    ):
        async with open_own_service(own(create), CONTEXT):
            pass


@pytest.mark.parametrize(
    ("fault", "told", "words"),
    [
        (ZeroDivisionError("no tokens"), ServiceError, "mine:create: train: ZeroDivisionError: no"),
        (ServiceRefused("too long"), ServiceRefused, "^too long$"),
        (asyncio.CancelledError(), ServiceError, "mine:create: train: StrayCancellation: "),
        (SystemExit(0), ServiceError, r"mine:create: train: StrayExit: SystemExit\(0\) was"),
    ],
)
async def test_a_fault_of_its_trainer_is_told_as_its_own_and_a_service_error_passes(
    fault: Any, told: type[Exception], words: str
) -> None:
    """A cancelled future that it awaited ended the run as if by a signal."""
    service = ScriptedService([], RecordingTrainer(failures={0: fault}))
    async with open_own_service(own(lambda _: service()), CONTEXT) as opened:
        with pytest.raises(told, match=words):
            await opened.trainer.train([], LossSpec("cispo"), AdamParams(1e-3), key="update-1")
        assert await opened.trainer.publish(key="update-1") == 1


DATUM = Datum(ids_of([1, 2]), ids_of([2, 3]), weights=np.ones(2, np.float32))
ROWS = (np.zeros(2, np.float32),)


class Wrong(RecordingTrainer):
    """Returns what it was made with."""

    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.returned = returned

    async def train(self, *_: Any, **__: Any) -> Any:
        return self.returned

    publish = score = save = load = train


@pytest.mark.parametrize(
    ("what", "returned", "words"),
    [
        ("train", None, "train returned null; return a value of type StepResult"),
        ("train", StepResult(0.0, (), {}), "train returned logprobs that do not fit the batch"),
        ("train", StepResult(0.0, (ROWS[0][:1],), {}), "logprobs that do not fit the batch"),
        ("train", StepResult(0.0, ROWS[0].tolist(), {}), "logprobs that do not fit the batch"),
        ("publish", "1", "publish returned '1'; return a value of type int"),
        ("score", None, "score returned logprobs that do not fit the batch"),
        ("save", None, "save returned null; return a value of type str"),
        ("load", None, "load returned null; return a value of type int"),
    ],
)
async def test_what_its_trainer_should_not_return_is_told_as_its_own(
    what: str, returned: Any, words: str
) -> None:
    """It was a `TypeError` of ours later on, told as a bug of this package."""
    service = ScriptedService([], Wrong(returned))
    async with open_own_service(own(lambda _: service()), CONTEXT) as opened:
        trainer: Any = opened.trainer
        calls = {
            "train": lambda: trainer.train(
                [DATUM], LossSpec("cispo"), AdamParams(1e-3), key="update-1"
            ),
            "publish": lambda: trainer.publish(key="update-1"),
            "score": lambda: trainer.score([DATUM], key="look-1"),
            "save": lambda: trainer.save("update-1"),
            "load": lambda: trainer.load("there", with_optimizer=True),
        }
        with pytest.raises(ServiceError, match=f"^compute.scope: mine:create: .*{words}"):
            await calls[what]()


async def test_a_loss_that_is_not_finite_ends_the_update() -> None:
    """A run whose trainer had come to NaN went on to its end, and was done."""

    class Spoilt(RecordingTrainer):
        async def train(self, *_: Any, **__: Any) -> StepResult:
            return StepResult(math.nan, ROWS, {})

    service = ScriptedService([], Spoilt())
    async with open_own_service(own(lambda _: service()), CONTEXT) as opened:
        with pytest.raises(ServiceError, match="a trainer came to a loss of nan"):
            await opened.trainer.train([DATUM], LossSpec("cispo"), AdamParams(1e-3), key="update-1")


async def test_a_sampler_that_returns_nothing_is_refused() -> None:
    class Silent(ScriptedService):
        async def sample(self, *_: Any, **__: Any) -> Any:
            return None

    silent: Any = Silent([])
    silent.sampler = silent
    async with open_own_service(own(lambda _: silent()), CONTEXT) as opened:
        ids, params = asked()
        with pytest.raises(ServiceRefused, match="a sampler returned null: 1 completions are due"):
            await opened.sampler.sample(ids, params)


async def test_an_error_of_the_run_reaches_the_service_and_goes_on() -> None:
    seen: list[object] = []

    class Watching:
        async def __aenter__(self) -> Any:
            return ScriptedService([])

        async def __aexit__(self, *exc: object) -> None:
            seen.append(exc[0])

    with pytest.raises(ValueError, match="of the run"):
        async with open_own_service(own(lambda _: Watching()), CONTEXT):
            raise ValueError("of the run")
    assert seen == [ValueError]


@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError])
async def test_a_service_that_swallows_what_ends_the_run_does_not_make_it_a_success(
    kind: type[BaseException],
) -> None:
    """The run was told as done, with the exit status of one."""

    @asynccontextmanager
    async def create(_: ServiceContext) -> AsyncGenerator[Any]:
        with suppress(BaseException):
            yield ScriptedService([])

    with pytest.raises(kind, match="of the run"):
        async with open_own_service(own(create), CONTEXT):
            raise kind("of the run")


async def test_a_service_that_cannot_be_closed_does_not_hide_what_ended_the_run(caplog) -> None:
    """Its own fault took the place of the run's, and was told as a bug of this package."""

    @asynccontextmanager
    async def create(_: ServiceContext) -> AsyncGenerator[Any]:
        try:
            yield ScriptedService([])
        finally:
            raise KeyError("gpu")

    with pytest.raises(RunStopped, match="of the run"):
        async with open_own_service(own(create), CONTEXT):
            raise RunStopped("of the run")
    assert "mine:create: closing: KeyError: 'gpu' (" in caplog.text


async def test_a_service_whose_own_task_ends_the_run_is_told_as_the_one_at_fault() -> None:
    """What its task raised came out in a group, as a bug of this package."""

    async def watching() -> None:
        raise KeyError("gpu")

    @asynccontextmanager
    async def create(_: ServiceContext) -> AsyncGenerator[Any]:
        async with anyio.create_task_group() as group:
            group.start_soon(watching)
            yield ScriptedService([])

    with pytest.raises(ServiceError, match=r"mine:create: closing: KeyError: 'gpu' \(.*test_own"):
        async with open_own_service(own(create), CONTEXT):
            await anyio.sleep(1)
