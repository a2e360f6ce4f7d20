"""1,024 one-turn attempts of 200 ms each, beside tinker-cookbook's `do_group_rollout`.

    python benchmarks/attempts.py --peer-python PATH [--attempts 1024] [--rounds 5] [--trace off]

Ours is a whole update: `run_rl` with a scripted sampler and a recording trainer, which renders,
samples, parses, grades, judges, makes datums and writes every record of a run folder, transcripts
included. The peer's is its `do_group_rollout` alone, over the same groups at once, which writes
nothing; so beside the wall of the update stands that of its attempts, until the last has ended. A
round is one process of each, one after the other, after a group to warm up. Printed are
medians over the rounds; a ratio is taken within a round. Beside it stands what as many files of
that size cost there by themselves. Run folders are removed at the end only: where many files were
removed in the last minutes, ext4 looks long for a place for a new one. The peer (tinker-cookbook
0.5.0) needs an environment of its own; without `--peer-python` only ours is measured.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median

import anyio

from loops_cookbook.attempts import Attempt
from loops_cookbook.cli.collector import collecting_seldom
from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.journal import read_rows, write_atomically
from loops_cookbook.recipes.plan import Plan, plan_run
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.records import RunRow
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.write import RunWriter, Trace
from loops_cookbook.services.base import SampleParams
from loops_cookbook.testing import PlainRenderer, ScriptedSampler, ScriptedService
from loops_cookbook.tokens import Ids, SampledTokens, ids_of, logprobs_of

GROUP_SIZE = 16
SECONDS = 0.2
"""What each call of the sampler takes."""

EPISODE = """
from pydantic import BaseModel

from loops_cookbook.episodes import Episode, Grading, Sampling


class Question(BaseModel):
    question: str
    answer: str


class Answer(Episode[Question, None]):
    async def run(self, sample: Sampling) -> dict[str, bool]:
        reply = await sample.model.conversation().generate(
            [{"role": "user", "content": self.task.value.question}]
        )
        self.said = reply.content or ""
        return {"short": len(self.said) < 40}

    async def grade(self, grading: Grading) -> float:
        return float(self.task.value.answer in self.said)
