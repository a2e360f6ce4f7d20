"""An update of examples/counting through `loops run`, beside one of the bare loop, as ratios.

    python benchmarks/counting_update.py [--updates 30] [--rounds 3] [--trace full]

Everything is pinned to one core. A round is one run each, one after the other, of the same tasks
from the same model: the bare loop (`bare_counting.py`), the bare loop that trains equal replies
once (`--distinct`), and `loops run` with the example's config without evaluation. A run's figure is
the median over its updates, as seconds an update and as seconds a sampled group, since the number
of rejected groups varies; a ratio is taken within a round. Medians over the rounds are printed.

Starting and ending a run are not part of any figure.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tomli_w

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/counting"
LOOPS = str(Path(sys.executable).with_name("loops"))
OURS = "loops run"


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run came to."""

    update: float
    """Seconds."""
    group: float
    """Seconds an update, by the groups that it sampled."""
    groups: float
    """Sampled for an update."""

    @classmethod
    def of(cls, updates: Sequence[tuple[float, float]]) -> "Figures":
        """Medians over the seconds and the sampled groups of a run's updates."""
        return cls(
            update=median(seconds for seconds, _ in updates),
            group=median(seconds / groups for seconds, groups in updates),
            groups=median(groups for _, groups in updates),
        )


@dataclass(frozen=True, slots=True)
class Bench:
    """Where the runs are made, and of what."""

    folder: Path
    settings: Mapping[str, Any]
    """The example's config."""
    updates: int
    trace: str

    def bare(self, seed: int, *options: str) -> Figures:
        """A run of the bare loop."""
        script = str(Path(__file__).with_name("bare_counting.py"))
        command = [sys.executable, script, f"--updates={self.updates}", f"--seed={seed}", *options]
        rows = [json.loads(line) for line in self._stdout(command).splitlines()]
        return Figures.of([(row["seconds"], row["groups"]) for row in rows])

    def ours(self, seed: int) -> Figures:
        """A run of `loops run`."""
        config, runs = self.folder / "train.toml", f"runs/{seed}"
        changes = {
            "training": {**self.settings["training"], "updates": self.updates, "seed": seed},
            "model": {**self.settings["model"], "seed": seed},
            "output": {"output_dir": runs, "trace": self.trace},
        }
        config.write_text(tomli_w.dumps({**self.settings, **changes}))
        self._stdout([LOOPS, "run", str(config)])
        [steps] = (self.folder / runs).glob("*/steps.jsonl")
        rows = [json.loads(line) for line in steps.read_text().splitlines()]
        kinds = ("groups/usable", "groups/no_variance", "groups/too_few")
        return Figures.of([(row["time/update"], sum(row[kind] for kind in kinds)) for row in rows])

    def other(self, command: Sequence[str]) -> Figures:
        """A run of a command whose stdout says `s/step` and how many; it rejects no groups."""
        found = re.findall(r"s/step\s+([0-9.e+-]+)", self._stdout(command))
        if not found:
            raise SystemExit(f"{shlex.join(command)} said no `s/step <seconds>` on stdout")
        seconds, groups = float(found[-1]), self.settings["training"]["groups_per_update"]
        return Figures(seconds, seconds / groups, groups)

    def _stdout(self, command: Sequence[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise SystemExit(f"{shlex.join(command)} failed:\n{done.stderr}")
        return done.stdout


def play(bench: Bench, seed: int, other: Sequence[str]) -> dict[str, Figures]:
    """One round."""
    figures = {
        "bare loop": bench.bare(seed),
        "bare loop, equal replies once": bench.bare(seed, "--distinct"),
        OURS: bench.ours(seed),
    }
    if other:
        figures["other command"] = bench.other(other)
    return figures


def table(rounds: Sequence[Mapping[str, Figures]]) -> str:
    """Medians over the rounds, and how many times as long `loops run` takes."""
    lines = [f"{'':30} {'s/update':>10} {'groups':>7} {'s/group':>10}"]
    for name in rounds[0]:
        runs = [figures[name] for figures in rounds]
        update, group = median(run.update for run in runs), median(run.group for run in runs)
        groups = median(run.groups for run in runs)
        lines.append(f"{name:30} {update:10.4f} {groups:7.1f} {group:10.5f}")
    for name in rounds[0]:
        if name != OURS:
            by_update = [figures[OURS].update / figures[name].update for figures in rounds]
            by_group = [figures[OURS].group / figures[name].group for figures in rounds]
            lines.append(f"{OURS} / {name}: {_spread(by_update)} an update")
            lines.append(f"{OURS} / {name}: {_spread(by_group)} a group")
    return "\n".join(lines)


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    """Pin to a core, play the rounds, print the table."""
    parser = argparse.ArgumentParser(
        description="An update of examples/counting through `loops run`, beside the bare loop."
    )
    parser.add_argument("--updates", type=int, default=30, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", choices=("off", "full"), default="full", help="of `loops run`")
    parser.add_argument(
        "--other", type=shlex.split, default=[], help="another loop, which prints `s/step X`"
    )
    arguments = parser.parse_args()
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit("this system pins no process to a core: run this on Linux")
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})

    settings = tomllib.loads((EXAMPLE / "train.toml").read_text())
    settings.pop("evaluation", None)
    rounds: list[dict[str, Figures]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("episode.py", "tasks.jsonl"):
            shutil.copy(EXAMPLE / file, folder)
        bench = Bench(folder, settings, arguments.updates, arguments.trace)
        for seed in range(arguments.rounds):
            rounds.append(play(bench, seed, arguments.other))
            print(f"round {seed + 1} of {arguments.rounds} is done", file=sys.stderr)
    print(f"core {core}, {arguments.rounds} rounds of {arguments.updates} updates")
    print(table(rounds))


if __name__ == "__main__":
    main()
