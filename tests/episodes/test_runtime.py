"""An Episode class as a runtime: one lease, one instance, one try."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import anyio
import numpy as np
import pytest
from pydantic import BaseModel
from trio.testing import MockClock

from loops_cookbook.attempts import Attempt, Fate, Flags
from loops_cookbook.episodes import (
    Discard,
    Episode,
    Grading,
    GroupGrading,
    Model,
    Sampling,
    Setup,
    Task,
    create_runtime,
)
from loops_cookbook.episodes.runtime import EpisodeRuntime
from loops_cookbook.errors import EpisodeError, ServiceUnavailable
from loops_cookbook.runtimes.base import Graded, Place, Runtime, RuntimeContext
from loops_cookbook.runtimes.producers import Policy, Producers
from loops_cookbook.services.base import SampleParams
from loops_cookbook.testing import Terms, attempt
from loops_cookbook.testing.scripted import Line, Script, ScriptedSampler
from loops_cookbook.testing.tokenizer import PlainRenderer
from loops_cookbook.tokens import Trajectory

pytestmark = pytest.mark.anyio

PLACE = Place(0, 0, 0, SampleParams(max_tokens=64), 0, lambda index: index)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


class Clock:
    """A slot with room at once."""

    def __init__(self, seconds: float = 110) -> None:
        self._scope = anyio.CancelScope()
        self._seconds = seconds

    @property
    def timed_out(self) -> bool:
        return self._scope.cancelled_caught

    def seconds_left(self) -> float:
        return self._scope.deadline - anyio.current_time()

    async def __aenter__(self) -> Self:
        self._scope.deadline = anyio.current_time() + self._seconds
        self._scope.__enter__()
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        return self._scope.__exit__(*exc)


class AnswerTask(BaseModel):
    name: str = "sum"
    instruction: str = "2 + 2?"
    answer: str = "4"


async def ask(model: Model, instruction: str) -> str:
    conversation = model.conversation()
    reply = await conversation.generate(messages=[{"role": "user", "content": instruction}])
    return (reply.content or "").strip()


class AnswerEpisode(Episode[AnswerTask, None]):
    grading_retries = 2

    def __init__(self, task: Task[AnswerTask], options: None) -> None:
        super().__init__(task, options)
        self.answer: str | None = None

    async def run(self, sample: Sampling) -> Mapping[str, float | str] | None:
        self.answer = await ask(sample.model, self.task.value.instruction)
        return None

    async def grade(self, grading: Grading) -> float:
        return float(self.answer == self.task.value.answer)


TASK: Task[BaseModel] = Task(0, "sum", AnswerTask(), "tasks.jsonl:1")


def context(cls: type | None, script: Script = ("4",), **settings: Any) -> RuntimeContext:
    policy = Policy("main", ScriptedSampler(script), PlainRenderer())
    judge = Policy("judge", ScriptedSampler(lambda _, __: "0.5"), PlainRenderer())
    settings = {"options": None, "episode_options": None, "max_seq_len": 1000} | settings
    producers = Producers(policy, {"judge": judge})
    return RuntimeContext(tasks=(TASK,), episode_class=cls, producers=producers, **settings)


def runtime(cls: type, script: Script = ("4",), **settings: Any) -> EpisodeRuntime:
    return create_runtime(context(cls, script, **settings))


async def test_a_try_goes_from_setup_to_a_reward() -> None:
    async with runtime(AnswerEpisode) as opened, opened.open(TASK, PLACE) as lease:
        await lease.setup()
        await lease.run(Clock())
        assert await lease.grade(timed_out=False) == 1.0
        recorded = lease.recorded()
    assert recorded.trajectory.sampled_tokens == 2
    assert [call.reply["content"] for call in recorded.calls] == ["4"]
    assert (recorded.failure, recorded.context_full) == (None, False)


async def test_a_runtime_says_what_its_class_declares() -> None:
    capabilities = runtime(AnswerEpisode).capabilities
    assert capabilities.model_access == "direct"
    assert capabilities.model_access_from == "AnswerEpisode.model_access"
    assert capabilities.acquires == ("sampling",)
    assert capabilities.grading_retries == 2
    assert capabilities.grading_retries_from == "AnswerEpisode.grading_retries"
    assert (capabilities.grades_attempts, capabilities.grades_groups) == (True, False)
    assert capabilities.rollout_seconds == 110


def test_the_factory_takes_no_runtime_options() -> None:
    assert create_runtime.options_model is None
    made: Runtime = create_runtime(context(AnswerEpisode))
    assert isinstance(made, EpisodeRuntime)


def test_a_config_without_an_episode_is_refused() -> None:
    with pytest.raises(EpisodeError, match=r'set class = "module:MyEpisode" in \[episode\]'):
        create_runtime(context(None))


def test_a_class_that_cannot_be_run_is_refused_before_anything_runs() -> None:
    class NoGrader(Episode[AnswerTask, None]):
        async def run(self, sample: Sampling) -> None: ...

    with pytest.raises(EpisodeError, match="has no grader"):
        create_runtime(context(NoGrader))


async def test_each_try_has_an_instance_of_its_own() -> None:
    seen: list[Episode[Any, Any]] = []

    class Kept(AnswerEpisode):
        async def setup(self, setup: Setup) -> None:
            seen.append(self)

    async with runtime(Kept) as opened:
        for _ in range(2):
            async with opened.open(TASK, PLACE) as lease:
                await lease.setup()
    first, second = seen
    assert first is not second
    assert first.task is TASK


async def test_an_init_that_forgets_super_is_told() -> None:
    class Forgetful(AnswerEpisode):
        def __init__(self, task: Task[AnswerTask], options: None) -> None:
            self.answer = None

    async with runtime(Forgetful) as opened, opened.open(TASK, PLACE) as lease:
        with pytest.raises(EpisodeError, match=r"super\(\).__init__\(task, options\)"):
            await lease.setup()


async def run_only(
    cls: type, script: Script = ("4",), clock: Clock | None = None, **settings: Any
) -> Any:
    """Set up and run one try; its lease."""
    async with runtime(cls, script, **settings) as opened, opened.open(TASK, PLACE) as lease:
        await lease.setup()
        await lease.run(clock or Clock())
    return lease


async def test_what_run_returns_becomes_metadata() -> None:
    class Noted(AnswerEpisode):
        async def run(self, sample: Sampling) -> Mapping[str, Any]:
            sample.metadata["turns"] = 1
            return {"reason": "answered", "share": np.float32(0.5)}

    lease = await run_only(Noted)
    assert lease.recorded().metadata == {"turns": 1, "reason": "answered", "share": 0.5}


async def test_metadata_is_merged_in_place_and_nothing_handed_over_is_replaced() -> None:
    """`sample.metadata |= {...}` merged, and then failed the attempt as a frozen field's change."""

    class Noting(AnswerEpisode):
        async def run(self, sample: Sampling) -> None:
            sample.metadata |= {"turns": 1}
            for name in ("metadata", "models", "model", "sandboxes", "seconds_left"):
                with pytest.raises(AttributeError, match=f"{name} of Sampling cannot be replaced"):
                    setattr(sample, name, {})

    lease = await run_only(Noting)
    assert lease.recorded().metadata == {"turns": 1}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"reason": None}, "metadata 'reason' is null: use a number, a boolean or a string"),
        (3, r"AnswerEpisode.run\(\) returned 3: return metadata as a mapping, or nothing"),
        (["turns"], "return metadata as a mapping"),
    ],
)
async def test_metadata_that_cannot_be_used_is_refused(returned: Any, said: str) -> None:
    class Wrong(AnswerEpisode):
        async def run(self, sample: Sampling) -> Any:
            return returned

    Wrong.__name__ = "AnswerEpisode"
    with pytest.raises(EpisodeError, match=said):
        await run_only(Wrong)


