"""Kills runs at random moments, resumes them, and looks whether anything was lost or done twice.

A run that is never killed is the reference. Then others of the same config are started, killed with
SIGKILL after a random time (the command, the engine, or both at once), resumed, killed again, until
so many kills are done; each run is resumed to its end. What every run must then have:

- each update one row, each evaluation one, every metric of it as in the reference, times apart;
- each group in the same update, each of its attempts trained once;
- one row in rollouts.jsonl for each start of an attempt, and no attempt in flight at the end;
- no torn record, and no transcript that two rows name;
- the same weights in the last checkpoint.

A run that lacks any of it is kept in a folder of its own, which is printed.

    python benchmarks/kill_resume.py --kills 100
    python benchmarks/kill_resume.py --kills 20 --engine
    python benchmarks/kill_resume.py --kills 30 --mode async
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
COUNTING = HERE.parent / "examples" / "counting"
UPDATES = 12
TOLERANCE = 1e-5

CONFIG = """
recipe = "rl"

[compute]
deterministic = true
{scope}

[model]
name = "models/counting"
max_seq_len = 64
lora_rank = 4

[episode]
class = "episode:CountingEpisode"
tasks = "tasks.jsonl"

[training]
updates = {updates}
groups_per_update = 2
group_size = 4
learning_rate = 2e-3
schedule = "linear"
checkpoint_every = 4
mode = "{mode}"

[sampling]
max_tokens = 4

[concurrency]
sampling = 64
grading = 64

[evaluation]
every = 3

[evaluation.sets.few]
tasks = "few.jsonl"
attempts = 2

[output]
output_dir = "runs"
"""


@dataclass
class Tally:
    """What was done and found."""

    kills: Counter[str] = field(default_factory=Counter[str])
    lives: int = 0
    runs: int = 0
    moments: list[float] = field(default_factory=list[float])
    faults: list[str] = field(default_factory=list[str])


def make_project(folder: Path, *, engine: bool, mode: str) -> None:
    """A config of the counting example, small and with everything that a kill may hit."""
    folder.mkdir(parents=True)
    for name in ("episode.py", "tasks.jsonl"):
        shutil.copy(COUNTING / name, folder)
    lines = (COUNTING / "held_out.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(lines[:6]))
    scope = 'scope = "local"'
    if not engine:
        shutil.copy(HERE / "kill_service.py", folder)
        scope = 'scope = "kill_service:open_service"'
        # It is another engine's option.
    config = CONFIG.format(updates=UPDATES, scope=scope, mode=mode)
    if not engine:
        config = config.replace("deterministic = true\n", "")
    (folder / "train.toml").write_text(config)


class Life:
    """One process of a run."""

    def __init__(self, project: Path, *resume: str) -> None:
        command = [sys.executable, "-m", "loops_cookbook.cli.main", "run", "train.toml", *resume]
        entry = "from loops_cookbook.cli.main import main; main()"
        command[1:3] = ["-c", entry]
        self._process = subprocess.Popen(
            command,
            cwd=project,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.said: list[str] = []
        self.serves = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said.append(line)
            if "serves" in line or "evaluat" in line or "update" in line:
                self.serves.set()
        self.serves.set()

    def wait(self, seconds: float | None) -> int | None:
        """The exit status; None while it still runs after so many seconds."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join()
        return status

    def kill(self, what: str) -> None:
        """Kill the command, the engine, or both at once."""
        child = self._child() if what != "command" else None
        if child is not None:
            os.kill(child, signal.SIGKILL)
        if what != "engine" or child is None:
            self._process.kill()

    def _child(self) -> int | None:
        """The engine: the command's only child."""
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[1]) == self._process.pid:
                return int(folder.name)
        return None


def killed_run(
    project: Path, tally: Tally, chance: random.Random, seconds: float, kinds: Sequence[str]
) -> Path:
    """One run, killed a few times, brought to its end."""
    deaths = chance.randint(2, 6)
    resume: list[str] = []
    for death in range(deaths + 1):
        life = Life(project, *resume)
        tally.lives += 1
        if death < deaths:
            if chance.random() < 0.85:
                life.serves.wait(120)
            moment = chance.uniform(0, seconds)
            if life.wait(moment) is None:
                what = chance.choice(kinds)
                tally.kills[what] += 1
                tally.moments.append(moment)
                life.kill(what)
        status = life.wait(240)
        folders = sorted(project.glob("runs/*"))
        if status == 0:
            break
        if not folders or not (folders[-1] / "run.json").is_file():
            continue  # killed before the run began: another is begun
        if json.loads((folders[-1] / "run.json").read_text())["status"] == "done":
            break  # killed after its end
        resume = ["--resume"]
        if status is None or (status > 0 and not any("ended" in line for line in life.said)):
            tally.faults.append(f"{folders[-1]}: exit {status}: {''.join(life.said)[-400:]}")
            return folders[-1]
    else:
        tally.faults.append(f"{project}: not at its end: {''.join(life.said)[-400:]}")
    tally.runs += 1
    return sorted(project.glob("runs/*"))[-1]


def rows(path: Path) -> list[dict[str, Any]]:
    """Every row of a file that must be whole."""
    text = path.read_text()
    assert not text or text.endswith("\n"), f"{path} is torn"
    return [json.loads(line) for line in text.splitlines()]


def metrics(row: Mapping[str, object]) -> dict[str, object]:
    """What of an update's row must be as in a run that was never killed."""
    # kl is 0 but for rounding, which is not the same number twice; a failure that was seen stays
    # in the rows, and the death of an engine is one.
    apart = ("time/", "kl/", "attempts/failed/EngineDied")
    return {k: v for k, v in row.items() if k not in ("at", "totals") and not k.startswith(apart)}


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """The keys that two rows do not agree in."""
    found = list(one.keys() ^ other.keys())
    for key in one.keys() & other.keys():
        a, b = one[key], other[key]
        same = a == b
        if isinstance(a, int | float) and isinstance(b, int | float):
            same = abs(a - b) <= TOLERANCE * max(1.0, abs(a))
        found += [] if same else [f"{key} ({a} and {b})"]
    return found


