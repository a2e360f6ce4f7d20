"""Signals amid every phase of a run, as real processes: bounded, said, recorded, resumed.

The policy is the one of numpy in `patterns/custom_runtime/own_service`, so that a run begins within
a second. Its Episode stands still where its environment says.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tests.report.tracker_double import TrackerDouble

from loops_cookbook.rundir.read import RecordedRun, open_run
from loops_cookbook.sandboxes import bubblewrap
from loops_cookbook.sandboxes.ledger import open_entries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

Process: TypeAlias = "subprocess.Popen[str]"
LOOPS = str(Path(sys.executable).with_name("loops"))
PATTERN = Path(__file__).parents[2] / "patterns" / "custom_runtime" / "own_service"
EPISODE = """
import asyncio
import os
import random
import re
import threading
import time
from pathlib import Path

import anyio
import anyio.to_thread
from count_episode import CountTask

from loops_cookbook.episodes import Episode, Grading, GroupGrading, Sampling, Setup


def sleep() -> None:
    time.sleep(600)


async def hold(phase: str) -> None:
    if phase != os.environ.get("HOLD") or not Path("hold").exists():
        return
    Path("here").touch()
    match os.environ.get("HOW"):
        case "ignores":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    pass
        case "blocks":
            time.sleep(600)
        case "computes":
            re.match("(a+)+b", "a" * 60)
        case "thread":
            await anyio.to_thread.run_sync(sleep)
        case "leaves a thread":
            threading.Thread(target=sleep).start()
    await anyio.sleep_forever()


class Holds(Episode[CountTask, None]):
    async def setup(self, setup: Setup) -> None:
        if os.environ.get("SANDBOX"):
            self.sandbox = await setup.sandbox()
        await hold("setup")

    async def run(self, sample: Sampling) -> None:
        await hold("run")
        if os.environ.get("HOLD") == "compute":
            Path("here").touch()
            await sample.compute(sleep)
        if os.environ.get("HOLD") == "exec":
            Path("here").touch()
            await self.sandbox.exec("sleep 600", timeout=600)
        asked = [{"role": "user", "content": self.task.value.instruction}]
        await sample.model.conversation().generate(asked)

    async def grade(self, grading: Grading) -> float:
        await hold("grading")
        return random.random()

    async def close(self) -> None:
        await hold("close")


class GradesGroups(Holds):
    @classmethod
    async def grade_group(cls, group: GroupGrading) -> list[float]:
        await hold("grade_group")
        return [random.random() for _ in group.attempts]
"""
CONFIG = """
recipe = "rl"
compute = {scope = "numpy_service:create", options = {vocabulary = 31}}
model = {name = "models/counting", max_seq_len = 32}
episode = {class = "holds:Holds", tasks = "tasks.jsonl"}
sampling = {max_tokens = 1}
clocks = {release_seconds = 300}

[training]
updates = 100000
groups_per_update = 2
group_size = 4
learning_rate = 0.05
grad_clip = 0
loss = "importance_sampling"
checkpoint_every = 2
"""
TRAINER = """
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from holds import hold
from numpy_service import Create, Options

from loops_cookbook.services import LossSpec

SAMPLED = LossSpec("importance_sampling")


class Imitates(Create):
    @asynccontextmanager
    async def __call__(self, context):
        async with super().__call__(context) as service:
            train = service.trainer.train

            async def imitate(batch, loss, adam, *, key):
                await hold("train")
                likelier = [
                    replace(each, advantages=each.weights, logprobs=np.zeros_like(each.weights))
                    for each in batch
                ]
                return await train(likelier, SAMPLED, adam, key=key)

            service.trainer.train = imitate
            yield service


create = Imitates()
"""
SFT_CONFIG = """
recipe = "sft"
compute = {scope = "imitates:create", options = {vocabulary = 31}}
model = {name = "models/counting", max_seq_len = 64}
data = {train = "rows.jsonl"}