async def test_a_cut_leaves_the_record_whole_and_the_grader_knows() -> None:
    class Slow(AnswerEpisode):
        async def run(self, sample: Sampling) -> None:
            sample.metadata["stage"] = "asked"
            self.answer = await ask(sample.model, "2 + 2?")
            await ask(sample.model, "and more?")

        async def grade(self, grading: Grading) -> float:
            assert grading.timed_out
            assert grading.metadata["stage"] == "asked"
            return 0.25

    script = ["4", Line("never", seconds=200)]
    async with runtime(Slow, script) as opened, opened.open(TASK, PLACE) as lease:
        await lease.setup()
        clock = Clock()
        await lease.run(clock)
        assert clock.timed_out
        assert await lease.grade(timed_out=True) == 0.25
        assert len(lease.recorded().trajectory.turns) == 1
        assert lease.recorded().metadata == {"stage": "asked"}


async def seconds_left(cls: type[Episode[Any, Any]], clock: Clock, **settings: Any) -> list[float]:
    """What an agent reads at its start and 5 seconds later."""
    seen: list[float] = []

    class Timed(cls):  # type: ignore[valid-type, misc]
        async def run(self, sample: Sampling) -> None:
            seen.append(sample.seconds_left)
            await anyio.sleep(5)
            seen.append(sample.seconds_left)

    await run_only(Timed, clock=clock, **settings)
    return [round(seconds, 6) for seconds in seen]