"""

CONFIG = """
recipe = "rl"
[model]
name = "bench/policy"
[episode]
class = "bench_episode:Answer"
tasks = "tasks.jsonl"
[training]
updates = 1
group_size = {size}
groups_per_update = {groups}
"""


def main() -> None:
    """Measure, or be one of the processes that is measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attempts", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", help="of an environment with tinker-cookbook 0.5.0")
    parser.add_argument("--trace", choices=("full", "off"), default="full", help="transcripts")
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ours:
        print(json.dumps(ours(given.attempts // GROUP_SIZE, given.trace)))
        return
    peer = Path(__file__).with_name("peer_attempts.py")
    commands = {"loops": [sys.executable, __file__, "--ours"]}
    commands["loops"] += [f"--attempts={given.attempts}", f"--trace={given.trace}"]
    if given.peer_python:
        commands["peer"] = [given.peer_python, str(peer), str(given.attempts), str(SECONDS)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder
        rounds = [
            {who: measured(command) for who, command in commands.items()}
            for _ in range(given.rounds)
        ]
    for who in commands:
        told(who, [each[who] for each in rounds], given.attempts)
    files = median(each["loops"]["files"] for each in rounds)
    print(f"the files of the transcripts alone: {files / given.attempts * 1e6:.0f} us an attempt")
    if given.peer_python:
        ratios = sorted(each["loops"]["cpu"] / each["peer"]["cpu"] for each in rounds)
        print(f"CPU, loops / peer: {median(ratios):.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f})")


def measured(command: Sequence[str]) -> Mapping[str, float]:
    """What one process says of itself."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def told(who: str, figures: Sequence[Mapping[str, float]], attempts: int) -> None:
    """Print the medians of one of the two."""
    keys = ("cpu", "wall", "ended", "rss")
    cpu, wall, ended, rss = (median(each[key] for each in figures) for key in keys)
    print(
        f"{who}: {cpu / attempts * 1e6:.0f} us of CPU an attempt; wall {wall:.2f} s, "
        f"{wall - SECONDS:.2f} s above the ideal, and {ended - SECONDS:.2f} s until the last "
        f"attempt had ended; RSS {rss:.0f} MB"
    )


def ours(groups: int, trace: Trace) -> dict[str, float]:
    """One update of so many groups, with all its records."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    root = Path(tempfile.mkdtemp())  # within a folder that is removed at the end
    os.chdir(root)
    (root / "bench_episode.py").write_text(EPISODE)
    carry_out(planned(root, 1), root, trace)  # to warm up
    plan = planned(root, groups)
    wall, cpu = time.perf_counter(), time.process_time()
    folder, ended = carry_out(plan, root, trace)
    figures = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}
    figures["ended"] = ended - wall
    rows = sum(1 for _ in read_rows(folder.rollouts))
    texts = [path.read_text() for path in folder.transcripts.iterdir()]
    if rows != groups * GROUP_SIZE or len(texts) != (rows if trace == "full" else 0):
        raise SystemExit(f"{rows} rows and {len(texts)} transcripts were written")
    figures["rss"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**figures, "files": written(texts, root / "files")}


def written(texts: Sequence[str], folder: Path) -> float:
    """Seconds of CPU that writing such files takes, without what else an attempt does."""
    folder.mkdir()
    began = time.process_time()
    for number, text in enumerate(texts):
        write_atomically(f"{folder}/{number}.json", text)
    return time.process_time() - began


def planned(root: Path, groups: int) -> Plan:
    """A run of one update, with a renderer that needs no download."""
    tasks = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(groups)]
    (root / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (root / "train.toml").write_text(CONFIG.format(size=GROUP_SIZE, groups=groups))
    loaded = load_config(str(root / "train.toml"), [])
    plan = plan_run(loaded, read_environment(loaded.directory), {}, None)
    return replace(plan, detection=replace(plan.detection, renderer=PlainRenderer()))


class Sums(ScriptedSampler):
    """Says a number after a while; as lean as the peer's."""

    def __init__(self) -> None:
        super().__init__(())
        self._asked = count()

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        """The next reply."""
        call = next(self._asked)
        prompt = bytes(i for i in prompt_ids.tolist() if i < self.tokenizer.end_id).decode()
        await anyio.sleep(SECONDS)
        reply = f"I think that it is {2 * int(prompt.split()[2]) + call % 2}."
        ids = [*reply.encode(), self.tokenizer.end_id]
        logprobs = logprobs_of([-(1 + i % 8) / 8 for i in ids])
        return (SampledTokens(ids_of(ids), logprobs, "stop", self.policy_version),)


class Writer(RunWriter):
    """Knows when an attempt was recorded last."""

    ended = 0.0

    def attempt_ended(self, attempt: Attempt, purpose: str) -> None:
        """Write its transcript."""
        super().attempt_ended(attempt, purpose)
        self.ended = time.perf_counter()


def carry_out(plan: Plan, root: Path, trace: Trace) -> tuple[RunFolder, float]:
    """The run, recorded in a new folder, and when its last attempt had ended."""

    training = plan.config.training
    row = RunRow(
        run="bench",
        started_at=0.0,
        recipe="rl",
        scope="local",
        model=plan.model.name,
        updates=training.updates,
        attempts_per_update=training.groups_per_update * training.group_size,
        tasks={"train": len(plan.tasks)},
        service={},
        versions={},
        config_path="train.toml",
        config={},
    )
    folder = new_run_folder("runs", root)
    service = ScriptedService(Sums())
    with Writer(folder, trace=trace) as writer, collecting_seldom():
        anyio.run(run_rl, plan, service, writer, row)
    return folder, writer.ended


if __name__ == "__main__":
    main()