[training]
epochs = 5000
batch_size = 4
learning_rate = 0.05
schedule = "constant"
grad_clip = 0
checkpoint_every = 2
"""
SFT_ROW = """{"messages": [{"role": "user", "content": "orders: paid. how many are paid?"},
 {"role": "assistant", "content": "1"}]}"""
LONGEST_SECONDS = 60.0
"""For what ends at once, on a machine under load; far below the clock of the config."""


@dataclass(frozen=True)
class End:
    """How a command ended."""

    status: int
    out: str
    said: Sequence[str]
    """Its lines on stderr that begin with `loops:`."""
    err: str
    run: RecordedRun

    def require_whole(self) -> None:
        """Every attempt that was started has one row, or is told to be in flight."""
        counts = self.run.run.counts
        rows = list(self.run.rollouts())
        assert len(rows) == counts["attempts/finished"]
        assert len(rows) + counts["attempts/in_flight"] == counts["attempts/started"]
        trained = [(row.group, row.attempt) for row in rows if row.fate == "trained"]
        assert len(set(trained)) == len(trained)


@dataclass
class Project:
    """A folder with the config, and what was started in it."""

    folder: Path
    started: list[Process] = field(default_factory=list)

    def hold(self, phase: str, how: str = "", *settings: str, **more: str) -> Process:
        """Start a run that stands still in a phase, and wait until it does."""
        (self.folder / "hold").touch()
        process = self.start(*settings, resume=False, HOLD=phase, HOW=how, **more)
        wait_for((self.folder / "here").exists)
        return process

    def start(
        self, *settings: str, command: str = "run", resume: bool = False, **environ: str
    ) -> Process:
        """Start `loops` with the whole of a process group, as a terminal does."""
        words = [LOOPS, command, "train.toml", *(["--resume"] if resume else [])]
        for setting in settings:
            words += ["--set", setting]
        with (self.folder / "stderr").open("w") as stderr:
            return self.begin(words, environ, stdout=subprocess.PIPE, stderr=stderr)

    def begin(self, words: Sequence[str], environ: Mapping[str, str], **streams: Any) -> Process:
        """Start a command in a session of its own."""
        process = subprocess.Popen(
            words,
            cwd=self.folder,
            env={**os.environ, **environ, "STOPPED_IN": str(self.folder)},
            text=True,
            start_new_session=True,
            **streams,
        )
        self.started.append(process)
        return process

    def run(self) -> RecordedRun:
        """The one that there is."""
        (root,) = self.folder.glob("runs/*/*")
        return open_run(root)

    def stop(self, process: Process, *numbers: signal.Signals) -> End:
        """Send signals to the group, a while apart, and wait for the end."""
        for place, number in enumerate(numbers):
            time.sleep(0.5 if place else 0)
            os.killpg(process.pid, number)
        out, _ = process.communicate(timeout=LONGEST_SECONDS)
        err = (self.folder / "stderr").read_text()
        assert "Traceback" not in err
        said = [line for line in err.splitlines() if line.startswith("loops: ")]
        return End(process.returncode, out, said, err, self.run())

    def has_checkpoints(self) -> bool:
        rows = self.folder.glob("runs/*/*/checkpoints.jsonl")
        return any(path.read_text().count("\n") > 1 for path in rows)

    def left_over(self) -> list[int]:
        """Processes of this project that are still there."""
        pids = (each for each in Path("/proc").iterdir() if each.name.isdigit())
        return [int(each.name) for each in pids if self._is_ours(each)]

    @property
    def _mark(self) -> bytes:
        return f"STOPPED_IN={self.folder}".encode()

    def _is_ours(self, process: Path) -> bool:
        try:
            is_dead = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            return not is_dead and self._mark in (process / "environ").read_bytes()
        except OSError:
            return False


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    for name in ("numpy_service.py", "count_episode.py", "tasks.jsonl", "held_out.jsonl"):
        shutil.copy(PATTERN / name, tmp_path / name)
    (tmp_path / "holds.py").write_text(EPISODE)
    (tmp_path / "train.toml").write_text(CONFIG)
    project = Project(tmp_path)
    yield project
    for process in project.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    for pid in project.left_over():
        os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to pass in time"
        time.sleep(0.02)


BOX = 'sandbox={backend="local"}'
ENDED = {
    signal.SIGINT: (130, "loops: interrupted: "),
    signal.SIGTERM: (143, "loops: told to end (SIGTERM): "),
    signal.SIGHUP: (129, "loops: told to end (SIGHUP): "),
}
INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize(
    "phase", ["setup", "run", "grading", "grade_group", "close", "compute", "exec"]
)
def test_a_signal_amid_a_phase_ends_the_run_in_order(
    project: Project, phase: str, number: signal.Signals
) -> None:
    settings = []
    if phase == "exec":
        if bubblewrap.cannot_be_had():
            pytest.skip("no bubblewrap here")
        settings = [BOX]
    if phase == "grade_group":
        settings = ['episode.class="holds:GradesGroups"']
    if phase == "close":  # whose clock is all that ends it
        settings = ["clocks.release_seconds=1"]
    more = {"SANDBOX": "1"} if phase == "exec" else {}
    end = project.stop(project.hold(phase, "", *settings, **more), number)
    status, begins = ENDED[number]
    assert end.status == status
    (line,) = end.said
    assert line.startswith(begins)
    assert end.err.count("stopping") == 1
    assert (end.run.run.status, end.run.run.reason) == ("interrupted", f"stopped by {number.name}")
    end.require_whole()
    assert project.left_over() == []
    if phase == "exec":
        assert open_entries(end.run.folder.sandboxes) == ()


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("setup", "ignores"),
        ("run", "ignores"),
        ("run", "thread"),
        ("grading", "ignores"),
        ("close", "ignores"),
    ],
)
def test_a_second_signal_waits_for_no_code_that_ignores_the_first(
    project: Project, phase: str, how: str, number: signal.Signals
) -> None:
    """It changed nothing, and SIGTERM had the status of Ctrl-C then."""
    end = project.stop(project.hold(phase, how), number, number)
    status, begins = ENDED[number]
    assert end.status == status
    line, without = end.said
    assert line.startswith(begins)
    assert without.startswith("loops: ended without waiting for attempt 0 of group 0 (task ")
    assert f": {'release' if phase == 'close' else phase}, at holds.py:" in without
    assert end.run.run.status == "interrupted"
    end.require_whole()
    assert project.left_over() == []


@pytest.mark.parametrize("how", ["blocks", "computes"])
def test_a_second_signal_ends_a_run_whose_event_loop_is_held_and_it_can_be_resumed(
    project: Project, how: str
) -> None:
    """No signal but SIGKILL ended it, up to the longest clock, and its records said `running`."""
    process = project.start(HOLD="run", HOW=how)
    wait_for(project.has_checkpoints)
    (project.folder / "hold").touch()
    wait_for((project.folder / "here").exists)
    end = project.stop(process, INT, INT)
    assert end.status == 130
    line, without = end.said
    assert line.startswith("loops: interrupted: what it did is in ")
    *before, last = end.err.splitlines()
    assert last.startswith("go on with: ")
    assert "loops run train.toml --resume " in last
    assert "go on with" not in "".join((end.out, *before))
    assert without.startswith(
        "loops: ended without waiting for what holds the event loop, at holds.py:"
    )
    assert end.run.run.status == "interrupted"
    end.require_whole()
    assert project.left_over() == []
    require_resumes(project, end)


@pytest.mark.parametrize("numbers", [(INT,), (TERM,), (HUP, HUP), (INT, INT)], ids=str)
def test_a_run_that_was_stopped_goes_on_with_each_batch_trained_once(
    project: Project, numbers: Sequence[signal.Signals]
) -> None:
    process = project.start()
    wait_for(project.has_checkpoints)
    end = project.stop(process, *numbers)
    assert end.status == 128 + numbers[0]
    end.require_whole()
    require_resumes(project, end)


def require_resumes(project: Project, end: End) -> None:
    """A run goes on to a few updates more, and every attempt of every update is trained once."""
    (project.folder / "hold").unlink(missing_ok=True)
    updates = max(row.update for row in end.run.steps()) + 4
    resumed = project.stop(project.start(f"training.updates={updates}", resume=True))
    assert resumed.status == 0, resumed.err
    assert [row.update for row in resumed.run.steps()] == list(range(1, updates + 1))
    resumed.require_whole()
    *_, last = resumed.run.steps()  # whose totals have what was cut and is in no row
    totals = last.totals
    assert totals["attempts/started"] == totals["attempts/finished"] + totals["attempts/in_flight"]
    fates = Counter(row.fate.kind for row in resumed.run.rollouts())
    kinds = {kind: totals[f"attempts/{kind}"] for kind in ("trained", "unused", "discarded")}
    assert {kind: number for kind, number in kinds.items() if number} == fates
    # A group that was cut on its way into a batch has a row, and another once it is made again.
    trained = Counter(row.group for row in resumed.run.rollouts() if row.fate == "trained")
    assert len(trained) == 2 * updates
    assert set(trained.values()) == {4}


def test_one_signal_is_enough_for_code_that_ignores_it(project: Project) -> None:
    process = project.hold("run", "ignores", "clocks.release_seconds=0.1")
    end = project.stop(process, TERM)
    assert end.status == 143
    assert end.said[1].startswith("loops: ended without waiting for attempt 0 of group 0")
    end.require_whole()


@pytest.mark.parametrize("how", ["blocks", "computes"])
def test_one_signal_is_enough_for_code_that_holds_the_event_loop(
    project: Project, how: str
) -> None:
    end = project.stop(project.hold("run", how, "clocks.release_seconds=0.1"), TERM)
    assert end.status == 143
    assert end.said[1].startswith("loops: ended without waiting for what holds the event loop")
    end.require_whole()


def test_sandboxes_that_a_second_signal_left_are_said_and_cleaned_up(project: Project) -> None:
    if bubblewrap.cannot_be_had():
        pytest.skip("no bubblewrap here")
    end = project.stop(project.hold("run", "ignores", BOX, SANDBOX="1"), INT, INT)
    root = end.run.folder.root.relative_to(project.folder)
    many = len(open_entries(end.run.folder.sandboxes))
    assert many > 0
    what = f"{many} sandboxes" if many > 1 else "1 sandbox"
    assert end.said[-1].startswith(f"loops: {what} may be left: `")
    assert end.said[-1].endswith(f"loops cleanup {root}` sees to that")
    wait_for(lambda: project.left_over() == [])  # those die with who made them
    cleaned = subprocess.run([LOOPS, "cleanup", str(root)], cwd=project.folder, check=False)
    assert cleaned.returncode == 0
    assert open_entries(end.run.folder.sandboxes) == ()


def test_a_thread_that_user_code_left_is_not_waited_for_after_a_second_signal(
    project: Project,
) -> None:
    end = project.stop(project.hold("run", "leaves a thread"), INT, INT)
    assert end.status == 130
    assert end.said[0].startswith("loops: interrupted: ")
    end.require_whole()


def test_a_tracker_that_does_not_finish_is_not_waited_for_after_a_signal(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = TrackerDouble(project.folder, monkeypatch)
    double.set(FAULTS="stuck:finish")
    process = project.start("training.updates=2", 'output.wandb_project="p"')
    wait_for(lambda: any("done" in p.read_text() for p in project.folder.glob("runs/*/*/log.txt")))
    end = project.stop(process, INT)
    assert end.status == 130
    root = end.run.folder.root.relative_to(project.folder)
    assert end.said == [f"loops: interrupted: the run had come to its end; it is in {root}"]
    assert end.run.run.status == "done"


@pytest.mark.parametrize("ignores", [False, True])
def test_a_terminal_that_is_closed_ends_a_run_in_order_unless_hangups_are_ignored(
    project: Project, ignores: bool
) -> None:
    """SIGHUP killed it with nothing released; ignored, the next write to the terminal did."""
    run = [LOOPS, "run", "train.toml"]
    master, terminal = os.openpty()
    process = project.begin(
        ["sh", "-c", 'trap \'\' HUP; exec "$0" "$@"', *run] if ignores else run,
        {},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    wait_for(project.has_checkpoints)
    os.close(master)
    if ignores:
        wait_for(lambda: "any more (Input/output error)" in project.run().folder.log.read_text())
        process.send_signal(INT)
    assert process.wait(LONGEST_SECONDS) == (130 if ignores else 129)
    assert project.run().run.status == "interrupted"
    assert project.left_over() == []


NEEDS_FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


@pytest.mark.parametrize("stdout", ["read", "left too", pytest.param("full", marks=NEEDS_FULL)])
def test_a_run_whose_reader_leaves_goes_on_to_its_end(project: Project, stdout: str) -> None:
    """A dead `tee` ended a run of hours as interrupted, with status 1; one that was dead from the
    start left a folder without `run.json`."""
    reader, writer = os.pipe()
    full = os.open("/dev/full" if stdout == "full" else os.devnull, os.O_WRONLY)
    process = project.begin(
        [LOOPS, "run", "train.toml", "--set", "training.updates=4"],
        {},
        stdout={"read": subprocess.DEVNULL, "left too": writer, "full": full}[stdout],
        stderr=writer,
    )
    os.close(writer)
    os.close(full)
    if stdout != "left too":  # then not even the first line was read, and a folder was left
        os.read(reader, 1)
    os.close(reader)
    assert process.wait(LONGEST_SECONDS) == 0
    run = project.run()
    assert run.run.status == "done"
    assert len(list(run.steps())) == 4
    assert "stderr has no reader any more (Broken pipe)" in run.folder.log.read_text()


@pytest.mark.parametrize("how", ["", "ignores"])
def test_an_evaluation_is_stopped_like_a_run(project: Project, how: str) -> None:
    (project.folder / "hold").touch()
    sets = 'evaluation.sets={held_out={tasks="held_out.jsonl"}}'
    process = project.start(sets, command="eval", HOLD="run", HOW=how)
    wait_for((project.folder / "here").exists)
    end = project.stop(process, *([INT, INT] if how else [INT]))
    assert end.status == 130
    assert end.said[0].startswith("loops: interrupted: no evaluation came to its end; ")
    assert end.run.run.status == "interrupted"


@pytest.fixture
def tuning(project: Project) -> Project:
    """The same, for supervised fine-tuning."""
    (project.folder / "imitates.py").write_text(TRAINER)
    (project.folder / "rows.jsonl").write_text(4 * f"{' '.join(SFT_ROW.split())}\n")
    (project.folder / "train.toml").write_text(SFT_CONFIG)
    return project


@pytest.mark.parametrize(
    ("how", "numbers"),
    [
        ("", (INT,)),
        ("", (TERM,)),
        ("", (HUP,)),
        ("ignores", (INT, INT)),
        ("ignores", (TERM, TERM)),
        ("blocks", (INT, INT)),
        ("leaves a thread", (INT, INT)),
    ],
    ids=str,
)
def test_fine_tuning_is_stopped_amid_an_update_and_goes_on_with_the_same_one(
    tuning: Project, how: str, numbers: Sequence[signal.Signals]
) -> None:
    process = tuning.start(HOLD="train", HOW=how)
    wait_for(tuning.has_checkpoints)
    (tuning.folder / "hold").touch()
    wait_for((tuning.folder / "here").exists)
    end = tuning.stop(process, *numbers)
    status, begins = ENDED[numbers[0]]
    assert end.status == status
    assert end.said[0].startswith(begins)
    last = end.err.splitlines()[-1]
    assert last.startswith("go on with: ")
    assert "loops run train.toml --resume " in last
    assert end.run.run.status == "interrupted"
    assert tuning.left_over() == []

    (tuning.folder / "hold").unlink()
    done = len(list(end.run.steps()))
    updates = done + 3
    resumed = tuning.stop(tuning.start(f"training.epochs={updates}", resume=True))
    assert resumed.status == 0, resumed.err
    assert [row.update for row in resumed.run.steps()] == list(range(1, updates + 1))
    assert resumed.run.run.resumed_from == done


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_signal_before_anything_has_begun_is_one_line(
    project: Project, number: signal.Signals
) -> None:
    process = project.start()
    wait_for(lambda: "config: " in (project.folder / "stderr").read_text())
    os.killpg(process.pid, number)
    process.communicate(timeout=LONGEST_SECONDS)
    lines = (project.folder / "stderr").read_text().splitlines()
    assert process.returncode == 128 + number, lines
    assert len([line for line in lines if line.startswith("loops: ")]) == 1
    assert not any("Traceback" in line for line in lines)
