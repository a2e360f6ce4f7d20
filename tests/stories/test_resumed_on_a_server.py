"""A run on a real `loops serve` is killed and goes on, whether the server lives or died with it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.stories.test_embedded_runs import LOOPS, finished, rows, run_folder, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(300)]

UPDATES = 12
SETTINGS = (
    f"training.updates={UPDATES}",
    "training.groups_per_update=2",
    "training.checkpoint_every=5",
    'evaluation.sets={held_out={tasks="held_out.jsonl", attempts=1}}',
)


class Story:
    """Commands in one folder; they end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [LOOPS, *arguments],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def serve(self) -> subprocess.Popen[str]:
        """A server that decodes each request alone, so that two runs can be compared."""
        server = self.start(
            "serve", "models/counting", f"--port={self.port}", "--deterministic"
        )  # fmt: skip
        assert server.stdout is not None
        assert " on http://127.0.0.1" in server.stdout.readline()
        return server

    def run(self, *arguments: str, settings: Sequence[str] = SETTINGS) -> subprocess.Popen[str]:
        settings = [*settings, f'compute.trainer_url="http://127.0.0.1:{self.port}"']
        told = [f"--set={setting}" for setting in settings]
        return self.start(
            "run", "examples/counting/train.toml", "--scope=remote", *told, *arguments
        )  # fmt: skip

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Callable[[str], Story]]:
    stories: list[Story] = []

    def begin(name: str) -> Story:
        folder = tmp_path / name
        folder.mkdir()
        stories.append(Story(folder))
        return stories[-1]

    yield begin
    for each in stories:
        each.end()


def metrics(folder: Path) -> list[dict[str, float]]:
    """Every metric of every update but times."""
    return [
        {k: float(str(v)) for k, v in row.items() if "/" in k and not k.startswith("time/")}
        for row in rows(folder / "steps.jsonl")
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="kills what is started")
@pytest.mark.parametrize("lives", [True, False])
def test_a_run_that_is_killed_comes_to_what_it_would_have_come_to(
    story: Callable[[str], Story], lives: bool
) -> None:
    whole, cut = story("whole"), story("cut")
    whole.serve()
    status, _, err = finished(whole.run())
    assert status == 0, err
    expected = metrics(run_folder(whole.folder))
    whole.end()

    server = cut.serve()
    command = cut.run()
    wait_for(lambda: bool(list(cut.folder.glob("runs/counting/*/steps.jsonl"))))
    folder = run_folder(cut.folder)
    wait_for(lambda: len(rows(folder / "steps.jsonl")) >= 7)
    command.send_signal(signal.SIGKILL)
    command.communicate()
    if not lives:
        server.kill()
        server.communicate()
        cut.serve()
    status, _, err = finished(cut.run("--resume"))
    assert status == 0, err
    told = metrics(folder)
    assert len(told) == UPDATES
    for ours, theirs in zip(told, expected, strict=True):
        assert ours.keys() == theirs.keys()
        started = ("attempts/started", "attempts/in_flight")  # a cut attempt counts as started
        for name in ours.keys() - set(started):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name
    assert ("the trainer lived on" in (folder / "log.txt").read_text()) == lives