async def test_seconds_left_counts_the_time_of_the_episode() -> None:
    assert await seconds_left(AnswerEpisode, Clock(110)) == [100, 95]


@pytest.mark.parametrize(("seconds", "left"), [(50, [45, 40]), (400, [390, 385]), (5.5, [4.95, 0])])
async def test_seconds_left_ends_a_tenth_before_a_clock_of_the_config_at_most_ten_seconds(
    seconds: float, left: list[float]
) -> None:
    assert await seconds_left(AnswerEpisode, Clock(seconds), rollout_seconds=seconds) == left


async def test_a_sampling_that_outlives_its_try_is_worth_nothing() -> None:
    leaked: list[Sampling] = []

    class Leaky(AnswerEpisode):
        async def run(self, sample: Sampling) -> None:
            leaked.append(sample)

    lease = await run_only(Leaky)
    with pytest.raises(EpisodeError, match="had ended"):
        await ask(leaked[0].model, "late")
    assert leaked[0].seconds_left == 0
    assert lease.recorded().calls == ()


async def test_a_failed_model_call_is_on_record_though_the_agent_swallows_it() -> None:
    class Careless(AnswerEpisode):
        async def run(self, sample: Sampling) -> None:
            try:
                await ask(sample.model, "2 + 2?")
            except ServiceUnavailable:
                self.answer = "?"

    failure = ServiceUnavailable("no answer")
    lease = await run_only(Careless, [failure])
    assert lease.recorded().failure is failure


async def test_a_judge_that_failed_does_not_become_a_number() -> None:
    class Careless(AnswerEpisode):
        async def grade(self, grading: Grading) -> float:
            try:
                return float(await ask(grading.models["main"], "grade it"))
            except ServiceUnavailable:
                return 0.0

    script = ["4", ServiceUnavailable("no answer"), "1"]
    async with runtime(Careless, script) as opened, opened.open(TASK, PLACE) as lease:
        await lease.setup()
        await lease.run(Clock())
        with pytest.raises(ServiceUnavailable):
            await lease.grade(timed_out=False)
        assert await lease.grade(timed_out=False) == 1.0
        assert lease.recorded().failure is None


async def test_a_grader_may_ask_models_and_none_of_it_is_trained() -> None:
    class Judged(AnswerEpisode):
        async def grade(self, grading: Grading) -> float:
            assert [call.reply["content"] for call in grading.transcript] == ["4"]
            grading.metadata["judged"] = True
            return float(await ask(grading.models["judge"], "grade it"))

    async with runtime(Judged) as opened, opened.open(TASK, PLACE) as lease:
        await lease.setup()
        await lease.run(Clock())
        assert await lease.grade(timed_out=False) == 0.5
        recorded = lease.recorded()
    assert len(recorded.trajectory.turns) == 1
    assert [call.producer for call in recorded.calls] == ["main", "judge"]
    assert recorded.metadata == {"judged": True}


async def test_a_discard_passes_as_it_is() -> None:
    class Dropped(AnswerEpisode):
        async def run(self, sample: Sampling) -> None:
            raise Discard("unparsable")

    with pytest.raises(Discard, match="unparsable"):
        await run_only(Dropped)


async def test_a_discard_is_taken_out_of_the_group_it_comes_in() -> None:
    """An agent whose branches run in a task group raises it inside an ExceptionGroup."""

    class Branching(AnswerEpisode):
        async def run(self, sample: Sampling) -> None:
            async def drop() -> None:
                raise Discard("unparsable")

            async with anyio.create_task_group() as outer, anyio.create_task_group() as inner:
                outer.start_soon(anyio.sleep, 50)
                inner.start_soon(drop)

    with pytest.raises(Discard, match="unparsable"):
        await run_only(Branching)


async def test_other_exceptions_pass_as_they_are() -> None:
    class Broken(AnswerEpisode):
        async def run(self, sample: Sampling) -> None:
            async with anyio.create_task_group():
                raise ValueError("a bug")

    with pytest.raises(ExceptionGroup) as raised:
        await run_only(Broken)
    assert raised.group_contains(ValueError)


