"""Heavy work in worker processes: what comes back, and what a cut ends.

The functions are of the standard library, so that a worker can import them.
"""

import json
import math
import operator
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
from pydantic import BaseModel

from loops_cookbook.attempts import Fate
from loops_cookbook.episodes import Episode, Grading, Sampling, create_runtime
from loops_cookbook.episodes.compute import Workers
from loops_cookbook.errors import AttemptFault, EpisodeError
from loops_cookbook.rollouts.attempt import GroupStart
from loops_cookbook.rollouts.group import run_group
from loops_cookbook.rollouts.keeper import open_keeper
from loops_cookbook.rollouts.limits import Limits
from loops_cookbook.rollouts.trial import AttemptContext, AttemptRules, SamplingTerms
from loops_cookbook.runtimes.base import Clocks, RuntimeContext
from loops_cookbook.runtimes.producers import MAIN, Policy, Producers
from loops_cookbook.services.base import SampleParams
from loops_cookbook.tasks import Task
from loops_cookbook.testing import PlainRenderer, ScriptedSampler

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def workers() -> AsyncGenerator[Workers]:
    async with Workers(limit=2) as opened:
        yield opened


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what another process does sets no event here
        await anyio.sleep(0.005)


async def test_a_function_runs_in_another_process(workers: Workers) -> None:
    assert await workers.run(math.factorial, 5) == 120
    assert await workers.run(os.getpid) != os.getpid()


async def test_a_worker_serves_call_after_call(workers: Workers) -> None:
    assert await workers.run(os.getpid) == await workers.run(os.getpid)


async def test_an_exception_comes_back_with_its_traceback(workers: Workers) -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        await workers.run(json.loads, "{")
    [note] = raised.value.__notes__
    first, _, traceback = note.partition("\n")
    assert first.startswith("in the worker process of compute(loads), at ")
    assert re.search(r"decoder.py:\d+ in raw_decode$", first)
    assert traceback.startswith("Traceback")


async def test_an_exit_ends_the_call_and_not_the_worker(workers: Workers) -> None:
    pid = await workers.run(os.getpid)
    with pytest.raises(AttemptFault, match=r"compute\(exit\) raised SystemExit: 3"):
        await workers.run(sys.exit, 3)
    assert await workers.run(os.getpid) == pid


async def test_what_a_program_prints_or_reads_is_kept_from_the_pipes(workers: Workers) -> None:
    program = "import sys; assert sys.stdin.read() == ''; print('noise')"
    assert await workers.run(subprocess.call, [sys.executable, "-c", program]) == 0
    assert await workers.run(operator.add, 1, 1) == 2


async def test_a_cut_kills_the_work_and_all_that_it_started(
    workers: Workers, tmp_path: Path
) -> None:
    written = tmp_path / "pid"
    program = f"echo $$ > {written}.part; mv {written}.part {written}; sleep 60"
    async with anyio.create_task_group() as group:
        group.start_soon(workers.run, subprocess.call, ["sh", "-c", program])
        await until(written.exists)
        group.cancel_scope.cancel()
    pid = int(written.read_text())
    with anyio.fail_after(5):
        await until(lambda: not is_running(pid))


async def test_a_cut_gives_its_slot_back(workers: Workers) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(workers.run, time.sleep, 60)
        await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    assert await workers.run(operator.add, 1, 1) == 2


async def test_a_worker_that_dies_is_told_and_replaced(workers: Workers) -> None:
    with pytest.raises(AttemptFault, match=r"compute\(_exit\) died with exit status 7"):
        await workers.run(os._exit, 7)
    assert await workers.run(operator.add, 1, 1) == 2


async def test_a_worker_that_died_while_idle_is_replaced(workers: Workers) -> None:
    pid = await workers.run(os.getpid)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not workers._idle[0].is_alive)
    assert await workers.run(os.getpid) != pid


