"""Whole runs of agents, graders and samplers that do whatever they like, in virtual time.

Whatever they do, the run ends, every attempt has one fate, every sum that the run folder promises
adds up as it is written on disk, and no failure has become a reward.
"""

import logging
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recipes.test_rl import row_of
from trio.testing import MockClock

from loops_cookbook.attempts import Fate
from loops_cookbook.episodes import (
    Discard,
    Episode,
    Grading,
    GroupGrading,
    Model,
    Sampling,
    Setup,
)
from loops_cookbook.errors import EngineDied, LoopsError, ServiceUnavailable
from loops_cookbook.recipes.plan import AnyTask, Plan
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.records import GroupRow, RolloutRow
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.read import RecordedRun, open_run
from loops_cookbook.rundir.write import RunWriter
from loops_cookbook.runtimes.producers import Judge, Producer
from loops_cookbook.services.base import SampleParams
from loops_cookbook.testing import (
    Line,
    PlainRenderer,
    RecordingTrainer,
    ScriptedChat,
    ScriptedSampler,
    ScriptedService,
)
from loops_cookbook.tokens import Ids, SampledTokens, ids_of, logprobs_of

GROUP_SIZE = 3
CONFIG = (
    f"training.group_size={GROUP_SIZE}",
    "training.max_rollout_retries=1",
    "training.max_consecutive_unusable_groups=6",
    "concurrency.sampling=4",
    "concurrency.grading=2",
    "concurrency.start_ahead=1",
    "clocks.rollout_seconds=20",
    "clocks.setup_seconds=5",
    "clocks.grading_seconds=5",
    "clocks.release_seconds=5",
    'evaluation.sets.words={tasks="tasks.jsonl", attempts=2}',
)
HELLO = {"role": "user", "content": "hello"}


@dataclass
class Told:
    """What one try knows of itself that the run folder must agree with."""

    faults: list[str] = field(default_factory=list)
    """Whatever forbids a reward."""
    graded: list[object] = field(default_factory=list)
    """What its grader returned in time."""
    group_graded: list[object] = field(default_factory=list)
    """What its group's grader returned for it in time."""


class World:
    """What the episodes of one run do, try after try, and what they did."""

    def __init__(self, scripts: Sequence[dict[str, Any]]) -> None:
        self.tries: list[Told] = []
        self._scripts = scripts

    def next_script(self) -> dict[str, Any]:
        script = self._scripts[len(self.tries) % len(self._scripts)]
        self.tries.append(Told())
        return script