class Closing(AnswerEpisode):
    closed = 0

    async def close(self) -> None:
        await anyio.sleep(1)
        type(self).closed += 1


@pytest.fixture
def closing() -> type[Closing]:
    return type("Closing", (Closing,), {"closed": 0})


async def test_a_try_is_closed_after_its_end(closing: type[Closing]) -> None:
    await run_only(closing)
    assert closing.closed == 1


async def test_a_try_is_closed_after_a_failed_setup(closing: type[Closing]) -> None:
    class Failing(closing):  # type: ignore[valid-type, misc]
        async def setup(self, setup: Setup) -> None:
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        await run_only(Failing)
    assert Failing.closed == 1


async def test_an_attempt_that_is_cancelled_is_closed_all_the_same(closing: type[Closing]) -> None:
    with anyio.move_on_after(5) as scope:
        await attempt(closing, TASK.value, replies=[Line("never", seconds=200)])
    assert scope.cancelled_caught
    assert closing.closed == 1


async def test_a_close_that_fails_is_said_in_the_log_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was told without its line, and so nobody knew what to mend."""

    class Failing(AnswerEpisode):
        async def close(self) -> None:
            raise OSError("no disk")

    tried = await attempt(Failing, TASK.value, replies=["4"])
    assert (tried.reward, tried.detail) == (1.0, "")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    told = record.getMessage()
    assert told.startswith("attempt 0 of group 0 (task 'sum'): release: OSError: no disk (")
    assert told.endswith(" in close); what it held may be left over")


async def test_a_close_that_hangs_is_ended_by_the_release_clock(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hanging(AnswerEpisode):
        async def close(self) -> None:
            await anyio.sleep_forever()

    before = anyio.current_time()
    tried = await attempt(Hanging, TASK.value, replies=["4"], terms=Terms(release_seconds=7))
    assert anyio.current_time() - before == pytest.approx(7)
    assert tried.reward is not None
    assert "release outlasted its clock of 7 s" in caplog.text


# --- What an Episode holds open, such as a client with a task group of its own


class Holding(AnswerEpisode):
    """Opens a group in setup and closes it in close, as a client of a tool server is held."""

    async def setup(self, setup: Setup) -> None:
        self.group = anyio.create_task_group()
        await self.group.__aenter__()
        self.group.start_soon(self.serve)

    async def serve(self) -> None:
        await anyio.sleep_forever()

    async def close(self) -> None:
        self.group.cancel_scope.cancel()
        await self.group.__aexit__(None, None, None)


on_both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


@on_both
async def test_what_setup_opened_is_closed_in_close(caplog: pytest.LogCaptureFixture) -> None:
    """A scope around close() closed in the wrong order, which ended the run as our bug."""
    tried = await attempt(Holding, TASK.value, replies=["4"])
    assert (tried.reward, tried.detail, caplog.text) == (1.0, "", "")


@on_both
@pytest.mark.parametrize("closes", [True, False])
async def test_a_client_that_dies_fails_the_try_and_not_the_run(
    closes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error cancels the code that holds it, and that was taken for the end of the run. Then the
    try told of the cancellation first, and of its cause only where close() closed the client."""

    class Dying(Holding):
        async def serve(self) -> None:
            raise ConnectionError("the server is gone")

        async def run(self, sample: Sampling) -> None:
            await super().run(sample)
            await anyio.sleep(60)

        async def close(self) -> None:
            if closes:
                await super().close()

    tried = await attempt(Dying, TASK.value, replies=["4"])
    assert tried.fate is Fate.FAILED
    assert tried.detail.startswith(
        "run: ConnectionError: the server is gone; this ended a task group that was held open, "
        "and with it run() at "
    )
    assert tried.detail.endswith(" in serve)")
    assert tried.attempt.discarded is not None
    assert tried.attempt.discarded.exception == "ConnectionError"
    assert "mend it" not in caplog.text


@on_both
@pytest.mark.parametrize(("phase", "fate"), [("run", Fate.FAILED), ("grade", Fate.UNGRADED)])
async def test_who_keeps_the_death_of_a_client_to_itself_gets_no_reward(
    phase: str, fate: Fate
) -> None:
    """An attempt whose tool server had died was graded, and trained, where `except BaseException`
    took the cancellation that told of it."""

    class Dying(Holding):
        async def setup(self, setup: Setup) -> None:
            self.dies = anyio.Event()
            await super().setup(setup)

        async def serve(self) -> None:
            await self.dies.wait()
            raise ConnectionError("the server is gone")

        async def come_to(self, method: str) -> None:
            if method == phase:
                self.dies.set()
                try:
                    await anyio.sleep(60)
                except BaseException:
                    return

        async def run(self, sample: Sampling) -> None:
            await super().run(sample)
            await self.come_to("run")

        async def grade(self, grading: Grading) -> float:
            await self.come_to("grade")
            return 1.0

    tried = await attempt(Dying, TASK.value, replies=["4"])
    assert (tried.fate, tried.reward) == (fate, None)
    assert tried.detail.startswith(f"{'run' if phase == 'run' else 'grading'}: ConnectionError: ")
    assert f"a task group that was held open, and with it {phase}()" in tried.detail


