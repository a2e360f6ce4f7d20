"""A runtime of the user's own: what is wrong with it is found by check, or ends attempts.

Each of these was told as a bug of this package, with a traceback, or ended a whole run.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.recipes.notebook import Notebook
from trio.testing import MockClock

from loops_cookbook.errors import EpisodeError, RunStopped
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.records import RunRow
from loops_cookbook.testing import ScriptedService

pytestmark = pytest.mark.anyio

PATTERN = Path(__file__).parents[2] / "patterns" / "custom_runtime" / "own_runtime"
CAPABILITIES = 'Capabilities(acquires=("sampling",), grading_retries=0, rollout_seconds=30)'
KEPT = "self._turns.append(Turn(prompt_ids, sampled))"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture
def own(project: Path, runnable: Any) -> Any:
    """Plans the pattern's runtime with a part of it written in another way."""

    def plan(part: str, other: str) -> Any:
        code = (PATTERN / "counter_runtime.py").read_text(encoding="utf-8")
        assert part in code
        (project / "counter_runtime.py").write_text(code.replace(part, other, 1))
        for name in ("counter.py", "tasks.jsonl"):
            (project / name).write_text((PATTERN / name).read_text(encoding="utf-8"))
        config = (project / "train.toml").read_text().replace('class = "spelling:Spell"\n', "")
        (project / "train.toml").write_text(config)
        return runnable('runtime="counter_runtime:create"', "model.max_seq_len=512")

    return plan


async def run(plan: Plan) -> None:
    row = RunRow(
        run="a-run",
        started_at=0.0,
        recipe="rl",
        scope="local",
        model=plan.model.name,
        updates=3,
        attempts_per_update=8,
        tasks={},
        service={},
        versions={},
        config_path="train.toml",
        config={},
    )
    service = ScriptedService(lambda _, index: str(index % 3))
    await run_rl(plan, service, Notebook(), row)


@pytest.mark.parametrize(
    ("part", "other", "words"),
    [
        ("create = CounterRuntime", "def create(context): ...", r"made has no open\(\)"),
        ("create = CounterRuntime", "def create(): ...", "takes 0 positional arguments"),
        ("create = CounterRuntime", "def create(c): raise OSError('x')", r"OSError: x \(counter_r"),
        (CAPABILITIES, "None", "has null for its capabilities"),
        ("async def grade_group", "async def grade_groups", r"has no grade_group\(\)"),
        ("options_model = Options", "options_model = 3", "options_model of .* is 3; name"),
        ("task_model = CountTask", "task_model = dict", "task_model of .*; name"),
    ],
)
def test_what_is_no_runtime_is_refused_when_it_is_planned(
    own: Any, part: str, other: str, words: str
) -> None:
    with pytest.raises(EpisodeError, match=f"^runtime: .*{words}"):
        own(part, other)


@pytest.mark.parametrize(
    ("part", "other", "words"),
    [
        (
            "return CounterLease(self._context, task, place)",
            "return None",
            "open() of 'counter_runtime:create' gave null: give an async context manager",
        ),
        ("return Recorded(", "return dict(", "recorded() of a lease gave {"),
        ("Trajectory(tuple(self._turns))", "None", "a Recorded's trajectory is null"),
        (KEPT, "self._turns.append((prompt_ids, sampled))", "something else than Turns"),
        (KEPT, KEPT.replace("prompt_ids", "prompt_ids.tolist()"), "prompt_ids are no array"),
        (KEPT, KEPT.replace("sampled", "sampled.ids"), "sampled is no SampledTokens"),
        (KEPT, KEPT.replace("prompt_ids", "prompt_ids[:0]"), "a recorded turn has an empty prompt"),
        ("return Recorded(", "raise OSError('lost')\n        return Recorded(", "OSError: lost"),
    ],
)
async def test_a_lease_that_records_what_is_no_record_fails_its_attempts(
    own: Any, part: str, other: str, words: str
) -> None:
    plan = own(part, other)
    with pytest.raises(RunStopped, match="nothing has worked") as caught:
        await run(plan)
    assert "discarded/failed" in str(caught.value)
    assert words in str(caught.value), str(caught.value)


@pytest.mark.parametrize("raised", ["OSError", "SystemExit"])
@pytest.mark.parametrize(("method", "what"), [("__aenter__", "opening"), ("__aexit__", "closing")])
async def test_a_runtime_that_cannot_be_opened_or_closed_is_named(
    own: Any, method: str, what: str, raised: str
) -> None:
    """One that called `sys.exit()` there ended the run as a bug of this package."""
    plan = own(
        "create = CounterRuntime",
        f"async def broken(self, *exc): raise {raised}('no room')\n"
        f"CounterRuntime.{method} = broken\ncreate = CounterRuntime",
    )
    with pytest.raises(
        RunStopped, match=rf"^runtime: counter_runtime:create: {what}: .*{raised}.*no room"
    ):
        await run(plan)


async def test_a_runtime_that_swallows_what_ends_the_run_does_not_make_it_a_success(
    own: Any,
) -> None:
    """A run in which nothing worked was told as done."""
    plan = own(
        "create = CounterRuntime",
        "async def swallow(self, *exc): return True\n"
        "def lost(self, task, place): raise OSError('lost')\n"
        "CounterRuntime.__aexit__ = swallow\nCounterRuntime.open = lost\n"
        "create = CounterRuntime",
    )
    with pytest.raises(RunStopped, match="nothing has worked"):
        await run(plan)


async def test_a_runtime_that_cannot_be_closed_does_not_hide_what_ended_the_run(
    own: Any, caplog
) -> None:
    plan = own(
        "create = CounterRuntime",
        "async def broken(self, *exc): raise OSError('no room')\n"
        "def lost(self, task, place): raise OSError('lost')\n"
        "CounterRuntime.__aexit__ = broken\nCounterRuntime.open = lost\n"
        "create = CounterRuntime",
    )
    with pytest.raises(RunStopped, match="nothing has worked"):
        await run(plan)
    assert "counter_runtime:create: closing: OSError: no room (" in caplog.text
