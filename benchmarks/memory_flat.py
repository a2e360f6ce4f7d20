"""Whether a run's memory stays flat: resident memory after 1,000 groups and after 10,000.

    python benchmarks/memory_flat.py [--groups 10000]

The whole recipe with its records on disk, on a scripted sampler and a trainer that keeps nothing,
each case in a process of its own: sync and async mode where half of the replies are right, and both
where nothing is ever learnt, `max_consecutive_unusable_groups = 0` and 99 of 100 groups rejected,
so that an update's row counts hundreds of them. Groups of 4 attempts, 8 groups an update.
"""

import argparse
import gc
import multiprocessing
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
from rich.console import Console
from scripted_project import Silence, run_row, scripted_plan

from loops_cookbook.learning.datums import Datum
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.recorders import Fanout
from loops_cookbook.records import GroupRow
from loops_cookbook.report.progress import Progress
from loops_cookbook.rundir.layout import new_run_folder
from loops_cookbook.rundir.write import RunWriter
from loops_cookbook.services.base import AdamParams, LossSpec, StepResult
from loops_cookbook.testing import RecordingTrainer, ScriptedSampler, ScriptedService

GROUPS, SIZE = 8, 4
FIRST = 1_000


class Forgetful(RecordingTrainer):
    """Keeps nothing of what it is sent."""

    async def train(
        self, batch: Sequence[Datum], loss: LossSpec, adam: AdamParams, *, key: str
    ) -> StepResult:
        """Answer as any recording trainer does."""
        result = await super().train(batch, loss, adam, key=key)
        self.batches.clear()
        self._results.clear()
        return result


class Enough(Exception):
    """All groups have settled."""


class Measure(Silence):
    """Reads the memory as groups settle, and ends the run after the last."""

    def __init__(self, sampler: ScriptedSampler, groups: int) -> None:
        self.megabytes: dict[int, float] = {}
        self._sampler = sampler
        self._left = groups
        self._settled = 0

    def group_settled(self, row: GroupRow) -> None:
        """Count it."""
        self._settled += 1
        self._sampler.calls.clear()
        if self._settled in (FIRST, self._left):
            gc.collect()
            self.megabytes[self._settled] = resident()
        if self._settled == self._left:
            raise Enough


def resident() -> float:
    """MB of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def case(mode: str, learns: bool, groups: int) -> tuple[float, float]:
    """One run; MB after the first groups, and after all."""
    draw = random.Random(0)
    training: dict[str, object] = {
        "mode": mode,
        "updates": 10**6,
        "groups_per_update": GROUPS,
        "group_size": SIZE,
        "max_consecutive_unusable_groups": 0,
    }

    def reply(prompt: str, call: int) -> str:
        is_right = draw.random() < (0.5 if learns else 0.01 / SIZE)
        return "right" if is_right else "wrong"

    async def run(folder: Path, quiet: Console) -> dict[int, float]:
        plan = scripted_plan(folder, training)
        sampler = ScriptedSampler(reply)
        measure = Measure(sampler, groups)
        runs = new_run_folder("runs", folder)
        progress = Progress(runs.root, side=quiet, answer=quiet)
        with progress, RunWriter(runs, trace="off") as writer:
            recorder = Fanout((writer, progress, measure))
            service = ScriptedService(sampler, Forgetful(sampler))
            try:
                await run_rl(plan, service, recorder, run_row(plan))
            except Enough:
                return measure.megabytes
        raise SystemExit("the run ended too early")

    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nowhere:
        measured = anyio.run(run, Path(name), Console(file=nowhere))
    return measured[FIRST], measured[groups]


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=10_000)
    groups = parser.parse_args().groups
    print(f"{'':26} {f'MB at {FIRST:,}':>12} {f'MB at {groups:,}':>13} {'B a group':>10}")
    context = multiprocessing.get_context("spawn")
    for mode in ("sync", "async"):
        for learns in (True, False):
            with context.Pool(1) as pool:
                before, after = pool.apply(case, (mode, learns, groups))
            name = f"{mode}, {'half right' if learns else '99 % rejected'}"
            each = (after - before) * 1e6 / (groups - FIRST)
            print(f"{name:26} {before:12.1f} {after:13.1f} {each:10.0f}")


if __name__ == "__main__":
    main()