def trained(folder: Path) -> dict[int, tuple[int, str]]:
    """The update and the task of each group that was trained."""
    serials = {row["group"] for row in rows(folder / "rollouts.jsonl") if row["fate"] == "trained"}
    told = {row["serial"]: row for row in rows(folder / "groups.jsonl") if row["usable"]}
    return {serial: (told[serial]["update"], told[serial]["task"]) for serial in serials}


def weights(folder: Path) -> list[np.ndarray]:
    """The weights and the optimizer of the last checkpoint."""
    last = rows(folder / "checkpoints.jsonl")[-1]
    assert last["update"] == UPDATES, last
    if last["folder"] is None:
        return [np.array(each) for each in json.loads(Path(str(last["path"])).read_text())]
    from safetensors.numpy import load_file

    files = ("adapter_model.safetensors", "optimizer.safetensors")
    held = {k: v for f in files for k, v in load_file(folder / str(last["folder"]) / f).items()}
    return [held[name] for name in sorted(held)]


def faults_of(folder: Path, reference: Path | None) -> list[str]:
    """What is wrong with a run that came to its end."""
    found: list[str] = []
    steps, rollouts = rows(folder / "steps.jsonl"), rows(folder / "rollouts.jsonl")
    if [row["update"] for row in steps] != list(range(1, UPDATES + 1)):
        found.append(f"updates {[row['update'] for row in steps]}")
    seen = Counter((row["set"], row["update"]) for row in rows(folder / "evaluations.jsonl"))
    found += [f"evaluation {key} {n} times" for key, n in seen.items() if n > 1]
    once = Counter((r["group"], r["attempt"]) for r in rollouts if r["fate"] == "trained")
    found += [f"attempt {place} trained {n} times" for place, n in once.items() if n > 1]
    starts = Counter(row["serial"] for row in rows(folder / "starts.jsonl"))
    owed = Counter({(s, i): n for s, n in starts.items() for i in range(4)})
    have = Counter((row["group"], row["attempt"]) for row in rollouts)
    found += [
        f"rows of {p}: {have[p]} for {owed[p]} starts" for p in owed | have if have[p] != owed[p]
    ]
    named = Counter(row["transcript"] for row in rollouts if row["transcript"])
    found += [f"transcript {name} named {n} times" for name, n in named.items() if n > 1]
    on_disk = {path.name for path in (folder / "transcripts").iterdir()}
    found += [f"transcript {name} is not there" for name in named.keys() - on_disk]
    for path in (folder / "transcripts").glob("*.json"):
        json.loads(path.read_text())
    run = json.loads((folder / "run.json").read_text())
    counts = run["counts"]
    if run["status"] != "done" or counts["attempts/in_flight"] != 0:
        found.append(f"status {run['status']}, in flight {counts['attempts/in_flight']}")
    if counts["attempts/started"] != have.total() or counts["attempts/finished"] != have.total():
        found.append(
            f"started {counts['attempts/started']}, finished {counts['attempts/finished']}, rows "
            f"{have.total()}"
        )
    if reference is None:
        return found
    for row, other in zip(steps, rows(reference / "steps.jsonl"), strict=False):
        found += [
            f"update {row['update']}: {each}" for each in differing(metrics(row), metrics(other))
        ]
    if trained(folder) != trained(reference):
        found.append("other groups were trained, or in other updates")
    for mine, theirs in zip(weights(folder), weights(reference), strict=True):
        if not np.allclose(mine, theirs, atol=TOLERANCE):
            found.append(f"the weights differ by {np.abs(mine - theirs).max()}")
    return found


def main() -> None:
    """Kill, resume, look."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--engine", action="store_true", help="the embedded engine, not numpy")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance, tally = random.Random(given.seed), Tally()
    kinds = ("command", "engine", "both") if given.engine else ("command",)
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch, "reference")
        make_project(project, engine=given.engine, mode=given.mode)
        life = Life(project)
        life.serves.wait(120)
        began = time.monotonic()
        status = life.wait(600)
        seconds = time.monotonic() - began
        (reference,) = project.glob("runs/*")
        assert status == 0, "".join(life.said)
        tally.faults += [f"reference: {each}" for each in faults_of(reference, None)]
        number = 0
        while tally.kills.total() < given.kills and len(tally.faults) < 5:
            project = Path(scratch, f"run-{number}")
            number += 1
            make_project(project, engine=given.engine, mode=given.mode)
            run = killed_run(project, tally, chance, seconds, kinds)
            compare = reference if given.mode == "sync" else None
            faults = faults_of(run, compare)
            tally.faults += [f"{run.parent.parent.name}: {each}" for each in faults]
            if faults:
                kept = Path(tempfile.mkdtemp(prefix="loops-kill-"), project.name)
                shutil.copytree(project, kept)
                print(f"{project.name} has faults, and is kept: {kept}", flush=True)
            print(
                f"{tally.kills.total()} kills, {tally.runs} runs, {len(tally.faults)} faults",
                flush=True,
            )
    kills = ", ".join(f"{what} {n}" for what, n in tally.kills.items())
    print(f"{tally.kills.total()} kills ({kills}) in {tally.runs} runs, {tally.lives} lives")
    print(f"{len(tally.faults)} faults")
    for each in tally.faults:
        print(f"  {each}")
    sys.exit(bool(tally.faults))


if __name__ == "__main__":
    main()
