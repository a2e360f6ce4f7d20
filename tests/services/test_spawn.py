"""A server in a child process lives exactly as long as its block, and its death is told."""

import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from loops_cookbook.errors import EngineDied, MissingExtra, ModelError
from loops_cookbook.learning.datums import Datum
from loops_cookbook.services import spawn
from loops_cookbook.services.base import AdamParams, LossSpec, SampleParams
from loops_cookbook.services.spawn import Child, EngineOptions, child_server, local_engine
from loops_cookbook.services.transport import Patience, open_transport
from loops_cookbook.tokens import SampledTokens, ids_of

pytestmark = pytest.mark.anyio

READY = """
import json, os, signal, socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
def ready(**engine):
    url = "http://127.0.0.1:%d" % listener.getsockname()[1]
    print(json.dumps({"url": url, "engine": engine}), flush=True)
def words(*lines):
    for line in lines: print(line, file=sys.stderr, flush=True)
"""
"""Beginning of each child's program."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def child(program: str, folder: Path, **options: Any) -> AsyncGenerator[Child]:
    command = [sys.executable, "-c", READY + program]
    async with child_server(
        command, api_key="k3y", log_path=folder / "logs" / "engine.log", **options
    ) as started:
        yield started


DEAF = """
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
ready()
while os.read(0, 1): pass
words("ended with its stdin")
"""


async def test_a_child_that_no_signal_ends_ends_with_its_stdin(tmp_path: Path) -> None:
    """A whole job that was sent SIGTERM lost its engine before the run had let go of it."""
    async with child(DEAF, tmp_path, end_seconds=30.0) as started:
        os.kill(started._process.pid, signal.SIGTERM)  # pyright: ignore[reportPrivateUsage]
    assert (tmp_path / "logs" / "engine.log").read_text() == "ended with its stdin\n"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def ended(pid: int) -> bool:
    """Whether a process is gone, soon."""
    for _ in range(500):
        if not is_alive(pid):
            return True
        await anyio.sleep(0.01)
    return False


async def test_the_ready_line_says_where_it_serves_and_what_it_is(tmp_path: Path) -> None:
    program = "ready(device='cpu', parameters=7, scale=0.5); time.sleep(60)"
    async with child(program, tmp_path) as started:
        assert started.url.startswith("http://127.0.0.1:")
        assert started.engine == {"device": "cpu", "parameters": 7, "scale": "0.5"}


async def test_a_start_that_takes_long_tells_what_it_is_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that took a minute to load was a minute of silence; then any line of its log was
    told, such as what a probe had found."""
    monkeypatch.setattr(spawn, "FIRST_TOLD_SECONDS", 0.01)
    caplog.set_level("INFO")
    program = """
words("2026-01-01 00:00:00,000 INFO loops_cookbook.local.stages: loading: 1 of 2")
words("2026-01-01 00:00:00,000 INFO loops_cookbook.local.sampling: spans: on (3.8e-06)")
words("a warning")
time.sleep(1)
ready()
time.sleep(60)"""
    async with child(program, tmp_path) as started:
        assert started.url
    told = [record.getMessage() for record in caplog.records]
    assert told
    assert all(line.startswith("the embedded engine starts, ") for line in told)
    assert told[-1].endswith(" s so far: loading: 1 of 2")


async def test_the_key_is_in_the_environment_and_not_in_the_arguments(tmp_path: Path) -> None:
    program = "ready(key=os.environ['LOOPS_ENGINE_API_KEY'], line=sys.argv[1:]); time.sleep(60)"
    async with child(program, tmp_path) as started:
        assert started.engine == {"key": "k3y", "line": "[]"}


async def test_it_is_a_session_of_its_own_and_gone_after_the_block(tmp_path: Path) -> None:
    async with child("ready(pid=os.getpid(), sid=os.getsid(0)); time.sleep(60)", tmp_path) as it:
        pid = int(it.engine["pid"])
        assert it.engine["sid"] == pid != os.getsid(0)
    assert not is_alive(pid)


async def test_its_stderr_is_appended_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    log.parent.mkdir()
    log.write_text("before\n")
    async with child("words('hello'); ready(); time.sleep(60)", tmp_path):
        assert log.read_text() == "before\nhello\n"


async def test_one_that_ignores_being_asked_is_killed(tmp_path: Path) -> None:
    program = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(pid=os.getpid()); time.sleep(60)"
    )
    async with child(program, tmp_path, end_seconds=0.2) as started:
        pid = int(started.engine["pid"])
    assert not is_alive(pid)


