"""Where an update's seconds of processor time go, in `loops run` as it is measured beside TRL.

    python benchmarks/profile_update.py {addition,counting} [--updates 5]

First the run itself: the processor time of its two processes is read between updates, so starting
and ending are in no figure. Then the same engine in this process, with the same tasks, threads and
cores, each of its calls by itself: sampling all groups at once; a pass forward, and one forward and
backward; the optimizer's step and publishing. What the engine's process takes beyond these is HTTP,
JSON, and what it samples in several calls instead of one. Means over the updates. Last, torch's own
profile of one sampling and one training call: the share of each kind of operation.

Processor time, since it is less disturbed by other work than a clock. Where several threads
compute, it is that of all of them, and they also spend it on waiting for one another.
"""

# torch carries few types of its own.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
import trl_addition
import trl_counting
from beside_trl import Bench, Job
from torch.profiler import profile
from transformers import AutoTokenizer

from loops_cookbook.local.engine import Completion, Engine, EngineSettings, Row, SampleJob

T = TypeVar("T")

EXAMPLES = {"addition": (trl_addition.tasks, False), "counting": (trl_counting.tasks, True)}
"""Its tasks, and whether it is pinned to one core."""
KINDS = {
    "mm": "matrix products",
    "scaled_dot_product": "attention",
    "softmax": "softmax",
    "cat": "copies",
    "copy_": "copies",
    "index": "copies",
    "add": "sums and products",
    "mul": "sums and products",
}
"""By a part of the operation's name, the first that fits."""


