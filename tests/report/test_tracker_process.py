"""A tracker that fails, hangs or dies is felt by nobody, and a run that dies leaves it whole."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.report.tracker_double import TrackerDouble

from loops_cookbook.report.tracker_process import TrackerProcess

BEGIN = {"do": "begin", "project": "p", "id": "a-run", "folder": ".", "config": {}}
END = {"do": "end", "status": "done", "reason": None, "counts": {}}
KEY = "a-key-of-the-user"


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackerDouble:
    double = TrackerDouble(tmp_path, monkeypatch)
    double.set(WANDB_API_KEY=KEY)
    return double


def log(update: int, **metrics: float) -> dict[str, object]:
    return {"do": "log", "update": update, "metrics": metrics or {"loss": 0.5}, "is_whole": True}


def track(*messages: dict[str, object], name: str = "wandb", seconds: float = 20.0) -> list[str]:
    """Tell a tracker this; the warnings."""
    notes: list[tuple[str, str]] = []
    with TrackerProcess(name, lambda *said: notes.append(said), seconds) as process:
        for message in messages:
            process.send(message)
    assert process._process.poll() is not None  # pyright: ignore[reportPrivateUsage]
    return [text for level, text in notes if level == "warning"]


def test_a_tracker_that_a_whole_job_is_told_to_end_with_still_sends_what_it_has(
    double: TrackerDouble,
) -> None:
    """systemd sends SIGTERM to every process of a unit, and the end of the run was lost."""
    with TrackerProcess("wandb", lambda *said: None) as process:
        process.send(BEGIN)
        while not double.calls:
            time.sleep(0.01)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(process._process.pid, number)  # pyright: ignore[reportPrivateUsage]
        process.send({**END, "status": "interrupted"})
    assert double.calls[-1] == ["finish", 1]


def test_a_tracker_that_cannot_begin_is_one_warning_without_a_key(double: TrackerDouble) -> None:
    double.set(FAULTS="fail:init")
    assert track(BEGIN, *(log(update) for update in range(99)), END) == [
        "wandb: could not begin (OSError: no init with [key]); the run goes on without it; "
        "steps.jsonl has everything"
    ]
    assert double.calls == []


def test_a_row_that_cannot_be_sent_is_told_once_and_the_others_are_tried(
    double: TrackerDouble,
) -> None:
    double.set(FAULTS="fail:log")
    (warning,) = track(BEGIN, log(1), log(2), log(3), END)
    assert warning.startswith("wandb: could not log (OSError: no log with [key]); it goes on")
    assert double.calls[-1] == ["finish", 0]


def test_what_a_package_warns_of_is_told_once(double: TrackerDouble) -> None:
    warnings = track(BEGIN, log(1), log(2), END, name="trackio")
    assert warnings == ["trackio: trackio.log() is not sent yet"]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_tracker_that_dies_is_one_warning(double: TrackerDouble, call: str) -> None:
    double.set(FAULTS=f"exit:{call}")
    big = {"text": "x" * 1_000_000}  # more than a pipe takes, so that its end is noticed
    messages = [BEGIN, log(1), END] if call == "finish" else [BEGIN, log(1), {"do": "log", **big}]
    assert track(*messages) == ["wandb: its process ended; steps.jsonl has what it lacks"]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_tracker_that_hangs_holds_the_end_no_longer_than_it_may(
    double: TrackerDouble, call: str
) -> None:
    double.set(FAULTS=f"stuck:{call}")
    rows = [log(update, **{f"metric/{i}": 0.5 for i in range(99)}) for update in range(99)]
    (warning,) = track(BEGIN, *rows, END, seconds=0.3)
    assert warning.startswith("wandb: has not sent everything within 0.3 s after the end of the")
    assert "`wandb sync`" in warning


def test_more_than_the_pipe_takes_arrives_later(double: TrackerDouble) -> None:
    rows = [log(update, **{f"metric/{i}": 0.5 for i in range(999)}) for update in range(1, 99)]
    assert track(BEGIN, *rows, END) == []
    assert [row["update"] for row, *_ in double.named("log")] == list(range(1, 99))  # pyright: ignore[reportIndexIssue]


def test_the_rows_of_a_run_that_is_killed_arrive(double: TrackerDouble) -> None:
    program = f"""
import os, signal
from loops_cookbook.report.tracker_process import TrackerProcess
with TrackerProcess("wandb", lambda *said: None) as process:
    for message in {[BEGIN, log(1), log(2)]!r}:
        process.send(message)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode == -signal.SIGKILL
    for _ in range(500):
        if double.named("finish"):
            break
        time.sleep(0.02)
    assert [row["update"] for row, *_ in double.named("log")] == [1, 2]  # pyright: ignore[reportIndexIssue]
    told = {"status": "killed", "reason": "the run's process is gone"}
    assert double.calls[-2:] == [["summary", told], ["finish", 1]]


def test_a_tracker_that_hangs_does_not_outlive_a_run_that_is_killed() -> None:
    program = """
import os, sys, time
from loops_cookbook.report.tracking import outlive
parent = os.getpid()
if os.fork() == 0:
    outlive(parent, look_seconds=0.05, last_seconds=0.05)
    time.sleep(600)
time.sleep(0.2)
print("gone", flush=True)
os._exit(0)
"""
    # stdout ends with the last of both, so this waits for the one that hangs.
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30)
    assert ended.stdout == b"gone\n"


def test_an_interrupt_while_it_is_waited_for_ends_it(double: TrackerDouble) -> None:
    """Ctrl-C at the end of a run must not leave a process behind."""
    double.set(FAULTS="stuck:finish")
    program = f"""
import os, signal, threading
from loops_cookbook.report.tracker_process import TrackerProcess
with TrackerProcess("wandb", lambda *said: None) as process:
    print(process._process.pid, flush=True)
    for message in {[BEGIN, END]!r}:
        process.send(message)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "KeyboardInterrupt" in ended.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(ended.stdout), 0)


def test_the_package_is_not_looked_for_in_the_working_directory(
    double: TrackerDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb leaves a folder of its own name where it is used."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "wandb.py").write_text("raise RuntimeError('a module of the project')")
    monkeypatch.chdir(tmp_path / "here")
    assert track(BEGIN, log(1), END) == []
    assert json.dumps(double.calls[-1]) == '["finish", 0]'