async def test_it_is_ended_also_when_the_block_is_cancelled(tmp_path: Path) -> None:
    pid = 0
    with anyio.CancelScope() as scope:
        async with child("ready(pid=os.getpid()); time.sleep(60)", tmp_path) as started:
            pid = int(started.engine["pid"])
            scope.cancel()
            await anyio.sleep(60)
    assert scope.cancelled_caught
    assert not is_alive(pid)


async def test_an_error_of_the_block_passes_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with child("ready(); time.sleep(60)", tmp_path):
            raise KeyError("mine")


async def test_a_child_that_ends_before_it_serves_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(EngineDied, match=r"exit status 3.*one / two / three.*engine.log"):
        async with child("words('zero', 'one', 'two', '', 'three'); sys.exit(3)", tmp_path):
            pytest.fail("it never served")


async def test_words_of_an_earlier_child_are_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine.log").write_text("old words\n")
    with pytest.raises(EngineDied) as caught:
        async with child("sys.exit(1)", tmp_path):
            pytest.fail("it never served")
    assert "last words" not in str(caught.value)


async def test_a_child_that_refuses_the_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^no weights in models/x$"):
        async with child("words('loading', 'no weights in models/x'); sys.exit(2)", tmp_path):
            pytest.fail("it never served")


async def test_a_child_that_never_serves_is_not_waited_for_longer(tmp_path: Path) -> None:
    with pytest.raises(EngineDied, match="did not serve within"):
        async with child("time.sleep(60)", tmp_path, start_seconds=0.1):
            pytest.fail("it never served")


async def test_a_child_that_says_something_else_is_not_an_engine(tmp_path: Path) -> None:
    with pytest.raises(EngineDied, match="hello"):
        async with child("print('hello', flush=True); time.sleep(60)", tmp_path):
            pytest.fail("it never served")


async def test_a_death_ends_the_waiting_call_and_every_later_one(tmp_path: Path) -> None:
    program = """
ready()
connection, _ = listener.accept()
connection.recv(4096)
words('CUDA error: out of memory')
os.kill(os.getpid(), signal.SIGKILL)
"""
    async with (
        child(program, tmp_path) as started,
        open_transport(started.url, guard=started.guard, patience=Patience(3600.0)) as transport,
    ):
        for _ in range(2):
            with pytest.raises(EngineDied, match=r"SIGKILL.*CUDA error: out of memory"):
                await transport.call("sample", "POST", "/sample", body=b"{}")


async def test_a_death_while_nobody_calls_is_told_by_the_next_call(tmp_path: Path) -> None:
    async with (
        child("ready(); sys.exit(0)", tmp_path) as started,
        open_transport(started.url, guard=started.guard, patience=Patience(3600.0)) as transport,
    ):
        with pytest.raises(EngineDied, match="exit status 0"):
            await transport.call("submit", "GET", "/health")


async def test_without_the_extra_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    options = EngineOptions(tmp_path, "m", 32, 0)
    with pytest.raises(MissingExtra, match=r"scope local\).*loops-cookbook\[local\]"):
        async with local_engine(options, run_id="r", log_path=tmp_path / "engine.log"):
            pytest.fail("it never served")
    assert not (tmp_path / "engine.log").exists()


def test_options_become_arguments_and_what_is_open_stays_out() -> None:
    command = EngineOptions(Path("models/-x"), "a b", 32, 0, device="cpu").command()
    assert command[:5] == [sys.executable, "-P", "-m", "loops_cookbook.local", "serve"]
    assert "--model-dir=models/-x" in command
    assert "--model-name=a b" in command
    assert "--device=cpu" in command
    left_out = ("threads", "dtype", "deterministic")
    assert not [word for word in command if any(name in word for name in left_out)]
    alone = EngineOptions(Path("m"), "m", 32, 0, deterministic=True).command()
    assert "--deterministic" in alone


