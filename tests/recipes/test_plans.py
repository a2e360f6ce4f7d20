"""Every recipe is planned by one call, and carried out on every scope by the same launch."""

from pathlib import Path

import pytest
from tests.recipes.notebook import Notebook
from tests.recipes.test_sft import row_of

from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.errors import ConfigError, ServiceError, ServiceRefused, UsageError
from loops_cookbook.recipes.launch import open_service, require_service
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.plans import plan_config
from loops_cookbook.recipes.sft import run_sft
from loops_cookbook.recipes.sft_check import sft_check_report, sft_warnings
from loops_cookbook.recipes.sft_plan import SFTPlan
from loops_cookbook.rundir.layout import RunFolder

pytestmark = pytest.mark.anyio
REMOTE = 'compute={scope="remote", trainer_url="http://gpu:8000"}'
OWN = """
from contextlib import asynccontextmanager

from loops_cookbook.testing import ScriptedService


@asynccontextmanager
async def create(context):
    yield ScriptedService([])


@asynccontextmanager
async def unscored(context):
    service = ScriptedService([])
    service.trainer = Unscored(service.trainer)
    yield service


class Unscored:
    def __init__(self, trainer):
        self.train, self.publish = trainer.train, trainer.publish


@asynccontextmanager
async def faulty(context):
    service = ScriptedService([])
    service.trainer.score = None
    yield service
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_a_config_is_planned_as_its_recipe_says(sft_project: Path) -> None:
    loaded = load_config("train.toml")
    assert isinstance(plan_config(loaded, read_environment(sft_project), {}, None), SFTPlan)


def test_attempts_are_planned_by_the_same_call(project: Path) -> None:
    loaded = load_config("train.toml", ["training.updates=1"])
    assert isinstance(plan_config(loaded, read_environment(project), {}, None), Plan)


def test_rows_for_servers_that_run_already_are_reported_with_their_address(make_sft_plan) -> None:
    plan = make_sft_plan(REMOTE)
    line = "Remote: http://gpu:8000; model models/counting; max_seq_len 64"
    assert sft_check_report(plan, {}).lines[4] == line


def test_rows_for_hosted_loops_need_its_key_and_are_told_so_by_check(make_sft_plan) -> None:
    plan = make_sft_plan(scope="dedicated")
    assert any("`loops run` needs BASETEN_API_KEY" in told for told in sft_warnings(plan, {}))
    with pytest.raises(UsageError, match="hosted Loops needs BASETEN_API_KEY"):
        require_service(plan, {})
    require_service(plan, {"BASETEN_API_KEY": "k"})


@pytest.mark.parametrize(
    "scope", [REMOTE, 'compute.scope="dedicated"', 'compute.scope="mine:create"']
)
def test_random_weights_are_the_embedded_engine_s_alone(
    make_sft_plan, sft_project: Path, scope: str
) -> None:
    (sft_project / "mine.py").write_text(OWN)
    with pytest.raises(ConfigError, match=r"model\.init: found 'random'"):
        make_sft_plan(scope, 'model.init="random"', "model.lora_rank=0")


def test_the_command_line_may_not_mean_servers_that_the_config_does_not_name(make_sft_plan) -> None:
    """It was told as a bug of this package, with a traceback."""
    with pytest.raises(ConfigError, match="--scope: scope 'remote' needs the address"):
        make_sft_plan(scope="remote")


async def test_a_service_of_ones_own_trains_on_rows_and_scores_them(
    make_sft_plan, sft_project: Path
) -> None:
    told = await run_own(make_sft_plan, sft_project, "mine:create")
    assert [row.loss for row in told.evaluations] == [1.0, pytest.approx(1 / 3)]
    assert told.ended[0][0] == "done"


async def test_one_that_cannot_score_is_refused_where_there_are_held_out_rows(
    make_sft_plan, sft_project: Path
) -> None:
    with pytest.raises(ServiceRefused, match=r"data\.held_out: the trainer has no `score`"):
        await run_own(make_sft_plan, sft_project, "mine:unscored")


async def test_one_that_cannot_score_trains_on_rows_all_the_same(
    make_sft_plan, sft_project: Path
) -> None:
    config = sft_project / "train.toml"
    config.write_text(config.read_text().replace('held_out = "held_out.jsonl"', ""))
    told = await run_own(make_sft_plan, sft_project, "mine:unscored")
    assert [row.update for row in told.steps] == [1, 2]


async def test_a_fault_of_its_scoring_is_told_as_its_own(make_sft_plan, sft_project: Path) -> None:
    with pytest.raises(ServiceError, match="mine:faulty: score"):
        await run_own(make_sft_plan, sft_project, "mine:faulty")


async def run_own(make_sft_plan, sft_project: Path, scope: str) -> Notebook:
    """A run on a service of the project's own, opened as a command opens it."""
    (sft_project / "mine.py").write_text(OWN)
    plan, notebook = make_sft_plan(scope=scope), Notebook()
    require_service(plan, {})
    folder = RunFolder(sft_project / "runs" / "r1")
    await run_sft(plan, lambda: open_service(plan, folder, {}), notebook, row_of(plan))
    return notebook
