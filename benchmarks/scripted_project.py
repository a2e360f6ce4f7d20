"""A project for the benchmarks that need no model: a small Episode, its tasks, and a plan of it.

What the policy says is scripted, so a whole run of the recipe measures the recipe alone.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from loops_cookbook.attempts import Attempt
from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.recipes.plan import Plan, plan_run
from loops_cookbook.records import (
    EvaluationRow,
    GroupRow,
    Level,
    RolloutRow,
    RunRow,
    RunStatus,
    StepRow,
)
from loops_cookbook.testing import PlainRenderer

EPISODE = """
from pydantic import BaseModel

from loops_cookbook.episodes import Episode, Grading, Sampling


class Word(BaseModel):
    name: str


class Spell(Episode[Word, None]):
    async def run(self, sample: Sampling) -> None:
        messages = [{"role": "user", "content": self.task.value.name}]
        reply = await sample.model.conversation().generate(messages)
        self.said = reply.content

    async def grade(self, grading: Grading) -> float:
        return float(self.said == "right")
"""

CONFIG = """
recipe = "rl"

[model]
name = "a/policy"
max_seq_len = 256

[episode]
class = "spelling:Spell"
tasks = "tasks.jsonl"

[sampling]
max_tokens = 8
"""


def scripted_plan(
    folder: Path, training: Mapping[str, object], *, tasks: int = 100, more: Sequence[str] = ()
) -> Plan:
    """Write the project into a folder and plan a run of it.

    Args:
        folder: where to.
        training: keys of the `[training]` table.
        tasks: how many there are.
        more: other settings, as `--set` takes them.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    lines = "".join(json.dumps({"name": f"task-{i}"}) + "\n" for i in range(tasks))
    for name, text in (("spelling.py", EPISODE), ("tasks.jsonl", lines), ("train.toml", CONFIG)):
        (folder / name).write_text(text)
    settings = [f"training.{key}={json.dumps(value)}" for key, value in training.items()]
    loaded = load_config(str(folder / "train.toml"), [*settings, *more])
    plan = plan_run(loaded, read_environment(loaded.directory), {}, None)
    return replace(plan, detection=replace(plan.detection, renderer=PlainRenderer()))


def run_row(plan: Plan) -> RunRow:
    """What the run is, for a recorder."""
    training = plan.config.training
    return RunRow(
        run="scripted",
        started_at=0.0,
        recipe="rl",
        scope="scripted",
        model=plan.model.name,
        updates=training.updates,
        attempts_per_update=training.groups_per_update * training.group_size,
        max_staleness=training.staleness_bound,
        tasks={"train": len(plan.tasks)},
        service={},
        versions={},
        config_path=str(plan.loaded.path),
        config={},
    )


class Silence:
    """A Recorder that takes no notice; subclasses say of what they do."""

    def run_started(self, row: RunRow) -> None:
        """Pass over it."""

    def attempt_ended(self, attempt: Attempt, purpose: str) -> None:
        """Pass over it."""

    def group_settled(self, row: GroupRow) -> None:
        """Pass over it."""

    def fates(self, rows: Sequence[RolloutRow]) -> None:
        """Pass over them."""

    def update(self, row: StepRow) -> None:
        """Pass over it."""

    def evaluation(self, row: EvaluationRow) -> None:
        """Pass over it."""

    def note(self, level: Level, text: str) -> None:
        """Pass over it."""

    def run_ended(
        self, status: RunStatus, counts: Mapping[str, int], reason: str | None = None
    ) -> None:
        """Pass over it."""
