"""`loops run` beside TRL's GRPOTrainer: the same updates, timed in one run, as ratios.

What `trl_addition.py` and `trl_counting.py` share; each says which tasks of which example.

Both sides read one tasks file, in its order, and load the same weights: the same prompts, group
size, groups an update, LoRA rank on the same layers, fp32, threads, optimizer settings, loss
(CISPO, its mean over tokens) and number of updates. A reward with a little noise
(`noisy_reward.py`) leaves no group without variance; a run in which one was skipped is refused, and
so is one whose prompts have other lengths than the other side's. Ours is what a user runs:
scheduler, HTTP to the engine's process and back, rendering, grading, a transcript for each attempt.
TRL is given no more than it needs: no checkpointing of activations, no second model, its own
generation in transformers.

The first update of a run is warm-up and is not counted; starting and ending are in no figure.
"""

import argparse
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import tomli_w
from machine_limits import Limits, measure

from loops_cookbook.config.locate import resolve_model
from loops_cookbook.rollouts.order import draw

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples"
LOOPS = str(Path(sys.executable).with_name("loops"))


@dataclass(frozen=True, slots=True)
class Job:
    """What both sides train. TRL reads it as JSON."""

    model_dir: str
    tasks: str
    """A file with `name`, `messages` and `answer` in each line, as many as groups are trained."""
    updates: int
    groups_per_update: int
    group_size: int
    lora_rank: int
    lora_alpha: float
    learning_rate: float
    max_tokens: int
    seed: int
    threads: int = 1
    micro_batches: int = 1
    """In how many parts TRL computes an update."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one update came to."""

    seconds: float
    prompt_tokens: int
    """Of all attempts."""
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class Round:
    """One run of each side."""

    ours: Sequence[Update]
    trl: Sequence[Update]
    training: float
    """Seconds of one of our updates that passed in training, the median."""
    threads: int

    @property
    def ratio(self) -> float:
        """How many times as fast as TRL `loops run` is."""
        return _seconds(self.trl) / _seconds(self.ours)


@dataclass(frozen=True, slots=True)
class Work:
    """What an update must compute and read at the least, if each prompt is read once."""

    gflop: float
    gigabytes: float
    """Of weights, read once for each position of the replies, and for training's two passes."""

    @classmethod
    def of(cls, job: Job, updates: Sequence[Update]) -> "Work":
        """Means over some updates.

        Two operations for each weight and token in sampling, and four in training: the adapter's
        base is frozen, so its weights have no gradients. The head serves sampled tokens only.
        """
        body, head = _weights(Path(job.model_dir))
        prompts = fmean(update.prompt_tokens for update in updates) / job.group_size
        sampled = fmean(update.sampled_tokens for update in updates)
        passes = sampled / (job.groups_per_update * job.group_size) + 2
        return cls(
            gflop=(2 + 4) * (body * (prompts + sampled) + head * sampled) / 1e9,
            gigabytes=4 * (body + head) * passes / 1e9,
        )


