"""Sandboxes of an Episode: opened in setup, stopped before grading, released whatever happens."""

import shutil
from collections.abc import Mapping
from typing import Any

import anyio
import pytest
from pydantic import BaseModel
from tests.episodes.test_runtime import Clock
from tests.sandboxes.doubles import MemoryBackend
from trio.testing import MockClock

from loops_cookbook.attempts import Flags
from loops_cookbook.config.sandbox import SandboxTable
from loops_cookbook.episodes import Episode, Grading, Sampling, Sandbox, Setup, create_runtime
from loops_cookbook.errors import EpisodeError, SandboxError
from loops_cookbook.runtimes.base import Place, RuntimeContext
from loops_cookbook.runtimes.producers import Policy, Producers
from loops_cookbook.sandboxes.source import SandboxSource
from loops_cookbook.services.base import SampleParams
from loops_cookbook.tasks import Task
from loops_cookbook.testing import PlainRenderer, ScriptedSampler, Terms, Tried, attempt

pytestmark = pytest.mark.anyio

PLACE = Place(3, 1, 0, SampleParams(max_tokens=64), 0, lambda index: index)


class Nothing(BaseModel):
    name: str = "t"


TASK: Task[BaseModel] = Task(0, "t", Nothing(), "tasks.jsonl:1")


class Working(Episode[Nothing, None]):
    """Opens one sandbox and says something."""

    async def setup(self, setup: Setup) -> None:
        self.opened = await setup.sandbox(memory_mb=32)

    async def run(self, sample: Sampling) -> Mapping[str, Any] | None:
        await sample.model.conversation().generate([{"role": "user", "content": "hello"}])
        assert sample.sandboxes["main"] is self.opened
        await sample.sandboxes["main"].exec("work")
        return None

    async def grade(self, grading: Grading) -> float:
        assert grading.sandboxes["main"] is self.opened
        return 1.0


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


def opened(cls: type, backend: MemoryBackend | None) -> Any:
    policy = Policy("main", ScriptedSampler(["4"] * 9), PlainRenderer())
    table = SandboxTable(backend="local")
    return create_runtime(
        RuntimeContext(
            tasks=(TASK,),
            options=None,
            episode_class=cls,
            episode_options=None,
            producers=Producers(policy),
            max_seq_len=1000,
            sandboxes=SandboxSource(backend, table, "run") if backend else None,
        )
    )


async def tried(cls: type, backend: MemoryBackend | None, *, grades: int = 1) -> Any:
    """One try: what the lease recorded."""
    async with opened(cls, backend) as runtime, runtime.open(TASK, PLACE) as lease:
        await lease.setup()
        await lease.run(Clock())
        for _ in range(grades):
            await lease.grade(timed_out=False)
        return lease.recorded()


async def test_a_sandbox_is_the_same_in_run_and_grade_and_is_gone_after(
    backend: MemoryBackend,
) -> None:
    await tried(Working, backend)
    assert backend.there == {}
    assert [spec.memory_mb for spec in backend.specs] == [32]


async def test_its_processes_are_stopped_before_each_call_of_the_grader(
    backend: MemoryBackend,
) -> None:
    class Looking(Working):
        async def run(self, sample: Sampling) -> None:
            await super().run(sample)
            assert backend.stopped == []

        async def grade(self, grading: Grading) -> float:
            assert backend.stopped[-1] == self.opened.name
            return float(len(backend.stopped))

    await tried(Looking, backend, grades=2)
    assert len(backend.stopped) == 2


async def test_the_ledger_is_told_whose_a_sandbox_is(backend: MemoryBackend) -> None:
    seen: list[str] = []

    class Looking(Working):
        async def grade(self, grading: Grading) -> float:
            await grading.sandbox("grader")
            seen.extend(entry.whose for entry in backend.there.values())
            return 1.0

    await tried(Looking, backend)
    assert seen == [
        "task t, group 3, attempt 1, try 0, main",
        "task t, group 3, attempt 1, grading, grader",
    ]


async def test_a_graders_sandbox_is_new_for_each_call_of_grade(backend: MemoryBackend) -> None:
    names: list[str] = []

    class Separate(Working):
        async def grade(self, grading: Grading) -> float:
            fresh = await grading.sandbox("grader")
            names.append(fresh.name)
            assert fresh.name != self.opened.name
            assert len(backend.there) == 2
            return 1.0

    await tried(Separate, backend, grades=2)
    assert len(set(names)) == 2
    assert backend.there == {}


@pytest.mark.parametrize("method", ["setup", "run", "grade", "close"])
async def test_sandboxes_are_released_whatever_raises(backend: MemoryBackend, method: str) -> None:
    async def raising(self: Any, *_: object) -> None:
        raise OSError("no")

    cls = type("Working", (Working,), {method: raising})
    with pytest.raises(OSError, match="no"):
        await tried(cls, backend)
    assert backend.there == {}


async def test_sandboxes_are_released_when_setup_is_cut_and_when_close_hangs(
    backend: MemoryBackend,
) -> None:
    class Stuck(Working):
        async def run(self, sample: Sampling) -> None:
            await anyio.sleep_forever()

        async def close(self) -> None:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(20)

    backend.release_seconds = 5
    with anyio.move_on_after(60):
        await tried(Stuck, backend)
    assert backend.there == {}