@on_both
async def test_a_client_that_a_grader_ends_itself_costs_no_reward() -> None:
    class Ending(Holding):
        async def grade(self, grading: Grading) -> float:
            self.group.cancel_scope.cancel()
            return 1.0

    tried = await attempt(Ending, TASK.value, replies=["4"])
    assert (tried.reward, tried.detail) == (1.0, "")


@on_both
@pytest.mark.parametrize("where", ["setup", "run", "grade"])
async def test_what_is_never_closed_costs_no_reward_and_ends_no_run(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Leaving(AnswerEpisode):
        async def come_to(self, method: str) -> None:
            if method == where:
                group = anyio.create_task_group()
                await group.__aenter__()
                group.start_soon(anyio.sleep_forever)

        async def setup(self, setup: Setup) -> None:
            await self.come_to("setup")

        async def run(self, sample: Sampling) -> None:
            await super().run(sample)
            await self.come_to("run")

        async def grade(self, grading: Grading) -> float:
            await self.come_to("grade")
            return await super().grade(grading)

    tried = await attempt(Leaving, TASK.value, replies=["4"])
    assert (tried.reward, tried.detail) == (1.0, "")
    [record] = caplog.records
    text = record.getMessage()
    assert text.startswith("attempt 0 of group 0 (task 'sum'): ")
    assert f"{where}()" in text.partition("opened a task group")[0]


class Ranked(Episode[AnswerTask, None]):
    async def run(self, sample: Sampling) -> None:
        self.answer = await ask(sample.model, self.task.value.instruction)

    @classmethod
    async def grade_group(cls, group: GroupGrading) -> Sequence[float]:
        assert group.task is TASK
        assert group.options is None
        judged = float(await ask(group.models["judge"], "rank them"))
        return [judged + len(attempt.episode.answer) for attempt in group.attempts]


def attempt_of(recorded: Trajectory, reward: float) -> Attempt:
    return Attempt(0, 0, "sum", reward, flags=Flags(timed_out=True), trajectory=recorded)


async def grade_group(cls: type, script: Script, reward: float = 0.0) -> object:
    async with runtime(cls, script) as opened:
        graded: list[Graded] = []
        for _ in range(2):
            async with opened.open(TASK, PLACE) as lease:
                await lease.setup()
                await lease.run(Clock())
            graded.append(Graded(lease, attempt_of(lease.recorded().trajectory, reward)))
        return await opened.grade_group(TASK, graded)


async def test_a_group_is_graded_by_what_its_attempts_left() -> None:
    assert await grade_group(Ranked, ["a", "abc"]) == [1.5, 3.5]


async def test_a_group_grader_sees_rewards_where_grade_gave_them() -> None:
    seen: list[object] = []

    class Both(Ranked):
        async def grade(self, grading: Grading) -> float:
            return 0.75

        @classmethod
        async def grade_group(cls, group: GroupGrading) -> Sequence[float]:
            seen.extend((a.reward, a.timed_out) for a in group.attempts)
            return [0.0, 1.0]

    class Alone(Ranked):
        @classmethod
        async def grade_group(cls, group: GroupGrading) -> Sequence[float]:
            seen.extend(a.reward for a in group.attempts)
            return [0.0, 1.0]

    await grade_group(Both, ["a", "b"], reward=0.75)
    await grade_group(Alone, ["a", "b"])
    assert seen == [(0.75, True), (0.75, True), None, None]


async def test_a_group_judge_that_failed_does_not_become_numbers() -> None:
    class Careless(Ranked):
        @classmethod
        async def grade_group(cls, group: GroupGrading) -> Sequence[float]:
            with suppress(ServiceUnavailable):
                await ask(group.models["main"], "rank them")
            return [0.0, 1.0]

    with pytest.raises(ServiceUnavailable):
        await grade_group(Careless, ["a", "b", ServiceUnavailable("no answer")])