class Bench:
    """Where the runs are made, and of what.

    Args:
        folder: an empty one.
        example: a folder of `examples/`, whose config both sides follow.
        tasks: all its tasks, each a line of the tasks file.
    """

    def __init__(
        self, folder: Path, example: str, tasks: Sequence[Mapping[str, object]], updates: int
    ) -> None:
        self.folder = folder
        self._settings = tomllib.loads((EXAMPLES / example / "train.toml").read_text())
        model, training = self._settings["model"], self._settings["training"]
        source = resolve_model(model["name"], EXAMPLES / example)
        self.job = Job(
            model_dir=str(source.directory),
            tasks=str(folder / "tasks.jsonl"),
            updates=updates + 1,
            groups_per_update=training["groups_per_update"],
            group_size=training["group_size"],
            lora_rank=model["lora_rank"],
            lora_alpha=model.get("lora_alpha", 32),
            learning_rate=training["learning_rate"],
            max_tokens=self._settings["sampling"]["max_tokens"],
            seed=0,
        )
        self._tasks = tasks
        for name in ("question_episode.py", "noisy_reward.py"):
            shutil.copy(HERE / name, folder)

    def round(self, seed: int, trl_python: str, micro_batches: int) -> Round:
        """Run each side once, on tasks that the seed draws."""
        job = self.drawn(seed)
        rows, threads = self.ours(job)
        ours = [
            Update(row["time/update"], row["tokens/prompt"], row["tokens/sampled"]) for row in rows
        ]
        trl = self.trl(replace(job, threads=threads, micro_batches=micro_batches), trl_python)
        if [update.prompt_tokens for update in ours] != [update.prompt_tokens for update in trl]:
            raise SystemExit("the prompts of the two sides have different lengths")
        training = median(row["time/training"] for row in rows[1:])
        return Round(ours[1:], trl[1:], training, threads)

    def drawn(self, seed: int) -> Job:
        """A job whose tasks file is written, in the order in which the seed draws."""
        job = replace(self.job, seed=seed)
        groups = islice(draw(len(self._tasks), seed), job.updates * job.groups_per_update)
        lines = [
            json.dumps({**self._tasks[drawn.index], "name": f"group-{drawn.serial}"})
            for drawn in groups
        ]
        Path(job.tasks).write_text("\n".join(lines) + "\n")
        return job

    def ours(self, job: Job) -> tuple[list[dict[str, Any]], int]:
        """Run `loops run`: the metrics of each update, and how many threads computed them."""
        self._run(self.command(job))
        rows = self.rows(job)
        attempts = job.groups_per_update * job.group_size
        if any(row["attempts/trained"] != row["attempts/finished"] for row in rows):
            raise SystemExit("`loops run` did not train all that it sampled")
        if [row["attempts/trained"] for row in rows] != [attempts] * job.updates:
            raise SystemExit(f"`loops run` did not train {attempts} attempts in each update")
        [run_file] = self.folder.glob(f"runs/{job.seed}/*/run.json")
        run = json.loads(run_file.read_text())
        return rows, int(run["service"]["threads"])

    def rows(self, job: Job) -> list[dict[str, Any]]:
        """The metrics of each update that is made by now."""
        [file] = self.folder.glob(f"runs/{job.seed}/*/steps.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]

    def command(self, job: Job) -> list[str]:
        """What makes our run of a job, with its config written."""
        training = {
            "updates": job.updates,
            "groups_per_update": job.groups_per_update,
            "group_size": job.group_size,
            "learning_rate": job.learning_rate,
            "loss_aggregation": "token_mean",
            "shuffle": False,
            "seed": job.seed,
        }
        model = {**self._settings["model"], "name": job.model_dir, "seed": job.seed}
        changed = {
            "recipe": "rl",
            "model": model,
            "episode": {"class": "question_episode:QuestionEpisode", "tasks": job.tasks},
            "training": training,
            "sampling": self._settings["sampling"],
            "output": {"output_dir": f"runs/{job.seed}"},
        }
        config = self.folder / "train.toml"
        config.write_text(tomli_w.dumps(changed))
        return [LOOPS, "run", str(config)]

    def trl(self, job: Job, python: str) -> list[Update]:
        """Run TRL."""
        given, taken = self.folder / "job.json", self.folder / "trl.jsonl"
        given.write_text(json.dumps(asdict(job)))
        self._run([python, str(HERE / "trl_loop.py"), str(given), str(taken)])
        rows = [json.loads(line) for line in taken.read_text().splitlines()]
        if any(row.pop("no_variance") for row in rows) or len(rows) != job.updates:
            raise SystemExit("TRL did not train all groups")
        return [Update(**row) for row in rows]

    def _run(self, command: Sequence[str]) -> None:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise SystemExit(f"{shlex.join(command)} failed:\n{done.stderr}\n{done.stdout}")


def table(rounds: Sequence[Round], job: Job, limits: Limits) -> str:
    """Medians over the rounds as lines of Markdown, beside what the machine could do."""
    ours = median(_seconds(found.ours) for found in rounds)
    trl = median(_seconds(found.trl) for found in rounds)
    ratios = [found.ratio for found in rounds]
    work = Work.of(job, [update for found in rounds for update in found.ours])
    computing, reading = work.gflop / limits.matmul, work.gigabytes / limits.copy
    training = median(found.training for found in rounds)
    lines = [
        "| | s an update | tokens a reply | matmul limit | copy limit |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, seconds, updates in (
        ("TRL's GRPOTrainer", trl, [update for found in rounds for update in found.trl]),
        ("`loops run`", ours, [update for found in rounds for update in found.ours]),
    ):
        reply = fmean(update.sampled_tokens for update in updates)
        reply /= job.groups_per_update * job.group_size
        lines.append(
            f"| {name} | {seconds:.3f} | {reply:.2f} | {computing / seconds:.1%} "
            f"| {reading / seconds:.1%} |"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"`loops run` is {median(ratios):.1f} times as fast (from {min(ratios):.1f} to "
            f"{max(ratios):.1f}); {training:.3f} s of its update are training, the rest is "
            "sampling and everything else.",
            f"The limits, {limits}. With each prompt read once, an update is {work.gflop:.4g} "
            f"GFLOP, {computing:.3g} s at the first limit, and reads {work.gigabytes:.3g} GB of "
            f"weights, {reading:.3g} s at the second.",
        ]
    )


def compare(example: str, tasks: Sequence[Mapping[str, object]], *, is_pinned: bool) -> None:
    """Play the rounds that the command line asks for, and print the table.

    Args:
        example: a folder of `examples/`.
        tasks: all its tasks, each a line of the tasks file.
        is_pinned: to one core, for a model that one thread trains.
    """
    parser = argparse.ArgumentParser(description=f"examples/{example} beside TRL's GRPOTrainer.")
    parser.add_argument("--trl-python", required=True, help="of an environment that has trl")
    parser.add_argument("--updates", type=int, default=20 if is_pinned else 5, help="of each run")
    parser.add_argument("--rounds", type=int, default=3 if is_pinned else 1)
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=1 if is_pinned else 4,  # whole, addition's 64 rows take TRL 17 GB
        help="parts in which TRL computes an update",
    )
    arguments = parser.parse_args()
    if is_pinned and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), example, tasks, arguments.updates)
        for seed in range(arguments.rounds):
            rounds.append(bench.round(seed, arguments.trl_python, arguments.micro_batches))
            print(f"round {seed + 1} of {arguments.rounds} is done", file=sys.stderr)
        limits = measure(rounds[0].threads)
        print(table(rounds, bench.job, limits))


def _seconds(updates: Sequence[Update]) -> float:
    return median(update.seconds for update in updates)


def _weights(model_dir: Path) -> tuple[int, int]:
    """Numbers in the matrices of the blocks, and in the output head, which may be the embedding.

    As the header of the weights' file tells, which is JSON behind its length in 8 bytes.
    """
    with (model_dir / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    sizes: dict[str, int] = {
        name: math.prod(entry["shape"])
        for name, entry in header.items()
        if len(entry.get("shape", ())) == 2
    }
    embedding = sizes.pop("model.embed_tokens.weight")
    head = sizes.pop("lm_head.weight", embedding)
    return sum(sizes.values()), head
