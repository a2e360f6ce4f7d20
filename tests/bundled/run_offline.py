"""Runs a config with doubles in place of trainer and sampler; a process of its own for each.

    python run_offline.py CONFIG REPLIES [SETTING ...]

REPLIES is a JSON list; the attempts of a group say them in turn. Prints, as JSON, the run's last
counts, the rewards of each group, and every note.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import anyio

from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.recipes.launch import with_judges
from loops_cookbook.recipes.plan import Plan, plan_run
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.recorders import Fanout
from loops_cookbook.records import GroupRow, Level, RunRow, RunStatus
from loops_cookbook.rundir.layout import new_run_folder
from loops_cookbook.rundir.write import RunWriter
from loops_cookbook.testing import PlainRenderer, ScriptedService


class Told:
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.rewards: list[tuple[float | None, ...]] = []
        self.notes: list[str] = []

    def group_settled(self, row: GroupRow) -> None:
        self.rewards.append(row.rewards)

    def note(self, level: Level, text: str) -> None:
        self.notes.append(text)

    def run_ended(
        self, status: RunStatus, counts: dict[str, int], reason: str | None = None
    ) -> None:
        self.counts = dict(counts)

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


def row_of(plan: Plan) -> RunRow:
    training = plan.config.training
    return RunRow(
        run="offline",
        started_at=0.0,
        recipe="rl",
        scope="scripted",
        model=plan.model.name,
        updates=training.updates,
        attempts_per_update=training.groups_per_update * training.group_size,
        tasks={},
        service={},
        versions={},
        config_path="",
        config={},
    )


async def main(config: str, replies: list[str], settings: list[str]) -> Told:
    loaded = load_config(config, settings)
    plan = plan_run(loaded, read_environment(loaded.directory), os.environ, None)
    plan = replace(plan, detection=replace(plan.detection, renderer=PlainRenderer()))
    service = ScriptedService(lambda _, index: replies[index % len(replies)])
    told = Told()
    folder = new_run_folder(Path("runs"), Path.cwd())
    with RunWriter(folder) as writer:
        recorder = Fanout((writer, told))
        async with with_judges(plan, os.environ) as ready:
            await run_rl(ready, service, recorder, row_of(plan))
    return told


if __name__ == "__main__":
    told = anyio.run(main, sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:])
    sys.stdout.write(json.dumps(vars(told)))