async def test_no_more_work_at_once_than_there_are_slots() -> None:
    async with Workers(limit=1) as workers:
        seen: list[int] = []

        async def note() -> None:
            seen.append(await workers.run(os.getpid))

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(note)
    assert len(set(seen)) == 1


async def test_a_function_that_cannot_be_pickled_is_refused(workers: Workers) -> None:
    with pytest.raises(EpisodeError, match="cannot be passed to a worker process"):
        await workers.run(lambda: 1)


async def test_a_function_that_a_worker_cannot_import_is_refused(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("only_here")
    exec("def work(): return 1", vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(EpisodeError, match=r"cannot import what compute\(work\) was given"):
        await workers.run(module.work)
    assert await workers.run(operator.add, 1, 1) == 2


async def test_a_result_that_cannot_be_pickled_is_refused(workers: Workers) -> None:
    with pytest.raises(
        EpisodeError, match=r"what compute\(memoryview\) returned cannot be passed back"
    ):
        await workers.run(memoryview, b"bytes")


async def test_workers_end_with_their_block() -> None:
    async with Workers() as workers:
        pid = await workers.run(os.getpid)
        assert is_running(pid)
    assert not is_running(pid)
    with pytest.raises(EpisodeError, match="no run is open"):
        await workers.run(os.getpid)


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = """
import anyio, os, signal, time
from loops_cookbook.episodes.compute import Workers

async def main():
    async with Workers() as workers:
        print(await workers.run(os.getpid), flush=True)
        async with anyio.create_task_group() as group:
            group.start_soon(workers.run, time.sleep, 60)
            await anyio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    pid = int(done.stdout)
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not is_running(pid)


class Question(BaseModel):
    """A task that holds nothing."""


class Computes(Episode[Question, None]):
    """Its grader computes: for ever where the reply says so."""

    async def run(self, sample: Sampling) -> None:
        reply = await sample.model.conversation().generate([{"role": "user", "content": "?"}])
        self.said = reply.content or ""

    async def grade(self, grading: Grading) -> float:
        await grading.compute(time.sleep, 1000.0 if self.said == "slow" else 0.0)
        return 1.0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_grader_that_computes_for_ever_is_killed_and_takes_nobody_with_it() -> None:
    """A grader's loop without an end held its slot, and with it the whole run."""
    task = Task[BaseModel](0, "test", Question(), "tasks.jsonl:1")
    sampler = ScriptedSampler(["quick", "slow", "quick", "quick"])
    runtime = create_runtime(
        RuntimeContext(
            tasks=(task,),
            options=None,
            episode_class=Computes,
            episode_options=None,
            producers=Producers(Policy(MAIN, sampler, PlainRenderer())),
            max_seq_len=256,
        )
    )
    limits = Limits(sampling=4, grading=1)
    clocks = Clocks(rollout_seconds=60, setup_seconds=60, grading_seconds=2, release_seconds=60)
    async with runtime, open_keeper() as keeper:
        context = AttemptContext(
            runtime=runtime,
            limits=limits,
            keeper=keeper,
            rules=AttemptRules(clocks, max_seq_len=256),
            terms=SamplingTerms(SampleParams(max_tokens=32)),
        )
        group = await run_group(context, GroupStart(serial=0, task=task), size=4)
    (killed,) = (a for a in group.attempts if a.discarded is not None)
    assert killed.discarded is not None
    assert (killed.discarded.fate, killed.discarded.exception) == (Fate.UNGRADED, "ClockRanOut")
    assert [a.reward for a in group.attempts if a is not killed] == [1.0] * 3
    assert [limit.held for limit in limits.statistics()] == [0, 0, 0]


async def waits() -> None: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [(5, r"compute\(\) was given 5: give it a function"), (waits, "an async function")],
    ids=["no function", "async"],
)
async def test_what_a_worker_cannot_call_is_refused(
    workers: Workers, given: Any, said: str
) -> None:
    """It was told by a line of this package, or by a coroutine that cannot be pickled."""
    with pytest.raises(EpisodeError, match=said):
        await workers.run(given)
