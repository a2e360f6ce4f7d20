"""Whole runs of the command on the embedded engine: real gradients, real processes, real files."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(240)]

LOOPS = str(Path(sys.executable).with_name("loops"))
SMALL = (
    "training.updates=3",
    "training.groups_per_update=2",
    'evaluation.sets={held_out={tasks="held_out.jsonl", attempts=1}}',
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `loops run` of the counting example in a folder of its own; ends it with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(
        *settings: str, config: str = "examples/counting/train.toml"
    ) -> subprocess.Popen[str]:
        command = [LOOPS, "run", config]
        for setting in settings:
            command += ["--set", setting]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def run_folder(project: Path, name: str = "counting") -> Path:
    (folder,) = (project / "runs" / name).iterdir()
    return folder


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to pass in time"
        time.sleep(0.05)


def engine_pid(folder: Path) -> int:
    """The process that holds the engine's log open, as the system tells it."""
    log = str(folder / "engine.log")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "fd" / "2") == log:
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError("there is no engine")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_run_trains_on_policy_and_leaves_whole_records(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, temperature: float
) -> None:
    """Trainer and sampler agree to 1e-3 in every update, also after updates and at 0.6."""
    status, out, err = finished(start(*SMALL, f"sampling.temperature={temperature}"))
    assert status == 0, err
    folder = run_folder(tmp_path)
    steps = rows(folder / "steps.jsonl")
    assert [step["update"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert abs(float(str(step["kl/sample_train_k1"]))) < 1e-3
        assert float(str(step["kl/sample_train_k3"])) < 1e-6
        assert float(str(step["grad_norm"])) > 0
    rollouts = rows(folder / "rollouts.jsonl")
    assert len({(row["group"], row["attempt"]) for row in rollouts}) == len(rollouts)
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "done"
    assert run["counts"]["attempts/started"] == len(rollouts)
    evaluations = rows(folder / "evaluations.jsonl")
    assert [row["update"] for row in evaluations] == [0, 3]
    transcripts = list((folder / "transcripts").iterdir())
    assert len(transcripts) == len(rollouts) + 2 * 128
    assert out.splitlines()[-1].startswith(f"policy: {folder}@3 (the best: eval/held_out/")


def test_a_second_run_makes_a_second_folder(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    first, second = start(*SMALL), start(*SMALL)
    assert finished(first)[0] == finished(second)[0] == 0
    assert len(list((tmp_path / "runs" / "counting").iterdir())) == 2


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_in_order(
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    number: signal.Signals,
    status: int,
) -> None:
    process = start("training.updates=100000", *SMALL[1:])
    wait_for(lambda: bool(list(tmp_path.glob("runs/counting/*/steps.jsonl"))))
    folder = run_folder(tmp_path)
    wait_for(lambda: len(rows(folder / "steps.jsonl")) > 1)
    engine = engine_pid(folder)
    process.send_signal(number)
    code, out, err = finished(process)
    assert code == status
    assert "Traceback" not in err
    assert not is_alive(engine)
    run = json.loads((folder / "run.json").read_text())
    assert run["status"] == "interrupted"
    assert out.splitlines()[-1] == f"run: {folder}"
    words = shlex.split(err.splitlines()[-1])  # it may be started by its path
    assert words[:3] == ["go", "on", "with:"]
    assert words[4:6] == ["run", "examples/counting/train.toml"]
    assert words[6::2] == ["--set"] * 3 + ["--resume"]
    assert words[-1] == str(folder)
    counts = run["counts"]
    assert counts["attempts/finished"] == len(rows(folder / "rollouts.jsonl"))
    assert counts["attempts/started"] == counts["attempts/finished"]


def test_an_engine_that_is_killed_ends_the_run_with_one_line(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start("training.updates=100000", *SMALL[1:])
    wait_for(lambda: bool(list(tmp_path.glob("runs/counting/*/steps.jsonl"))))
    folder = run_folder(tmp_path)
    wait_for(lambda: len(rows(folder / "steps.jsonl")) > 1)
    os.kill(engine_pid(folder), signal.SIGKILL)
    code, _, err = finished(process)
    assert code == 1
    assert "Traceback" not in err
    assert [line for line in err.splitlines() if line.startswith("loops: ")][-1].startswith(
        "loops: the embedded engine ended with SIGKILL"
    )
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"


def test_an_engine_does_not_outlive_a_command_that_is_killed(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start("training.updates=100000", *SMALL[1:])
    wait_for(lambda: bool(list(tmp_path.glob("runs/counting/*/steps.jsonl"))))
    folder = run_folder(tmp_path)
    wait_for(lambda: len(rows(folder / "steps.jsonl")) > 1)
    engine = engine_pid(folder)
    process.kill()
    process.wait()
    wait_for(lambda: not is_alive(engine), seconds=10)
    for name in ("steps", "groups", "rollouts", "evaluations"):
        rows(folder / f"{name}.jsonl")


def test_an_sft_run_learns_from_random_weights_and_leaves_whole_records(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """In one epoch of large batches it begins to answer with a number and to end its turn."""
    settings = ("training.epochs=1", "training.batch_size=256", "training.warmup=5")
    config = "examples/sft_orders/train.toml"
    status, out, err = finished(start(*settings, "evaluation.samples=8", config=config))
    assert status == 0, err
    folder = run_folder(tmp_path, "sft_orders")
    steps = rows(folder / "steps.jsonl")
    assert [step["update"] for step in steps] == list(range(1, 61))
    assert steps[-1]["epoch"] == 1
    before, after = rows(folder / "evaluations.jsonl")
    assert float(str(before["loss"])) > 3
    assert float(str(after["loss"])) < 2
    assert (before["update"], after["update"]) == (0, 60)
    assert len(list((folder / "transcripts").iterdir())) == 2 * 8
    run = json.loads((folder / "run.json").read_text())
    assert (run["status"], run["counts"]["rows"]) == ("done", 15360)
    assert "evaluation   updates   loss" in out


def test_a_run_says_what_it_waits_for_when_it_is_asked(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start("training.updates=100000", 'training.mode="async"', *SMALL[1:])
    wait_for(lambda: bool(list(tmp_path.glob("runs/counting/*/steps.jsonl"))))
    folder = run_folder(tmp_path)
    wait_for(lambda: len(rows(folder / "steps.jsonl")) > 1)
    process.send_signal(signal.SIGQUIT)
    wait_for(lambda: "the run waits for:" in (folder / "log.txt").read_text())
    process.send_signal(signal.SIGINT)
    code, _, err = finished(process)
    assert code == 130
    assert "\n  slots: starting " in err
    stale = [row["policy/staleness_max"] for row in rows(folder / "steps.jsonl")]
    assert all(float(str(age)) <= 2 for age in stale)


BLOCKS = """
import time

from pydantic import BaseModel

from loops_cookbook.episodes import Episode, Grading, Sampling


class Question(BaseModel):
    question: str


class Blocks(Episode[Question, None]):
    async def run(self, sample: Sampling) -> None:
        messages = [{"role": "user", "content": self.task.value.question}]
        await sample.model.conversation().generate(messages)

    async def grade(self, grading: Grading) -> float:
        time.sleep(1000)
        return 1.0
"""


def test_a_run_that_a_blocked_event_loop_ends_says_so_in_its_records(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Its status was `running` for ever, and its line did not look like the command's others."""
    project = tmp_path / "examples" / "counting"
    project.mkdir(parents=True)
    (project / "blocks.py").write_text(BLOCKS)
    (project / "tasks.jsonl").write_text('{"question": "orders: paid. how many are paid?"}\n')
    (project / "train.toml").write_text(
        'recipe = "rl"\n'
        'model = {name = "models/counting", max_seq_len = 64}\n'
        'episode = {class = "blocks:Blocks", tasks = "tasks.jsonl"}\n'
        "training = {group_size = 2}\n"
        "sampling = {max_tokens = 4}\n"
        "clocks = {rollout_seconds = 1, setup_seconds = 1, grading_seconds = 1, "
        "release_seconds = 1}\n"
    )
    code, _, err = finished(start())
    assert code == 1
    (line,) = [line for line in err.splitlines() if line.startswith("loops: ")]
    assert "blocks.py:19 in grade" in line
    run = json.loads((run_folder(tmp_path) / "run.json").read_text())
    assert run["status"] == "failed"
    assert f"loops: {run['reason']}" == line
    assert run["counts"]["attempts/started"] >= 0
