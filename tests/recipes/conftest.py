"""A project in a folder of its own: an Episode, tasks, a config; and a plan of it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.config.rl import RLConfig
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.recipes.plan import Plan, plan_run
from loops_cookbook.recipes.sft_plan import SFTPlan, plan_sft
from loops_cookbook.testing import PlainRenderer

EPISODE = """
from pydantic import BaseModel

from loops_cookbook.episodes import Episode, Grading, Sampling


class Word(BaseModel):
    name: str
    word: str


class Spell(Episode[Word, None]):
    async def run(self, sample: Sampling) -> dict[str, bool]:
        reply = await sample.model.conversation().generate(
            [{"role": "user", "content": self.task.value.word}]
        )
        self.said = reply.content
        return {"long": len(reply.content or "") > 3}

    async def grade(self, grading: Grading) -> float:
        return float(self.said == self.task.value.word)
"""

TASKS = "\n".join(f'{{"name": "{w}", "word": "{w}"}}' for w in ("ant", "bee", "cat", "dog")) + "\n"

CONFIG = """
recipe = "rl"

[model]
name = "a/policy"
max_seq_len = 64

[episode]
class = "spelling:Spell"
tasks = "tasks.jsonl"

[training]
groups_per_update = 2
group_size = 4

[sampling]
max_tokens = 8

[output]
output_dir = "runs/spelling"
"""

MakePlan = Callable[..., Plan]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a small project, which is also the working directory."""
    (tmp_path / "spelling.py").write_text(EPISODE)
    (tmp_path / "tasks.jsonl").write_text(TASKS)
    (tmp_path / "train.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("BASETEN_API_KEY", "BASETEN_LOOPS_SCOPE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def make_plan(project: Path) -> MakePlan:
    """Plans the project, with overrides, an environment and a scope."""

    def make(
        *overrides: str, values: Mapping[str, str] | None = None, scope: str | None = None
    ) -> Plan:
        length = () if any("epochs" in o for o in overrides) else ("training.updates=3",)
        loaded = load_config("train.toml", [*length, *overrides]).of_recipe(RLConfig)
        assert loaded is not None
        return plan_run(loaded, read_environment(loaded.directory), values or {}, scope)

    return make


@pytest.fixture
def runnable(make_plan: MakePlan) -> MakePlan:
    """As `make_plan`, with a renderer that needs no download."""

    def make(*overrides: str) -> Plan:
        plan = make_plan(*overrides)
        return replace(plan, detection=replace(plan.detection, renderer=PlainRenderer()))

    return make


SFT_CONFIG = """
recipe = "sft"

[model]
name = "models/counting"
max_seq_len = 64

[data]
train = "train.jsonl"
held_out = "held_out.jsonl"

[training]
batch_size = 2
learning_rate = 1.0
"""

MakeSFTPlan = Callable[..., SFTPlan]


def sft_line(orders: str, answer: str) -> str:
    """A row about some orders, as the counting model reads them."""
    said = [{"role": "user", "content": orders}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": said}) + "\n"


@pytest.fixture
def sft_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a small SFT project, which is also the working directory."""
    rows = [("paid", "1"), ("paid, unpaid", "1"), ("paid, paid, paid, shipped", "3")]
    (tmp_path / "train.jsonl").write_text("".join(sft_line(*row) for row in rows))
    held_out = [("shipped", "0"), ("paid, shipped", "1")]
    (tmp_path / "held_out.jsonl").write_text("".join(sft_line(*row) for row in held_out))
    (tmp_path / "train.toml").write_text(SFT_CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("BASETEN_API_KEY", "BASETEN_LOOPS_SCOPE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def make_sft_plan(sft_project: Path) -> MakeSFTPlan:
    """Plans the SFT project, with overrides, an environment and a scope."""

    def make(
        *overrides: str, values: Mapping[str, str] | None = None, scope: str | None = None
    ) -> SFTPlan:
        loaded = load_config("train.toml", list(overrides)).of_recipe(SFTConfig)
        assert loaded is not None
        return plan_sft(loaded, read_environment(loaded.directory), values or {}, scope)

    return make
