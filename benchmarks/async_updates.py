"""How many updates async mode makes in the time of sync, in virtual time: a simulation.

    python benchmarks/async_updates.py [--updates 100] [--seeds 5] [--sigma 0.5]

The whole recipe runs on a scripted sampler and trainer, under a clock that jumps. An attempt takes
a log-normal time (median 10 s), every tenth one five times as long; half of them are right. An
update of 8 groups of 8 trains and publishes for 20 s. Sync mode has slots for the 64 attempts that
one update needs. Async mode is told with the slots that it has by default, and with those of sync,
so that what comes of more slots and what comes of not waiting can be told apart. The ratio is of
updates in the same time. Waste: attempts that are neither trained nor rejected with their group.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import anyio
import numpy as np
from scripted_project import Silence, run_row, scripted_plan
from trio.testing import MockClock

from loops_cookbook.attempts import Fate
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.records import RolloutRow, StepRow
from loops_cookbook.testing import Line, RecordingTrainer, ScriptedSampler, ScriptedService

GROUPS, SIZE = 8, 8
MEDIAN_SECONDS, TRAINER_SECONDS = 10.0, 20.0
SLOW_SHARE, SLOW_TIMES = 0.1, 5.0
SLOTS = GROUPS * SIZE


class Counted(Silence):
    """Keeps the end of each update, and counts what was for nothing."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.stale: list[float] = []
        self.wasted = 0

    def update(self, row: StepRow) -> None:
        """Note when it ended, and how old its groups were."""
        self.ends.append(anyio.current_time())
        self.stale.append(row.metrics["policy/staleness_max"])

    def fates(self, rows: Sequence[RolloutRow]) -> None:
        """Count those whose work was for nothing."""
        useful = (Fate.TRAINED, Fate.NO_VARIANCE, Fate.TOO_FEW)
        self.wasted += sum(row.fate not in useful for row in rows)


def simulate(plan: Plan, seed: int, sigma: float) -> tuple[float, float, int]:
    """Seconds an update, the oldest group, and wasted attempts of one run."""
    draw = np.random.default_rng(seed)

    def step(prompt: str, call: int) -> Line:
        seconds = MEDIAN_SECONDS * draw.lognormal(0, sigma)
        slow = SLOW_TIMES if draw.random() < SLOW_SHARE else 1.0
        return Line("right" if draw.random() < 0.5 else "wrong", seconds=seconds * slow)

    async def main() -> Counted:
        sampler = ScriptedSampler(step)
        trainer = RecordingTrainer(sampler, seconds=TRAINER_SECONDS / 2)  # train, then publish
        counted = Counted()
        await run_rl(plan, ScriptedService(sampler, trainer), counted, run_row(plan))
        return counted

    clock = MockClock(autojump_threshold=0)
    counted = anyio.run(main, backend="trio", backend_options={"clock": clock})
    # The first updates find nothing sampled; what is asked is the pace that a run keeps.
    warm = len(counted.ends) // 10
    seconds = (counted.ends[-1] - counted.ends[warm]) / (len(counted.ends) - 1 - warm)
    return seconds, max(counted.stale), counted.wasted


def main() -> None:
    """Print the pace of each mode, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sigma", type=float, default=0.5, help="of the log-normal time")
    arguments = parser.parse_args()
    patient = "clocks.rollout_seconds=1e6"  # no attempt is lost to its clock
    same = f"concurrency.sampling={SLOTS}"
    modes: dict[str, tuple[dict[str, object], list[str]]] = {
        "sync": ({"mode": "sync"}, []),
        "async, bound 1": ({"mode": "async", "max_staleness": 1}, []),
        "async, bound 2": ({"mode": "async", "max_staleness": 2}, []),
        "async, bound 2, sync's slots": ({"mode": "async", "max_staleness": 2}, [same]),
        "async, bound 4": ({"mode": "async", "max_staleness": 4}, []),
    }
    base = {"updates": arguments.updates, "groups_per_update": GROUPS, "group_size": SIZE}
    paces: dict[str, list[float]] = {}
    print(f"{'':30} {'s/update':>9} {'ratio':>22} {'oldest':>7} {'wasted':>7}")
    with tempfile.TemporaryDirectory() as name:
        for mode, (training, more) in modes.items():
            plan = scripted_plan(Path(name), {**base, **training}, more=[patient, *more])
            runs = [simulate(plan, seed, arguments.sigma) for seed in range(arguments.seeds)]
            paces[mode] = [seconds for seconds, _, _ in runs]
            ratios = [sync / own for sync, own in zip(paces["sync"], paces[mode], strict=True)]
            spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            oldest, wasted = max(run[1] for run in runs), sum(run[2] for run in runs)
            pace = fmean(paces[mode])
            print(f"{mode:30} {pace:9.1f} {spread:>22} {oldest:7.0f} {wasted:7}")


if __name__ == "__main__":
    main()