class Mute(Exception):
    """An exception that cannot be asked what it says."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


async def misbehave(how: str) -> None:
    """What user code does that says nothing."""
    match how:
        case "raises":
            raise OSError("boom")
        case "raises several":
            raise ExceptionGroup("both", [OSError("one"), ValueError("two")])
        case "raises what is mute":
            raise Mute
        case "exits":
            raise SystemExit(0)
        case "exits in a task":
            async with anyio.create_task_group() as group:
                group.start_soon(misbehave, "exits")
                await anyio.sleep_forever()
        case "hangs":
            await anyio.sleep_forever()
        case "drops":
            raise Discard("not this one")
        case "takes a while":
            await anyio.sleep(3)
        case "complains when cut":
            try:
                await anyio.sleep_forever()
            finally:
                raise RuntimeError("rude")
        case "lingers":
            with anyio.CancelScope(shield=True):
                await anyio.sleep(7)
        case "ignores cancellation":
            with anyio.CancelScope(shield=True):
                await anyio.sleep(400)
        case _:
            assert how == "behaves"


QUIET = ("behaves", "hangs", "takes a while", "complains when cut", "lingers")
FAULTY = (
    *("raises", "raises several", "raises what is mute", "exits", "exits in a task"),
    *("drops", "ignores cancellation"),
)


LATE = ("lingers", "ignores cancellation")
"""What a grader may not do in its 5 seconds, though it gives a number at last."""


async def ask(models: Mapping[str, Model], judge: str) -> None:
    """What it says matters to nobody, and that it fails is swallowed."""
    if judge != "nobody":
        with suppress(Exception):
            await models[judge].conversation().generate([HELLO])


def is_finite(value: object) -> bool:
    return isinstance(value, int | float | np.floating) and math.isfinite(value)


class Wild(Episode[AnyTask, None]):
    """Does as its script says, and notes what must follow from it."""

    world: World

    def __init__(self, task: Any, options: None) -> None:
        super().__init__(task, options)
        self.number = len(self.world.tries)
        self.script = self.world.next_script()
        self.told = self.world.tries[self.number]

    async def setup(self, setup: Setup) -> None:
        await self._misbehave("setup")

    async def run(self, sample: Sampling) -> Any:
        sample.metadata["try"] = self.number
        conversation = sample.model.conversation()
        history: list[Any] = [HELLO]
        for turn in range(self.script["turns"]):
            if self.script["rewrites"]:
                history = [{"role": "user", "content": f"turn {turn}"}]
            try:
                reply = await conversation.generate(history)
            except Exception as error:
                self.told.faults.append(f"a model call failed: {error!r}")
                if not self.script["swallows"]:
                    raise
            else:
                history = [*history, reply.message, HELLO]
        await ask(sample.models, self.script["run_judge"])
        if sample.models.failure is not None:
            self.told.faults.append(f"a model call failed: {sample.models.failure!r}")
        await self._misbehave("run")
        returned = self.script["returns"]
        if isinstance(returned, list) or (isinstance(returned, dict) and None in returned.values()):
            self.told.faults.append(f"run returned {returned!r}")
        return returned

    async def grade(self, grading: Grading) -> Any:
        await misbehave(self.script["grade"])
        if self.script["asks"]:
            with suppress(Exception):
                await grading.models["main"].conversation().generate([HELLO])
        await ask(grading.models, self.script["grade_judge"])
        reward = self.script["reward"]
        if self.script["grade"] not in LATE and not grading.models.failure and is_finite(reward):
            self.told.graded.append(reward)
        return reward

    async def close(self) -> None:
        await misbehave(self.script["close"])

    async def _misbehave(self, phase: str) -> None:
        how = self.script[phase]
        if how in FAULTY:
            self.told.faults.append(f"{phase} {how}")
        await misbehave(how)


class Patient(Wild):
    """Asks its grader twice."""

    grading_retries = 1


class Ranking(Wild):
    """Grades the group as well."""

    @classmethod
    async def grade_group(cls, group: GroupGrading) -> Any:
        members = [member.episode for member in group.attempts]
        first = members[0].script
        await misbehave(first["grade_group"])
        rewards = [float(i % 2) for i in range(len(members) - first["forgets"])]
        if first["grade_group"] not in LATE and not first["forgets"]:
            for member, reward in zip(members, rewards, strict=True):
                member.told.group_graded.append(reward)
        return rewards


KINDS_OF_FATE = ("trained", "unused", "discarded")
KINDS: dict[str, type[Wild]] = {"plain": Wild, "patient": Patient, "ranking": Ranking}

LIES: dict[str, Callable[[int, int], tuple[Any, ...]]] = {
    "no completion": lambda limit, version: (),
    "two completions": lambda limit, version: (said([1], version), said([1], version)),
    "text": lambda limit, version: ("hello",),
    "too few logprobs": lambda limit, version: (
        SampledTokens(ids_of([1, 2]), logprobs_of([-1.0]), "stop", version),
    ),
    "NaN logprobs": lambda limit, version: (
        SampledTokens(ids_of([1]), logprobs_of([math.nan]), "stop", version),
    ),
    "an id that no token has": lambda limit, version: (said([9999], version),),
    "an id below 0": lambda limit, version: (said([-1], version),),
    "an older version": lambda limit, version: (said([1], version - 1),),
    "too many tokens": lambda limit, version: (said([1] * (limit + 1), version),),
}
MOODS = (
    *LIES,
    "hangs",
    "fails",
    "has a bug",
    "is slow",
    "is silent",
    "never stops",
    *["is true"] * 9,
)


def said(ids: Sequence[int], version: int | None) -> SampledTokens:
    return SampledTokens(ids_of(ids), logprobs_of([-0.5] * len(ids)), "stop", version)


class Moody(ScriptedSampler):
    """Answers in one mood after another."""

    def __init__(self, moods: Sequence[str], dies_at: int | None) -> None:
        super().__init__(lambda prompt, call: "abc"[: 1 + call % 3])
        self._moods = moods
        self._dies_at = dies_at
        self._asked = count()

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        number = next(self._asked)
        mood = self._moods[number % len(self._moods)]
        if number == self._dies_at:
            raise EngineDied("the engine is gone")
        if mood in LIES:
            return LIES[mood](params.max_tokens, min_policy_version)
        version = self.policy_version
        match mood:
            case "hangs":
                await anyio.sleep_forever()
            case "fails":
                raise ServiceUnavailable("away")
            case "has a bug":
                raise KeyError("choices")
            case "is slow":
                await anyio.sleep(6)
            case "is silent":
                return (said([], version),)
            case "never stops":
                return (said([1] * params.max_tokens, version),)
        return await super().sample(
            prompt_ids,
            params,
            n=n,
            min_policy_version=min_policy_version,
            affinity_key=affinity_key,
        )


JUDGES = {
    "sound": "yes",
    "slow": Line("yes", seconds=3),
    "silent": Line("yes", seconds=1e9),
    "away": ServiceUnavailable("no answer in 600 s"),
    "rude": KeyError("choices"),
}
"""What each of the models beside the policy answers, always."""


def judges() -> dict[str, Producer]:
    def judge(name: str) -> Producer:
        return Judge(name, ScriptedChat(lambda prompt, call: JUDGES[name]))

    return {name: judge(name) for name in JUDGES}


def script_of(rng: random.Random, wildness: float) -> dict[str, Any]:
    """A try in which each thing goes wrong with this probability."""

    def drawn(usual: Sequence[object], otherwise: Sequence[object]) -> Any:
        return rng.choice(otherwise if rng.random() < wildness else usual)

    def behaviour() -> str:
        return drawn(["behaves", "takes a while"], [*QUIET, *FAULTY])

    return {
        "setup": behaviour(),
        "turns": drawn([1, 2], [0, 1, 3, 12]),
        "rewrites": drawn([False], [True]),
        "swallows": rng.random() < 0.5,
        "run": behaviour(),
        "returns": drawn([None, {"x": 1.0}], [{"x": math.nan}, ["x"], {"x": None}]),
        "run_judge": drawn(["nobody", "sound"], sorted(JUDGES)),
        "grade": behaviour(),
        "grade_judge": drawn(["nobody", "sound"], sorted(JUDGES)),
        "asks": drawn([False], [True]),
        "reward": drawn([0, 1, 0.5, True, np.float32(2)], [None, "1", math.nan, np.float16("inf")]),
        "grade_group": behaviour(),
        "forgets": drawn([0], [1]),
        "close": behaviour(),
    }


@dataclass
class Ran:
    """A run, as its doubles saw it and as it lies on disk."""

    world: World
    service: ScriptedService
    folder: RunFolder
    was_cut: bool
    is_ranked: bool
    disk: RecordedRun

    def __post_init__(self) -> None:
        self.counts = self.disk.run.counts
        self.rollouts = self.disk.rollouts()
        self.groups = self.disk.groups()
        self.steps = self.disk.steps()


def carried_out(
    plan: Plan, world: World, service: ScriptedService, folder: RunFolder, stop_after: float | None
) -> Ran:
    was_cut = False

    async def main() -> None:
        nonlocal was_cut
        with anyio.move_on_after(math.inf if stop_after is None else stop_after) as scope:
            try:
                await run_rl(plan, service, writer, row_of(plan))
            except LoopsError:
                was_cut = True
        was_cut |= scope.cancelled_caught

    with RunWriter(folder) as writer:
        clock = MockClock(autojump_threshold=0)
        anyio.run(main, backend="trio", backend_options={"clock": clock})
    disk = open_run(folder.root)
    ranked = plan.code.episode_class is not None and issubclass(plan.code.episode_class, Ranking)
    return Ran(world, service, folder, was_cut, ranked, disk)


@pytest.fixture
def wild(runnable: Callable[..., Plan], tmp_path: Path) -> Callable[..., Ran]:
    """Carries out the run of a script."""
    planned = runnable(*CONFIG)
    vocabulary = PlainRenderer().tokenizer.vocabulary_size

    def run(
        seed: int,
        wildness: float,
        *,
        kind: str = "plain",
        dies_at: int | None = None,
        train_fails_at: int | None = None,
        stop_after: float | None = None,
    ) -> Ran:
        rng = random.Random(seed)
        world = World([script_of(rng, wildness) for _ in range(40)])
        moods = [rng.choice(MOODS) if rng.random() < wildness else "is true" for _ in range(40)]
        episode = type("Wild", (KINDS[kind],), {"world": world})
        code = replace(planned.code, episode_class=episode)
        sampler = Moody(moods, dies_at)
        failures = {} if train_fails_at is None else {train_fails_at: ServiceUnavailable("away")}
        service = ScriptedService(sampler, RecordingTrainer(sampler, failures=failures, seconds=1))
        with tempfile.TemporaryDirectory(dir=tmp_path) as root:
            folder = new_run_folder(Path(root), Path(root))
            plan = replace(planned, code=code, vocabulary=vocabulary, others=judges())
            ran = carried_out(plan, world, service, folder, stop_after)
            every_row_agrees(ran)
        return ran

    return run


def test_every_attempt_of_any_run_has_one_true_fate(
    wild: Callable[..., Ran], caplog: pytest.LogCaptureFixture
) -> None:
    seen: Counter[Fate] = Counter()
    caplog.set_level(logging.CRITICAL)  # tracebacks by the hundred take longer than the runs

    @settings(max_examples=25)
    @given(
        seed=st.integers(0, 2**32),
        wildness=st.sampled_from([0.02, 0.05, 0.1, 0.2, 0.5]),
        kind=st.sampled_from(sorted(KINDS)),
        dies_at=st.none() | st.none() | st.integers(0, 60),
        train_fails_at=st.none() | st.none() | st.integers(0, 2),
        stop_after=st.none() | st.none() | st.integers(0, 100),
    )
    def check(seed: int, wildness: float, **rest: Any) -> None:
        seen.update(row.fate for row in wild(seed, wildness, **rest).rollouts)

    check()
    # Else the examples had become too tame, or too wild, to prove anything.
    assert seen.keys() >= {*Fate} - {Fate.EVALUATED, Fate.TOO_LONG}


def every_row_agrees(ran: Ran) -> None:
    fates_are_whole(ran)
    no_failure_has_a_reward(ran)
    rewards_are_kept(ran)
    step_rows_tell_of_their_groups(ran)
    the_trainer_got_what_is_told(ran)
    transcripts_agree(ran)
    evaluations_are_whole(ran)
    assert ran.service.sampler.under_way == 0
    assert not ran.service.is_open


def fates_are_whole(ran: Ran) -> None:
    """Each attempt that was started is in one row, and in one place of the last counts."""
    started = ran.counts.get("attempts/started", 0)
    places = sorted((row.group, row.attempt) for row in ran.rollouts)
    assert places == [(i // GROUP_SIZE, i % GROUP_SIZE) for i in range(started)]
    fates = Counter(row.fate for row in ran.rollouts)
    assert Fate.EVALUATED not in fates
    assert ran.counts.get("attempts/finished", 0) == started
    assert ran.counts.get("attempts/in_flight", 0) == 0
    for kind in KINDS_OF_FATE:
        told = ran.counts.get(f"attempts/{kind}", 0)
        assert told == sum(number for fate, number in fates.items() if fate.kind == kind)
    for fate in Fate:
        if "/" in fate:
            assert ran.counts.get(f"attempts/{fate}", 0) == fates[fate]
    failures = Counter(row.exception for row in ran.rollouts if row.fate is Fate.FAILED)
    assert {name: ran.counts[f"attempts/failed/{name}"] for name in failures} == failures
    if not ran.was_cut:
        assert fates[Fate.CANCELLED] == fates[Fate.SURPLUS] == 0


def no_failure_has_a_reward(ran: Ran) -> None:
    for row in ran.rollouts:
        assert (row.fate.kind == "discarded") == (row.reward is None)
        if row.reward is not None:
            told = told_by(row, ran)
            assert told is not None
            assert told.faults == []
            assert row.reward == number_of((told.group_graded or told.graded)[-1])
            assert row.sampled_tokens > 0
            assert (row.detail, row.exception) == ("", None)


def rewards_are_kept(ran: Ran) -> None:
    """What fails, hangs or is slow once a grader has spoken takes no reward away."""
    if ran.was_cut or ran.is_ranked:
        return
    for row in ran.rollouts:
        told = told_by(row, ran)
        if told is not None and told.graded and not told.faults:
            assert row.reward == number_of(told.graded[-1])


def step_rows_tell_of_their_groups(ran: Ran) -> None:
    of_group: dict[int, list[RolloutRow]] = {}
    for row in sorted(ran.rollouts, key=lambda row: row.attempt):
        of_group.setdefault(row.group, []).append(row)
    for group in ran.groups:
        rows = of_group[group.serial]
        assert list(group.rewards) == [row.reward for row in rows]
        rewarded = {row.fate for row in rows if row.reward is not None}
        if group.usable:
            assert rewarded in ({Fate.TRAINED}, {Fate.SURPLUS})
        else:
            assert rewarded <= {Fate(f"unused/{group.reason}")}
    assert [step.update for step in ran.steps] == list(range(1, len(ran.steps) + 1))
    for step in ran.steps:
        groups = [group for group in ran.groups if group.update == step.update]
        row_agrees(step.metrics, groups, [row for g in groups for row in of_group[g.serial]])


def row_agrees(
    metrics: Mapping[str, float], groups: Sequence[GroupRow], rows: Sequence[RolloutRow]
) -> None:
    """A row of `steps.jsonl` with the groups and attempts that count in it."""
    kinds = Counter(row.fate.kind for row in rows)
    assert {kind: metrics[f"attempts/{kind}"] for kind in kinds} == kinds
    assert metrics["attempts/finished"] == kinds.total()
    assert metrics["groups/usable"] == sum(group.usable for group in groups) == 2
    trained = [row for row in rows if row.fate is Fate.TRAINED]
    everyone = [row.reward for row in rows if row.reward is not None]
    assert metrics["reward/mean"] == pytest.approx(np.mean([row.reward for row in trained]))
    assert metrics["reward/all_mean"] == pytest.approx(np.mean(everyone))
    assert metrics["attempts/timed_out"] == sum(row.flags.timed_out for row in rows)
    assert metrics["attempts/retried"] == sum(row.flags.retried for row in rows)
    assert metrics["tokens/prompt"] == sum(row.prompt_tokens for row in rows)
    assert metrics["tokens/sampled"] == sum(row.sampled_tokens for row in rows)
    assert 0 < metrics["tokens/trained"] <= sum(row.sampled_tokens for row in trained)


def the_trainer_got_what_is_told(ran: Ran) -> None:
    batches = ran.service.trainer.batches
    trained = [row for row in ran.rollouts if row.fate is Fate.TRAINED]
    # A run may be stopped between an update and its row.
    assert len(ran.steps) <= len(batches) <= len(ran.steps) + 1
    assert len({row.group for row in trained}) == 2 * len(batches)
    assert sum(len(sent.batch) for sent in batches) <= sum(row.sequences for row in trained)
    vocabulary = PlainRenderer().tokenizer.vocabulary_size
    for datum in (datum for sent in batches for datum in sent.batch):
        assert datum.advantages is not None
        assert datum.logprobs is not None
        assert datum.trained_tokens > 0
        assert np.isfinite(datum.logprobs).all()
        assert np.isfinite(datum.advantages).all()
        assert ((datum.target_ids >= 0) & (datum.target_ids < vocabulary)).all()


def transcripts_agree(ran: Ran) -> None:
    """Each attempt that said anything has a file of its own, with the same words."""
    names = [row.transcript for row in ran.rollouts if row.transcript is not None]
    assert len(set(names)) == len(names)
    for row in ran.rollouts:
        assert row.transcript is not None or row.sampled_tokens == 0
        if row.transcript is not None:
            transcript = ran.disk.transcript(row.transcript)
            assert transcript.reward == row.reward
            assert transcript.fate == (row.fate if row.fate.kind == "discarded" else None)
            assert transcript.trajectory.sampled_tokens == row.sampled_tokens


def evaluations_are_whole(ran: Ran) -> None:
    for row in ran.disk.evaluations():
        for task in row.tasks:
            assert len(task.rewards) == len(task.fates) == row.attempts
            for reward, fate in zip(task.rewards, task.fates, strict=True):
                assert (reward is not None) == (fate is Fate.EVALUATED)
                assert (reward is None) == (fate.kind == "discarded")


def told_by(row: RolloutRow, ran: Ran) -> Told | None:
    """What the try says that counted; None where it came to nothing before `run`."""
    number = row.metadata.get("try")
    return None if number is None else ran.world.tries[int(number)]


def number_of(value: object) -> float:
    assert isinstance(value, int | float | np.floating)
    return float(value)
