"""`loops serve` runs the embedded engine in the foreground, and says what it refuses."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from loops_cookbook.cli.app import app
from loops_cookbook.config.load import load_config
from loops_cookbook.config.locate import locate_config
from loops_cookbook.services.extras import LOCAL

LOOPS = str(Path(sys.executable).with_name("loops"))
COUNTING = "models/counting"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOOPS_CACHE", str(tmp_path / "cache"))


# --- What is refused before anything is started


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.0.7", "::", "gpu-host"])
def test_beyond_loopback_a_key_is_needed(host: str) -> None:
    said = refusal(COUNTING, "--host", host)
    assert said.startswith(f"loops: --host {host}: other machines reach this address")
    assert "--api-key-env" in said


@pytest.mark.parametrize("key", [None, "", "  "])
def test_a_key_that_is_named_has_to_be_there(
    key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if key is not None:
        monkeypatch.setenv("MY_KEY", key)
    assert "has a MY_KEY" in refusal(COUNTING, "--api-key-env", "MY_KEY")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("Qwen/Qwen3-4B", "loops: MODEL: 'Qwen/Qwen3-4B' is not on this machine"),
        ("./nothing", "loops: MODEL: no model './nothing'"),
        ("smollm2-135m", "run `loops models fetch smollm2-135m`"),
    ],
)
def test_a_model_that_is_not_here_is_refused(model: str, told: str) -> None:
    assert told in refusal(model)


@pytest.mark.parametrize("alpha", ["nan", "inf", "0", "-1"])
def test_a_scale_that_spoils_the_training_is_refused(alpha: str) -> None:
    """It served, and the first update made every weight NaN."""
    said = refusal(COUNTING, f"--lora-alpha={alpha}")
    assert said == f"loops: --lora-alpha {alpha}: use a finite number above 0"


@pytest.mark.parametrize("below", ["", "/checkpoints"])
def test_a_file_in_the_place_of_checkpoints_is_refused(tmp_path: Path, below: str) -> None:
    """It served, and the first checkpoint could not be saved."""
    (tmp_path / "notes.md").touch()
    said = refusal(COUNTING, "--checkpoints", f"notes.md{below}")
    assert said.endswith(
        f"{tmp_path / 'notes.md'} is a file, where a folder is to be; name another"
    )


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LOCAL[0], None)
    assert 'uv add "loops-cookbook[local]"' in refusal(COUNTING)


# --- The server


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command; ends it with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [LOOPS, "serve", COUNTING, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
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


@pytest.mark.slow
@pytest.mark.torch
def test_a_port_that_is_taken_is_one_line_and_exit_2(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        out, err = (process := start(f"--port={port}")).communicate()
    assert process.returncode == 2
    assert out == ""
    assert err == f"cannot listen on 127.0.0.1:{port} (Address already in use): give another\n"


@pytest.mark.torch
@pytest.mark.parametrize("asked", [[], ["--deterministic"]])
def test_the_engine_is_told_whether_to_decode_each_request_alone(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    engine, told = tmp_path / "engine", tmp_path / "told"
    ready = '{"url": "http://here", "engine": {"device": "cpu", "dtype": "float32"}}'
    engine.write_text(f"#!/bin/sh\necho \"$@\" > {told}\necho '{ready}'\nexit 2\n")
    engine.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(engine))
    result = CliRunner().invoke(app, ["serve", COUNTING, *asked])
    assert result.exit_code == 2
    assert ("--deterministic" in told.read_text().split()) == bool(asked)
    assert ("each request decoded alone" in result.stdout) == bool(asked)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("url", "asked", "where", "key"),
    [
        ("http://127.0.0.1:8123", [], "127.0.0.1", None),
        ("http://0.0.0.0:8123", ["--api-key-env", "MY_KEY"], socket.gethostname(), "MY_KEY"),
        ("http://[::]:8123", ["--api-key-env", "MY_KEY"], socket.gethostname(), "MY_KEY"),
    ],
)
def test_it_says_what_to_type_to_train_there(
    url: str,
    asked: list[str],
    where: str,
    key: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It told of keys and addresses, but not of the command, and of an address that is none."""
    pytest.importorskip("torch")
    monkeypatch.setenv("MY_KEY", "a-secret")
    engine = tmp_path / "engine"
    ready = json.dumps({"url": url, "engine": {"device": "cpu", "dtype": "float32"}})
    engine.write_text(f"#!/bin/sh\necho '{ready}'\nexit 2\n")
    engine.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(engine))
    told = CliRunner().invoke(app, ["serve", COUNTING, *asked]).stdout
    (line,) = [each for each in told.splitlines() if "loops run" in each]
    words = shlex.split(line.partition(": ")[2])
    assert words[:5] == ["loops", "run", "CONFIG", "--scope", "remote"]
    config = locate_config("examples/counting/train.toml").path
    overrides = [word for word in words[5:] if word != "--set"]
    loaded = load_config(config, overrides).config
    assert loaded.model.name == COUNTING
    assert loaded.compute.trainer_url == f"http://{where}:8123"
    assert loaded.compute.api_key_env == key
    assert "a-secret" not in told


