"""Supervised fine-tuning, stopped and gone on with; then RL from what came of it, in both ways."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loops_cookbook.config.bundled import bundled_root

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(500)]

LOOPS = str(Path(sys.executable).with_name("loops"))
SFT = (
    *("run", "examples/sft_orders/train.toml", "--set", "training.epochs=1"),
    *("--set", "training.batch_size=32", "--set", "training.warmup=5"),
    *("--set", "training.checkpoint_every=7", "--set", "evaluation={every=0, samples=8}"),
)
RL = (
    *("run", "examples/counting/train.toml", "--set", "training.updates=1"),
    *("--set", "training.groups_per_update=2"),
    *("--set", 'evaluation.sets={greedy={tasks="held_out.jsonl", attempts=1, temperature=0}}'),
)


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [LOOPS, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def few_rows(folder: Path) -> tuple[str, str]:
    """An option by which an SFT run has 2,048 rows, and so 64 updates."""
    lines = (bundled_root() / "examples/sft_orders/train.jsonl").read_text().splitlines()[:2048]
    path = folder / "few.jsonl"
    path.write_text("\n".join(lines))
    return "--set", f'data.train="{path}"'


def loops(folder: Path, *arguments: str) -> tuple[str, str]:
    process = begin(folder, *arguments)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out, err


def the_run(folder: Path, name: str) -> Path:
    (run,) = (folder / "runs" / name).iterdir()
    return run


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewards(run: Path) -> list[object]:
    """Of each held-out task, before the first update."""
    tasks = rows(run / "evaluations.jsonl")[0]["tasks"]
    return [task["rewards"] for task in tasks]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a run of a few rows, whose policy can answer and hardly count."""
    folder = tmp_path_factory.mktemp("trained")
    loops(folder, *SFT, *few_rows(folder))
    return folder


def test_an_rl_run_begins_with_an_sft_run_by_one_line_or_by_its_model(
    trained: Path, tmp_path: Path
) -> None:
    run = the_run(trained, "sft_orders")
    of_it = f'model.start_from="{run}"'
    _, err = loops(tmp_path, *RL, "--set", of_it, "--set", "model.lora_rank=0")
    begun = the_run(tmp_path, "counting")
    assert "greedy before the first update" in err
    assert [1.0] in rewards(begun)

    by_model = tmp_path / "by_model"
    by_model.mkdir()
    loops(by_model, "export", str(run), "policy", "--merged")
    loops(by_model, *RL, "--set", 'model.name="policy"')  # which trains an adapter
    assert rewards(begun) == rewards(the_run(by_model, "counting"))

    loops(tmp_path, *RL, "--set", 'output.output_dir="runs/bundled"')
    assert rewards(begun) != rewards(the_run(tmp_path, "bundled"))


def test_an_interrupted_sft_run_goes_on_to_the_same_policy(trained: Path, tmp_path: Path) -> None:
    rows_of = few_rows(tmp_path)
    process = begin(tmp_path, *SFT, *rows_of)
    until = time.monotonic() + 100
    while not list(tmp_path.glob("runs/sft_orders/*/checkpoints.jsonl")):
        assert time.monotonic() < until, "no checkpoint was saved in time"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode == 130

    out, _ = loops(tmp_path, *SFT, *rows_of, "--resume")
    run, whole = the_run(tmp_path, "sft_orders"), the_run(trained, "sft_orders")
    assert [row["update"] for row in rows(run / "steps.jsonl")] == list(range(1, 65))
    ends = [rows(each / "evaluations.jsonl")[-1]["loss"] for each in (run, whole)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)
    assert "held_out     0 → 64" in out
