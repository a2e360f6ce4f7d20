"""Checkpoints of the embedded engine, evaluated and exported by the command as users would."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from loops_cookbook.config.bundled import bundled_root
from loops_cookbook.local.engine import Engine, EngineSettings, Row
from loops_cookbook.local.places import Place
from loops_cookbook.records import RunRow
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.rows import CheckpointRow

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(240)]

LOOPS = str(Path(sys.executable).with_name("loops"))
CONFIG = "examples/counting/train.toml"
SET = 'evaluation={every=0, sets={greedy={tasks="held_out.jsonl", attempts=1, temperature=0}}}'
RUN = RunRow(
    run="20260101-000000-abcd",
    started_at=0.0,
    recipe="rl",
    scope="local",
    model="models/counting",
    updates=4,
    attempts_per_update=4,
    tasks={},
    service={},
    versions={},
    config_path=str(bundled_root() / CONFIG),
    config={},
)
SAYS_ONE = Row(np.array([2, 5, 6, 7, 4, 3], np.int32), np.array([5, 6, 7, 4, 3, 18]))
"""A row that teaches to say the same whatever is asked."""


@pytest.fixture
def trained_run(tmp_path: Path) -> Callable[[int], Path]:
    """A run whose policy was taught something useless, so that it is seen to be loaded."""

    def make(lora_rank: int) -> Path:
        folder = RunFolder(tmp_path / "trained" / RUN.run)
        model = {"name": "models/counting", "lora_rank": lora_rank, "lora_alpha": 32.0}
        engine = Engine(
            EngineSettings(
                model_dir=bundled_root() / "models" / "counting",
                model_name="models/counting",
                max_seq_len=64,
                lora_rank=lora_rank,
                lora_alpha=32.0,
                seed=0,
                device="cpu",
                threads=1,
                checkpoints=folder.checkpoints,
            )
        )
        for _ in range(4):
            engine.forward_backward([SAYS_ONE], "cross_entropy", None)
            engine.optim_step(
                learning_rate=2e-2,
                beta1=0.9,
                beta2=0.95,
                eps=1e-12,
                weight_decay=0.0,
                grad_clip_norm=1.0,
            )
        place = Place(RUN.run, "weights", "update-000004")
        engine.save(place)
        folder.run.write_text(json.dumps(replace(RUN, config={"model": model}).to_json()))
        row = CheckpointRow(
            update=4,
            name=place.name,
            path=str(place),
            folder=str(place.folder(folder.checkpoints).relative_to(folder.root)),
            at=0.0,
        )
        folder.checkpoint_rows.write_text(json.dumps(row.to_json()) + "\n")
        return folder.root

    return make


def start(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [LOOPS, *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def rewards(row: dict[str, object]) -> list[object]:
    return [task["rewards"] for task in row["tasks"]]  # type: ignore[index,attr-defined]


@pytest.mark.parametrize("lora_rank", [0, 16])
def test_a_checkpoint_is_compared_with_the_base_and_is_the_same_once_exported(
    trained_run: Callable[[int], Path], tmp_path: Path, lora_rank: int
) -> None:
    run = trained_run(lora_rank)
    rank = f"model.lora_rank={lora_rank}"
    asked = ["eval", CONFIG, "--checkpoint", "base", "--checkpoint", str(run), "--json"]
    status, out, err = finished(start(tmp_path, *asked, "--set", SET, "--set", rank))
    assert status == 0, err
    told = json.loads(out)
    base, trained = told["evaluations"]
    assert (base["policy"], trained["policy"]) == ("base", f"{run}@4")
    assert trained["update"] == 4
    assert rewards(base) != rewards(trained)
    (compared,) = told["comparisons"]
    assert compared["reward"]["p_value"] < 0.01
    folder = Path(told["run"])
    recorded = json.loads((folder / "run.json").read_text())
    assert (recorded["recipe"], recorded["status"]) == ("eval", "done")
    assert len(list((folder / "transcripts").iterdir())) == 2 * 128

    model = tmp_path / "model"
    status, out, err = finished(start(tmp_path, "export", str(run), "model", "--merged"))
    assert (status, out) == (0, f"{model}\n"), err
    named = f'model.name="{model}"'
    asked = ["eval", CONFIG, "--json", "--set", named, "--set", SET, "--set", rank]
    status, out, err = finished(start(tmp_path, *asked))
    assert status == 0, err
    assert rewards(json.loads(out)["evaluations"][0]) == rewards(trained)


def test_a_signal_ends_an_evaluation_in_order(tmp_path: Path) -> None:
    long = SET.replace("attempts=1", "attempts=4000").replace("temperature=0", "temperature=1.0")
    process = start(tmp_path, "eval", CONFIG, "--set", long)
    until = time.monotonic() + 100
    while not list(tmp_path.glob("runs/counting/*/transcripts/*.json")):
        assert time.monotonic() < until, "no attempt ended in time"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    status, out, err = finished(process)
    assert status == 130
    assert out == ""
    assert "Traceback" not in err
    (folder,) = tmp_path.glob("runs/counting/*")
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