def address(process: subprocess.Popen[str]) -> str:
    """Where it serves, from the first line that it says."""
    assert process.stdout is not None
    return process.stdout.readline().split(" on ")[1].split(": ")[0]


def rest(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it says after its first line, once it has ended."""
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    process.wait(timeout=60)
    return out, err


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def children(process: subprocess.Popen[str]) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in listed.split()]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the engine's process")
class TestServer:
    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_it_serves_until_a_signal_and_leaves_nothing(
        self,
        start: Callable[..., subprocess.Popen[str]],
        number: signal.Signals,
        status: int,
    ) -> None:
        process = start("--port=0", "--lora-rank=4", "--max-seq-len=32")
        url = address(process)
        engines = children(process)
        assert len(engines) == 1
        assert httpx.get(f"{url}/health").status_code == 200
        told = httpx.get(f"{url}/version").json()
        assert (told["model"], told["max_seq_len"], told["lora_rank"]) == (COUNTING, 32, 4)
        assert "loops_policy_version 0\n" in httpx.get(f"{url}/metrics").text
        process.send_signal(number)
        out, err = rest(process)
        assert process.returncode == status
        assert url in out
        assert "Traceback" not in err
        assert not is_alive(engines[0])

    def test_with_a_key_it_answers_nobody_else(
        self, start: Callable[..., subprocess.Popen[str]]
    ) -> None:
        process = start("--port=0", "--host=0.0.0.0", "--api-key-env=MY_KEY", MY_KEY="s3cret")
        port = address(process).rpartition(":")[2]
        url = f"http://127.0.0.1:{port}/metrics"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"Authorization": "Api-Key wrong"}).status_code == 401
        assert httpx.get(url, headers={"Authorization": "Bearer s3cret"}).status_code == 200
        line = Path(f"/proc/{children(process)[0]}/cmdline").read_text()
        assert "s3cret" not in line
        process.send_signal(signal.SIGINT)
        out, err = rest(process)
        assert "s3cret" not in out + err
        assert "$MY_KEY" in out

    def test_the_engine_does_not_outlive_a_command_that_is_killed(
        self, start: Callable[..., subprocess.Popen[str]]
    ) -> None:
        process = start("--port=0")
        address(process)
        (engine,) = children(process)
        process.kill()
        process.communicate()
        for _ in range(500):
            if not is_alive(engine):
                return
            signal.sigtimedwait([], 0.02)
        raise AssertionError("the engine goes on")

    def test_an_engine_that_dies_ends_the_command_with_1(
        self, start: Callable[..., subprocess.Popen[str]]
    ) -> None:
        process = start("--port=0")
        address(process)
        (engine,) = children(process)
        os.kill(engine, signal.SIGKILL)
        _, err = rest(process)
        assert process.returncode == 1
        assert err.splitlines()[-1].startswith("loops: the embedded engine ended with")