async def test_a_sandbox_lost_in_run_fails_the_try_also_when_the_agent_goes_on(
    backend: MemoryBackend,
) -> None:
    """Else what was graded would be the sandbox's failure and not the agent's work."""

    class Swallowing(Working):
        async def run(self, sample: Sampling) -> None:
            backend.lost = True
            with pytest.raises(SandboxError):
                await sample.sandboxes["main"].exec("work")

    recorded = await tried(Swallowing, backend, grades=0)
    assert "is lost" in str(recorded.failure)


async def test_a_sandbox_lost_while_grading_is_no_reward(backend: MemoryBackend) -> None:
    class Swallowing(Working):
        async def grade(self, grading: Grading) -> float:
            fresh = await grading.sandbox()
            backend.lost = True
            with pytest.raises(SandboxError):
                await fresh.exec("test")
            return 0.0

    with pytest.raises(SandboxError, match="is lost"):
        await tried(Swallowing, backend)


async def test_a_graders_sandbox_that_cannot_be_made_is_no_reward(backend: MemoryBackend) -> None:
    """A grader that gave 0 for it would have graded the machine."""

    class Swallowing(Working):
        async def grade(self, grading: Grading) -> float:
            backend.makes_none = True
            with pytest.raises(SandboxError):
                await grading.sandbox()
            return 0.0

    with pytest.raises(SandboxError, match="did not start"):
        await tried(Swallowing, backend)
    assert backend.there == {}


async def test_a_config_without_sandboxes_says_what_to_set() -> None:
    with pytest.raises(EpisodeError, match=r"set backend in \[sandbox\]"):
        await tried(Working, None)


async def test_a_name_can_be_used_once(backend: MemoryBackend) -> None:
    class Twice(Working):
        async def setup(self, setup: Setup) -> None:
            await setup.sandbox("a")
            await setup.sandbox("a")

    with pytest.raises(EpisodeError, match=r"'a'.* is open already"):
        await tried(Twice, backend)
    assert backend.there == {}


async def test_a_sandbox_that_is_not_there_is_told_with_those_that_are(
    backend: MemoryBackend,
) -> None:
    class Wrong(Working):
        async def run(self, sample: Sampling) -> None:
            assert "tools" not in sample.sandboxes
            assert list(sample.sandboxes) == ["main"]
            _ = sample.sandboxes["tools"]

    with pytest.raises(EpisodeError, match=r"no sandbox 'tools' \(there is 'main'\)"):
        await tried(Wrong, backend)


async def test_a_sandbox_that_is_opened_too_late_is_released(backend: MemoryBackend) -> None:
    kept: list[Setup] = []

    class Keeping(Working):
        async def setup(self, setup: Setup) -> None:
            await super().setup(setup)
            kept.append(setup)

    await tried(Keeping, backend)
    with pytest.raises(EpisodeError, match="after the end"):
        await kept[0].sandbox("late")
    assert backend.there == {}


# --- With real ones


@pytest.fixture(params=["bubblewrap", "none"])
def table(request: pytest.FixtureRequest) -> dict[str, object]:
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    network = request.param == "none"
    return {"backend": "local", "isolation": request.param, "network": network}


class Cheat(Episode[Nothing, None]):
    """Leaves a daemon that writes the right answer as soon as the grader looks for it."""

    async def setup(self, setup: Setup) -> None:
        self.main = await setup.sandbox()
        assert (await self.main.exec("ls -A")).stdout == ""

    async def run(self, sample: Sampling) -> Mapping[str, float]:
        await sample.model.conversation().generate([{"role": "user", "content": "hello"}])
        daemon = "(while ! [ -e looking ]; do sleep 0.01; done; echo right > answer)"
        await self.main.exec(f"nohup sh -c '{daemon}' >/dev/null 2>&1 &")
        return {}

    async def grade(self, grading: Grading) -> float:
        fresh: Sandbox = await grading.sandbox()
        await fresh.write_file("check.sh", 'sleep 0.1; grep -q right "$1"')
        await self.main.write_file("looking", "")
        await anyio.sleep(0.1)
        try:
            left = await self.main.read_file("answer")
        except FileNotFoundError:
            return 0.0
        await fresh.write_file("answer", left)
        return float((await fresh.exec("sh check.sh answer")).exit_status == 0)


class Honest(Cheat):
    async def run(self, sample: Sampling) -> Mapping[str, float]:
        await sample.model.conversation().generate([{"role": "user", "content": "hello"}])
        assert "check.sh" not in (await self.main.exec("find . -name check.sh")).stdout
        await self.main.exec("echo right > answer")
        return {}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("cls", "reward"), [(Cheat, 0.0), (Honest, 1.0)])
async def test_what_an_agent_left_running_does_not_move_the_grade(
    table: dict[str, object], cls: type[Episode[Any, Any]], reward: float
) -> None:
    result: Tried = await attempt(cls, {}, replies=["hi"], terms=Terms(sandbox=table))
    assert (result.reward, result.detail) == (reward, "")
    assert result.attempt.flags == Flags()