class Instrument:
    """The engine with a stopwatch on its calls."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._random = random.Random(job.seed)
        tokenizer: Any = AutoTokenizer.from_pretrained(job.model_dir)
        lines = map(json.loads, Path(job.tasks).read_text().splitlines())
        self._prompts: list[list[int]] = [
            tokenizer.apply_chat_template(line["messages"], add_generation_prompt=True)["input_ids"]
            for line in lines
        ]
        longest = max(map(len, self._prompts)) + job.max_tokens
        self._engine = Engine(
            EngineSettings(
                model_dir=Path(job.model_dir),
                model_name="policy",
                max_seq_len=longest,
                lora_rank=job.lora_rank,
                lora_alpha=job.lora_alpha,
                seed=job.seed,
            )
        )

    def update(self, update: int) -> dict[str, float]:
        """The processor seconds of each call."""
        jobs = self.jobs(update)
        sampling, groups = _timed(lambda: self._engine.sample(jobs))
        rows = self._rows(jobs, groups)
        forward, _ = _timed(lambda: self._engine.forward(rows, "cispo", None))
        both, _ = _timed(lambda: self._engine.forward_backward(rows, "cispo", None))
        stepping, _ = _timed(self._step)
        return {
            "engine: sampling": sampling,
            "engine: training, forward": forward,
            "engine: training, backward": both - forward,
            "engine: optimizer, publishing": stepping,
        }

    def shares(self, update: int) -> dict[str, Counter[str]]:
        """What torch spends its time on, of 1, for each call."""
        jobs = self.jobs(update)
        sampling, groups = _profiled(lambda: self._engine.sample(jobs))
        rows = self._rows(jobs, groups)
        training, _ = _profiled(lambda: self._engine.forward_backward(rows, "cispo", None))
        return {"sampling": sampling, "training": training}

    def jobs(self, update: int) -> list[SampleJob]:
        """What an update samples."""
        first, size = update * self._job.groups_per_update, self._job.groups_per_update
        return [
            SampleJob(prompt, self._job.group_size, self._job.max_tokens, seed=first + place)
            for place, prompt in enumerate(self._prompts[first : first + size])
        ]

    def _rows(self, jobs: Sequence[SampleJob], groups: Sequence[Sequence[Completion]]) -> list[Row]:
        return [
            _row(job.prompt_ids, completion, self._random.uniform(-0.005, 0.005))
            for job, group in zip(jobs, groups, strict=True)
            for completion in group
        ]

    def _step(self) -> None:
        self._engine.optim_step(
            learning_rate=self._job.learning_rate,
            beta1=0.9,
            beta2=0.95,
            eps=1e-12,
            weight_decay=0.0,
            grad_clip_norm=1.0,
        )
        self._engine.publish()


def watched(bench: Bench, job: Job) -> tuple[float, float]:
    """Processor seconds an update of a run's scheduler and of its engine; Linux only."""
    process = subprocess.Popen(
        bench.command(job), cwd=bench.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    seen: list[tuple[int, float, float]] = []
    try:
        while process.poll() is None and (not seen or seen[-1][0] < job.updates - 1):
            time.sleep(0.02)
            made = len(bench.rows(job)) if any(bench.folder.glob("runs/*/*/steps.jsonl")) else 0
            if made > (seen[-1][0] if seen else 0):
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                [engine] = children.split()
                seen.append((made, _cpu(process.pid), _cpu(int(engine))))
    finally:
        process.terminate()
        process.wait()
    if len(seen) < 2:
        raise SystemExit("`loops run` ended too soon to be watched: give more --updates")
    updates, scheduler, engine_seconds = np.subtract(seen[-1], seen[0]).tolist()
    return scheduler / updates, engine_seconds / updates


def report(
    scheduler: float, engine: float, calls: Mapping[str, float], shares: Mapping[str, Counter[str]]
) -> str:
    """Two tables in Markdown."""
    rest = {"engine: HTTP, JSON and the rest": engine - sum(calls.values())}
    parts = {"scheduler's process": scheduler, **calls, **rest}
    lines = ["| of an update | s | share |", "| --- | ---: | ---: |"]
    lines += [f"| {k} | {s:.3f} | {s / (scheduler + engine):.0%} |" for k, s in parts.items()]
    lines += ["", f"| torch, of its time in | {' | '.join(shares)} |"]
    lines.append(f"| --- |{' ---: |' * len(shares)}")
    kinds = sum(shares.values(), Counter[str]())
    for kind, _ in kinds.most_common():
        lines.append(f"| {kind} | {' | '.join(f'{each[kind]:.0%}' for each in shares.values())} |")
    return "\n".join(lines)


def _cpu(pid: int) -> float:
    """Of all its threads, as the 14th and 15th field of its `stat` say; a name may hold blanks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _row(prompt: list[int], completion: Completion, advantage: float) -> Row:
    ids = np.array([*prompt, *completion.ids], np.int32)
    sampled = len(completion.ids)
    logprobs, advantages = np.zeros((2, len(ids) - 1), np.float32)
    logprobs[-sampled:], advantages[-sampled:] = completion.logprobs, advantage
    targets = ids[1:].astype(np.int64)
    return Row(ids[:-1], target_ids=targets, logprobs=logprobs, advantages=advantages)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def _profiled(work: Callable[[], T]) -> tuple[Counter[str], T]:
    with profile() as profiled:
        result = work()
    shares: Counter[str] = Counter()
    for event in profiled.key_averages():
        kind = next((kind for part, kind in KINDS.items() if part in event.key), "other")
        shares[kind] += event.self_cpu_time_total
    total = sum(shares.values())
    return Counter({kind: spent / total for kind, spent in shares.items()}), result


def main() -> None:
    """Watch a run, measure the calls, print."""
    parser = argparse.ArgumentParser(description="Where the seconds of an update go.")
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("--updates", type=int, default=5)
    arguments = parser.parse_args()
    tasks, is_pinned = EXAMPLES[arguments.example]
    if is_pinned and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), arguments.example, tasks(), arguments.updates)
        job = bench.drawn(0)
        scheduler, engine = watched(bench, job)
        instrument = Instrument(job)
        updates = [instrument.update(update) for update in range(job.updates)][1:]
        calls = {name: fmean(update[name] for update in updates) for name in updates[0]}
        print(report(scheduler, engine, calls, instrument.shares(0)))


if __name__ == "__main__":
    main()