def tiny_model(folder: Path) -> Path:
    """A random Llama of 32 words."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    vocabulary = {f"w{i}": i for i in range(32)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.torch
@pytest.mark.timeout(120)
class TestEngine:
    """The real engine over real HTTP."""

    @pytest.mark.slow
    async def test_an_update_moves_the_served_policy_and_is_not_applied_twice(
        self, tmp_path: Path
    ) -> None:
        options = EngineOptions(
            tiny_model(tmp_path / "model"), "tiny", 32, 0, device="cpu", threads=1
        )
        prompt, params = ids_of([3, 4, 5]), SampleParams(max_tokens=4, seed=1)
        async with local_engine(options, run_id="r1", log_path=tmp_path / "log") as engine:
            (before,) = await engine.sampler.sample(prompt, params)
            ids = np.concatenate([prompt, before.ids])
            trained = np.arange(len(ids) - 1) >= len(prompt) - 1
            datum = Datum(
                input_ids=ids_of(ids[:-1]),
                target_ids=ids_of(ids[1:]),
                logprobs=np.concatenate([np.zeros(2, np.float32), before.logprobs]),
                advantages=np.where(trained, np.float32(1), np.float32(0)),
            )
            loss, adam = LossSpec("importance_sampling"), AdamParams(learning_rate=1e-2)
            result = await engine.trainer.train([datum], loss, adam, key="u0")
            again = await engine.trainer.train([datum], loss, adam, key="u0")
            version = await engine.trainer.publish(key="u0")
            (after,) = await engine.sampler.sample(prompt, params, min_policy_version=1)
            (untrained,) = await engine.sampler.sample(prompt, params)

        assert engine.description["device"] == "cpu"
        assert before.policy_version == 0
        np.testing.assert_allclose(result.logprobs[0][trained], before.logprobs, atol=1e-4)
        assert result.metrics["grad_norm"] > 0
        assert again.metrics == result.metrics
        assert version == 1
        assert after.policy_version == 1
        assert not np.array_equal(after.logprobs, before.logprobs)
        assert untrained.policy_version == 0
        np.testing.assert_array_equal(untrained.logprobs, before.logprobs)

    @pytest.mark.slow
    async def test_one_that_hangs_is_ended_and_every_call_with_it(self, tmp_path: Path) -> None:
        """A process that is stopped keeps its connections: a sample would have waited for ever."""
        model = tiny_model(tmp_path / "model")
        options = EngineOptions(model, "tiny", 32, 0, device="cpu", threads=1)
        pid = 0

        async def sample_from_one_that_is_stopped() -> None:
            nonlocal pid
            log = tmp_path / "log"
            async with local_engine(options, run_id="r1", log_path=log, silent_seconds=1) as engine:
                asked = ["pgrep", "-P", str(os.getpid()), "-f", "-n", "local"]
                pid = int((await anyio.run_process(asked)).stdout)
                os.kill(pid, signal.SIGSTOP)
                await engine.sampler.sample(ids_of([3, 4]), SampleParams(max_tokens=4))

        with pytest.raises(EngineDied, match=r"hung: it has not answered for \d+ s"):
            await sample_from_one_that_is_stopped()
        assert await ended(pid)

    @pytest.mark.slow
    async def test_a_deterministic_one_gives_the_same_bits_in_any_company(
        self, tmp_path: Path
    ) -> None:
        model = tiny_model(tmp_path / "model")
        options = EngineOptions(model, "tiny", 32, 0, device="cpu", threads=1, deterministic=True)
        prompt = ids_of([3, 4, 5])
        calls = [SampleParams(max_tokens=6 - k, seed=k, attempt=k) for k in range(4)]
        got: list[list[SampledTokens]] = []
        async with local_engine(options, run_id="r1", log_path=tmp_path / "log") as engine:

            async def draw(into: list[SampledTokens], params: SampleParams) -> None:
                into += await engine.sampler.sample(prompt, params)

            for together in ([calls[3]], calls, calls[2:]):
                got.append([])
                async with anyio.create_task_group() as tasks:
                    for params in together:
                        tasks.start_soon(draw, got[-1], params)
        assert [len(some) for some in got] == [1, 4, 2]
        for some in got:
            (its,) = (tokens for tokens in some if len(tokens.ids) == 3)
            np.testing.assert_array_equal(its.ids, got[0][0].ids)
            np.testing.assert_array_equal(its.logprobs, got[0][0].logprobs)


def parent(program: str, folder: Path) -> str:
    return f"""
import anyio, os, sys
from pathlib import Path
from loops_cookbook.services.spawn import child_server
async def main():
    command = [sys.executable, "-c", {program!r}]
    async with child_server(command, api_key="k", log_path=Path({str(folder / "log")!r})) as child:
        print(child.engine["pid"], flush=True)
        await anyio.sleep(60)
anyio.run(main)
"""


async def test_a_child_learns_by_its_stdin_that_its_parent_was_killed(tmp_path: Path) -> None:
    program = (
        READY
        + """
import threading
from loops_cookbook.local.__main__ import end_with_stdin
threading.Thread(target=end_with_stdin, daemon=True).start()
ready(pid=os.getpid())
time.sleep(60)
"""
    )
    async with await anyio.open_process([sys.executable, "-c", parent(program, tmp_path)]) as it:
        assert it.stdout is not None
        pid = int((await it.stdout.receive()).split()[0])
        assert is_alive(pid)
        it.kill()
        await it.wait()
    assert await ended(pid)
