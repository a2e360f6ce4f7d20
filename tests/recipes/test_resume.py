"""A run that is killed goes on as if it had not been, whenever that was; another one is refused."""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
from tests.recipes.test_rl import row_of
from tests.recipes.test_sft import row_of as sft_row_of
from trio.testing import MockClock

from loops_cookbook.cli.resuming import Resumed, find_resumed
from loops_cookbook.errors import ConfigError, RunFolderError, ServiceUnavailable
from loops_cookbook.learning.datums import Datum
from loops_cookbook.problems import shown
from loops_cookbook.recipes.memory import Memory
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.resume import (
    changed_code,
    code_digests,
    differences,
    find_unfinished,
    require_same,
)
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.recipes.sft import run_sft
from loops_cookbook.recipes.sft_plan import SFTPlan
from loops_cookbook.records import RolloutRow, RunRow
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.past import Past, SFTPast, read_past, read_sft_past
from loops_cookbook.rundir.read import RecordedRun, open_run
from loops_cookbook.rundir.savepoints import SavePoints
from loops_cookbook.rundir.write import RunWriter
from loops_cookbook.services.base import AdamParams, LossSpec, SampleParams, StepResult
from loops_cookbook.testing import ByteTokenizer
from loops_cookbook.tokens import Ids, Logprobs, SampledTokens, ids_of, logprobs_of

pytestmark = pytest.mark.anyio
GROUP_SIZE = 3


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


class Chain:
    """A trainer whose weights are the batches that made them, in order; and its sampler.

    What is sampled follows from the seed and from the weights, so a run that goes on with other
    weights than it had says other things.
    """

    temperature_in_loss = False
    description: Mapping[str, str | int] = {}

    def __init__(self, folder: RunFolder, *, fails_at: int | None = None) -> None:
        self.weights: list[str] = []
        self._moments = 0
        self._served: list[str] = []
        self._folder = folder.root / "kept"
        self._tokenizer = ByteTokenizer()
        self._fails_at = fails_at
        self._keys: set[str] = set()

    @property
    def trainer(self) -> "Chain":
        return self

    @property
    def sampler(self) -> "Chain":
        return self

    async def train(
        self, batch: Sequence[Datum], loss: LossSpec, adam: AdamParams, *, key: str
    ) -> StepResult:
        assert key not in self._keys, "another update has this name"
        self._keys.add(key)
        await anyio.sleep(1)
        if len(self.weights) + 1 == self._fails_at:
            raise ServiceUnavailable("the trainer is gone")
        told = b"".join(stream.tobytes() for datum in batch for stream in _streams(datum))
        self.weights.append(f"{hashlib.sha256(told).hexdigest()[:12]} {adam.learning_rate}")
        self._moments += 1
        loss_value = int(hashlib.sha256(str(self.weights).encode()).hexdigest()[:6], 16)
        return StepResult(loss_value, tuple(_logprobs(d) for d in batch), {"grad_norm": 0.5})

    async def score(self, batch: Sequence[Datum], *, key: str) -> tuple[Logprobs, ...]:
        await anyio.sleep(1)
        return tuple(
            logprobs_of([-1.0 / (1 + len(self.weights))] * len(d.input_ids)) for d in batch
        )

    async def publish(self, *, key: str) -> int:
        self._served = list(self.weights)
        return len(self.weights)

    async def save(self, name: str) -> str:
        self._folder.mkdir(exist_ok=True)
        await anyio.sleep(1)
        path = self._folder / f"{name}.json"
        path.write_text(json.dumps([self.weights, self._moments]))
        return name

    async def load(self, path: str, *, with_optimizer: bool) -> int:
        self.weights, moments = json.loads((self._folder / f"{path}.json").read_text())
        self._moments = moments if with_optimizer else 0
        assert self._moments == len(self.weights), "the optimizer is as it was"
        return len(self.weights)

    async def sample(
        self,
        prompt_ids: Ids,
        params: SampleParams,
        *,
        n: int = 1,
        min_policy_version: int = 0,
        affinity_key: str | None = None,
    ) -> tuple[SampledTokens, ...]:
        await anyio.sleep(2)
        assert len(self._served) >= min_policy_version
        prompt = self._tokenizer.decode(prompt_ids.tolist())
        told = json.dumps([prompt, params.seed, self._served])
        number = int(hashlib.sha256(told.encode()).hexdigest()[:8], 16)
        word = prompt.split("<|user|>")[1].split("<|end|>")[0]
        ids = [*self._tokenizer.encode(word if number % 2 else "no"), params.stop_token_ids[0]]
        logprobs = logprobs_of([-(number % 97 + 1) / 100] * len(ids))
        reply = SampledTokens(ids_of(ids), logprobs, "stop", len(self._served))
        return (reply,) * n


def _streams(datum: Datum) -> Iterator[Ids | Logprobs]:
    for name in ("input_ids", "logprobs", "advantages", "weights"):
        if (stream := getattr(datum, name)) is not None:
            yield stream


def _logprobs(datum: Datum) -> Logprobs:
    if datum.logprobs is not None:
        return datum.logprobs
    return logprobs_of([-0.5] * len(datum.input_ids))


class Camera:
    """Copies a run folder between any two writes: what a kill there would have left."""

    def __init__(self, folder: RunFolder, album: Path) -> None:
        self._folder = folder
        self._album = album
        self.shots: list[Path] = []

    def shoot(self) -> None:
        shot = self._album / f"{len(self.shots):04}" / self._folder.root.name
        shutil.copytree(self._folder.root, shot, copy_function=_copied)
        self.shots.append(shot)


def _copied(source: str, target: str) -> None:
    """Transcripts are many, and never written again."""
    (os.link if "/transcripts/" in source else shutil.copyfile)(source, target)


def watched(kind: type, camera: Camera | None) -> type:
    """The class, with a picture before and after each call of its methods."""
    if camera is None:
        return kind

    def around(name: str) -> Callable[..., object]:
        def method(self: object, *args: object, **named: object) -> object:
            camera.shoot()
            result = getattr(kind, name)(self, *args, **named)
            camera.shoot()
            return result

        return method

    own = [name for name in vars(kind) if not name.startswith("_") and callable(vars(kind)[name])]
    # Transcripts and notes are many, and their order tells nothing.
    told = {name: around(name) for name in own if name not in ("note", "attempt_ended")}
    return type(f"Watched{kind.__name__}", (kind,), told)


@dataclass
class Ended:
    """What a run came to."""

    run: RecordedRun
    weights: list[str]


async def carry_out(
    plan: Plan | SFTPlan,
    folder: RunFolder,
    *,
    camera: Camera | None = None,
    is_resumed: bool = False,
    fails_at: int | None = None,
) -> Ended:
    """A run in a folder, from its beginning or from where its records say that it stood."""
    service = Chain(folder, fails_at=fails_at)

    class Opened:
        async def __aenter__(self) -> Chain:
            return service

        async def __aexit__(self, *error: object) -> None:
            pass

    with ExitStack() as stack:
        writer = stack.enter_context(watched(RunWriter, camera)(folder))
        savepoints = stack.enter_context(watched(SavePoints, camera)(folder))
        life = 0
        row = sft_row_of(plan) if isinstance(plan, SFTPlan) else row_of(plan)
        if is_resumed:
            then = open_run(folder.root)
            life = len(then.run.resumed_at) + 1
            row = replace(row, resumed_at=(*then.run.resumed_at, 1.0))
        if isinstance(plan, SFTPlan):
            sft_past = read_sft_past(then) if is_resumed else None
            of_sft = Memory[SFTPast](savepoints, sft_past, life)
            await run_sft(plan, Opened, writer, row, None, of_sft)
        else:
            past = read_past(then, group_size=GROUP_SIZE) if is_resumed else None
            memory = Memory[Past](savepoints, past, life)
            await run_rl(plan, Opened, writer, row, None, memory)
    return Ended(open_run(folder.root), service.weights)


def metrics(run: RecordedRun) -> list[dict[str, float]]:
    """Every metric of every update but times."""
    return [{k: v for k, v in row.metrics.items() if "time/" not in k} for row in run.steps()]


def trained(rows: Sequence[RolloutRow]) -> set[tuple[int, int]]:
    return {(row.group, row.attempt) for row in rows if row.fate == "trained"}


def require_whole(run: RecordedRun, weights: list[str], updates: int) -> None:
    """What every run must have when it is at its end, killed or not."""
    assert [row.update for row in run.steps()] == list(range(1, updates + 1))
    assert len(weights) == updates
    seen = Counter((row.set, row.update) for row in run.evaluations())
    assert set(seen.values()) <= {1}
    rows = run.rollouts()
    assert set(Counter((r.group, r.attempt) for r in rows if r.fate == "trained").values()) <= {1}
    starts = Counter(row.serial for row in run.starts())
    have = Counter((row.group, row.attempt) for row in rows)
    assert have == {(s, i): n for s, n in starts.items() for i in range(GROUP_SIZE)}
    require_starts_counted_once(run)
    named = [row.transcript for row in rows if row.transcript is not None]
    assert len(named) == len(set(named))
    assert all((run.folder.transcripts / name).is_file() for name in named)
    counts = run.run.counts
    assert counts["attempts/in_flight"] == 0
    assert counts["attempts/started"] == counts["attempts/finished"] == len(rows)
    kinds = Counter(row.fate.kind for row in rows)
    assert {k: counts[f"attempts/{k}"] for k in kinds} == kinds
    assert [row.update for row in run.checkpoints()][-1] == updates


def require_starts_counted_once(run: RecordedRun) -> None:
    """Each start is counted in the row of its update, unless it was cut before that row was made:
    then it was started again for the same row, or a later kill cut that start too."""
    due: dict[int, int] = {}
    """By serial, the update in whose row its last start so far counts."""
    counted: Counter[int] = Counter()
    for row in run.starts():
        counted[row.update] += due.get(row.serial) != row.update
        due[row.serial] = row.update
    started = {row.update: row.metrics["attempts/started"] for row in run.steps()}
    assert started == {update: GROUP_SIZE * counted[update] for update in started}


RL = (
    "training.updates=4",
    f"training.group_size={GROUP_SIZE}",
    "training.groups_per_update=2",
    'training.schedule="linear"',
    "training.checkpoint_every=2",
    "concurrency.sampling=64",
    'evaluation.sets.words={tasks="tasks.jsonl", attempts=1}',
    "evaluation.every=3",
)


@pytest.mark.parametrize("moments", [12, pytest.param(400, marks=pytest.mark.slow)])
async def test_a_run_killed_between_any_two_writes_goes_on_as_if_it_had_not_been(
    runnable, tmp_path: Path, moments: int
) -> None:
    plan = runnable(*RL)
    folder = new_run_folder("runs", tmp_path)
    camera = Camera(folder, tmp_path / "album")
    whole = await carry_out(plan, folder, camera=camera)
    require_whole(whole.run, whole.weights, 4)
    shots = [shot for shot in camera.shots if (shot / "run.json").is_file()]
    assert len(shots) > 60

    for shot in shots[:: max(1, len(shots) // moments)]:
        again = await carry_out(plan, RunFolder(shot), is_resumed=True)
        require_whole(again.run, again.weights, 4)
        assert again.weights == whole.weights
        assert metrics(again.run) == metrics(whole.run)
        assert trained(again.run.rollouts()) == trained(whole.run.rollouts())
        sampled = [(row.set, row.update, row.reward_mean) for row in again.run.evaluations()]
        assert sampled == [(r.set, r.update, r.reward_mean) for r in whole.run.evaluations()]


async def test_a_run_killed_again_and_again_loses_nothing(runnable, tmp_path: Path) -> None:
    """Rows of one life must not be taken for those of another."""
    plan = runnable(*RL)
    reference = await carry_out(plan, new_run_folder("runs", tmp_path))
    folder, life = new_run_folder("runs", tmp_path), 0
    camera = Camera(folder, tmp_path / "0")
    await carry_out(plan, folder, camera=camera)
    while life < 4:
        life += 1
        shots = [shot for shot in camera.shots if (shot / "run.json").is_file()]
        shot = RunFolder(shots[len(shots) // 3])
        camera = Camera(shot, tmp_path / str(life))
        ended = await carry_out(plan, shot, camera=camera, is_resumed=True)
        require_whole(ended.run, ended.weights, 4)
        assert metrics(ended.run) == metrics(reference.run)
        assert ended.weights == reference.weights


@pytest.mark.parametrize("moments", [8, pytest.param(400, marks=pytest.mark.slow)])
async def test_an_async_run_that_was_killed_skips_no_task_and_trains_none_twice(
    runnable, tmp_path: Path, moments: int
) -> None:
    plan = runnable(*RL, 'training.mode="async"', "training.max_staleness=1")
    folder = new_run_folder("runs", tmp_path)
    camera = Camera(folder, tmp_path / "album")
    await carry_out(plan, folder, camera=camera)
    shots = [shot for shot in camera.shots if (shot / "run.json").is_file()]

    for shot in shots[:: max(1, len(shots) // moments)]:
        again = await carry_out(plan, RunFolder(shot), is_resumed=True)
        require_whole(again.run, again.weights, 4)
        serials = sorted({row.serial for row in again.run.starts()})
        assert serials == list(range(len(serials)))
        ages = [row.metrics["policy/staleness_max"] for row in again.run.steps()]
        assert max(ages) <= 1


async def test_a_run_whose_trainer_failed_goes_on_with_the_group_sampled_anew(
    runnable, tmp_path: Path
) -> None:
    """Its attempts are told as unused, so the batch must not be trained all the same."""
    plan = runnable(*RL)
    whole = await carry_out(plan, new_run_folder("runs", tmp_path))
    folder = new_run_folder("runs", tmp_path)
    with pytest.raises(ServiceUnavailable):
        await carry_out(plan, folder, fails_at=3)
    assert open_run(folder.root).run.status == "failed"
    assert {row.fate for row in open_run(folder.root).rollouts()} >= {"unused/surplus"}

    again = await carry_out(plan, folder, is_resumed=True)
    require_whole(again.run, again.weights, 4)
    assert again.weights == whole.weights
    assert metrics(again.run) == metrics(whole.run)


async def test_an_sft_run_killed_between_any_two_writes_trains_each_row_once_an_epoch(
    make_sft_plan, tmp_path: Path
) -> None:
    plan = make_sft_plan("training.epochs=3", "training.checkpoint_every=2", "evaluation.every=2")
    folder = new_run_folder("runs", tmp_path)
    camera = Camera(folder, tmp_path / "album")
    whole = await carry_out(plan, folder, camera=camera)
    updates = len(plan.batches)
    assert len(whole.weights) == updates

    for shot in (shot for shot in camera.shots if (shot / "run.json").is_file()):
        again = await carry_out(plan, RunFolder(shot), is_resumed=True)
        assert again.weights == whole.weights
        assert [row.update for row in again.run.steps()] == list(range(1, updates + 1))
        assert metrics(again.run) == metrics(whole.run)
        assert again.run.run.counts == whole.run.run.counts
        assert [r.loss for r in again.run.evaluations()] == [
            r.loss for r in whole.run.evaluations()
        ]


async def test_more_updates_go_on_at_the_true_step(runnable, tmp_path: Path) -> None:
    """A run that was finished and is to go further trains the rest, and nothing again."""
    folder = new_run_folder("runs", tmp_path)
    constant = [each for each in RL if "schedule" not in each]
    await carry_out(runnable(*constant), folder)
    more = await carry_out(runnable(*constant, "training.updates=6"), folder, is_resumed=True)
    require_whole(more.run, more.weights, 6)
    longer = await carry_out(
        runnable(*constant, "training.updates=6"), new_run_folder("runs", tmp_path)
    )
    assert more.weights == longer.weights


async def test_only_the_newest_the_last_and_the_best_checkpoint_stay(
    runnable, tmp_path: Path
) -> None:
    folder = new_run_folder("runs", tmp_path)
    ended = await carry_out(runnable(*RL, "training.updates=9", "training.keep=1"), folder)
    rows = ended.run.checkpoints()
    assert {row.update for row in rows} >= {2, 4, 6, 8, 9}
    assert [one.at <= other.at for one, other in pairwise(rows)].count(False) == 0
    assert not list(folder.updates.iterdir())


async def test_a_batch_that_is_gone_is_an_error_and_not_a_fresh_start(
    runnable, tmp_path: Path
) -> None:
    folder = new_run_folder("runs", tmp_path)
    camera = Camera(folder, tmp_path / "album")
    plan = runnable(*RL, "training.checkpoint_every=0", "evaluation.every=0")
    await carry_out(plan, folder, camera=camera)
    shot = RunFolder(next(s for s in camera.shots if (s / "updates" / "000002.npz").is_file()))
    (shot.updates / "000001.npz").unlink()
    with pytest.raises(RunFolderError, match="batch of update 1 is neither in its updates/"):
        read_past(open_run(shot.root), group_size=GROUP_SIZE)


async def test_sft_that_goes_further_applies_what_it_had_with_the_rates_that_it_had(
    make_sft_plan, tmp_path: Path
) -> None:
    """With more epochs the schedule is longer: updates that no checkpoint had were applied again
    with higher rates than their rows tell."""
    settings = ('training.schedule="linear"', "training.batch_size=1", "evaluation.every=0")
    settings = (*settings, "training.checkpoint_every=3")
    folder = new_run_folder("runs", tmp_path)
    camera = Camera(folder, tmp_path / "album")
    shorter = make_sft_plan(*settings, "training.epochs=2")
    first = await carry_out(shorter, folder, camera=camera)
    shots = [shot for shot in camera.shots if (shot / "run.json").is_file()]
    shot = next(s for s in shots if len(open_run(s).steps()) == 5)
    assert open_run(shot).checkpoints()[-1].update == 3

    longer = make_sft_plan(*settings, "training.epochs=3")
    again = await carry_out(longer, RunFolder(shot), is_resumed=True)
    assert again.weights[:5] == first.weights[:5]
    told = [row.metrics["learning_rate"] for row in again.run.steps()]
    assert [weight.split()[1] for weight in again.weights] == [str(rate) for rate in told]
    assert len(again.weights) == len(longer.batches)


LABELLED = """
from pydantic import BaseModel

from loops_cookbook.episodes import Episode, Grading, Sampling


class Word(BaseModel):
    name: str
    word: str


class Spell(Episode[Word, None]):
    async def run(self, sample: Sampling) -> dict[str, str]:
        reply = await sample.model.conversation().generate(
            [{"role": "user", "content": self.task.value.word}]
        )
        self.said = reply.content
        return {"first": f"{reply.logprobs[0]:.2f}"}

    async def grade(self, grading: Grading) -> float:
        return float(self.said == self.task.value.word)
"""


async def test_texts_keep_their_shares_where_the_last_batch_has_no_row_yet(
    runnable, project: Path, tmp_path: Path
) -> None:
    """The 16 texts with a share of their own were others after such a kill: those of the attempts
    in the batch that was kept, and of what was rejected before it, were forgotten."""
    (project / "spelling.py").write_text(LABELLED)
    plan = runnable(*RL)
    folder = new_run_folder("runs", tmp_path)
    camera = Camera(folder, tmp_path / "album")
    whole = await carry_out(plan, folder, camera=camera)
    sent = [s for s in camera.shots if (s / "updates" / "000002.npz").is_file()]
    shot = next(s for s in sent if len(open_run(s).steps()) == 1)
    again = await carry_out(plan, RunFolder(shot), is_resumed=True)
    assert metrics(again.run) == metrics(whole.run)


async def test_a_run_goes_on_without_the_folder_of_its_transcripts(
    runnable, tmp_path: Path
) -> None:
    """With `trace = "off"` it is empty, and a copy that lost it could not be resumed."""
    plan = runnable(*RL)
    folder = new_run_folder("runs", tmp_path)
    camera = Camera(folder, tmp_path / "album")
    await carry_out(plan, folder, camera=camera)
    shot = next(s for s in camera.shots if (s / "updates").is_dir())
    shutil.rmtree(shot / "transcripts")
    again = await carry_out(plan, RunFolder(shot), is_resumed=True)
    assert again.run.run.status == "done"


async def test_a_run_whose_trainer_keeps_nothing_is_not_resumed(runnable, tmp_path: Path) -> None:
    """Killed before its first update it began anew over its old rows, with more attempts finished
    than started."""
    plan = runnable(*RL)
    folder = new_run_folder("runs", tmp_path)
    await carry_out(plan, folder)
    for path in (folder.starts, folder.checkpoint_rows, folder.steps):
        path.unlink()
    with pytest.raises(RunFolderError, match="its trainer has no `save` and `load`"):
        read_past(open_run(folder.root), group_size=GROUP_SIZE)


def recorded(plan: Plan, folder: RunFolder, **fields: object) -> RunRow:
    config = plan.config.model_dump(mode="json", by_alias=True)
    row = replace(row_of(plan), config=config, config_path=str(plan.loaded.path))
    row = replace(row, **fields)
    with RunWriter(folder) as writer:
        writer.run_started(row)
    return row


def test_the_newest_unfinished_run_of_the_config_is_found(runnable, tmp_path: Path) -> None:
    plan = runnable()
    runs = plan.loaded.output_dir
    made = [RunFolder(runs / name) for name in ("1", "2", "3", "4")]
    for folder in made:
        folder.transcripts.mkdir(parents=True)
    recorded(plan, made[0])
    recorded(plan, made[1], status="failed")
    recorded(plan, made[2], status="done")
    recorded(plan, made[3], recipe="eval")
    assert find_unfinished(plan.loaded).folder.root == made[1].root


def made_at(plan: Plan, times: Mapping[str, float], **fields: object) -> list[RunFolder]:
    """A run of the plan for each name, begun at its time."""
    made = [RunFolder(plan.loaded.output_dir / name) for name in times]
    for folder, began in zip(made, times.values(), strict=True):
        folder.transcripts.mkdir(parents=True)
        recorded(plan, folder, started_at=began, **fields)
        os.utime(folder.run, (began, began))
    return made


def test_the_newest_is_told_by_its_start_and_not_by_its_name(runnable) -> None:
    """A run whose folder was renamed, such as to `baseline`, was taken for the newest for ever."""
    plan = runnable()
    _, newer = made_at(plan, {"baseline": 1e6, "20260101-120000-4f2a": 2e6})
    assert find_unfinished(plan.loaded).folder.root == newer.root


def test_a_run_under_which_nothing_was_done_is_passed_over(runnable) -> None:
    """One whose server was never reached stood in the way of the run that had updates to go on
    from, and was refused for its scope."""
    plan = runnable()
    older, empty = made_at(plan, {"1": 1e6, "2": 2e6})
    assert find_unfinished(plan.loaded).folder.root == empty.root
    older.starts.write_text('{"serial":0,"task":"t","policy_version":0,"at":0.0}\n')
    assert find_unfinished(plan.loaded).folder.root == older.root
    empty.steps.write_text("")
    assert find_unfinished(plan.loaded).folder.root == older.root
    empty.evaluations.write_text("{}\n")
    assert find_unfinished(plan.loaded).folder.root == empty.root


DAMAGED = pytest.mark.parametrize(
    ("left", "why"),
    [("{", "cannot be read as JSON"), ('{"schema": 99}', "install a newer version")],
)


@DAMAGED
def test_a_run_that_cannot_be_read_does_not_stand_in_the_way_of_a_newer_one(
    runnable, left: str, why: str
) -> None:
    """One damaged `run.json`, however old, and `--resume` had to be told a folder for ever."""
    plan = runnable()
    old, newer = made_at(plan, {"1": 1e6, "2": 2e6})
    old.run.write_text(left)
    os.utime(old.run, (1.5e6, 1.5e6))
    assert find_unfinished(plan.loaded).folder.root == newer.root


@DAMAGED
def test_an_older_run_is_not_taken_where_the_newest_cannot_be_read(
    runnable, left: str, why: str
) -> None:
    plan = runnable()
    older, newest = made_at(plan, {"1": 1e6, "2": 2e6})
    newest.run.write_text(left)
    with pytest.raises(RunFolderError) as error:
        find_unfinished(plan.loaded)
    assert why in str(error.value)
    assert str(error.value).endswith(f"the newest that can be read is --resume {shown(older.root)}")
    recorded(plan, older, started_at=1e6, status="done")
    with pytest.raises(RunFolderError, match=r"name the run to go on with \(--resume RUN_DIR\)"):
        find_unfinished(plan.loaded)


def test_a_run_that_is_done_is_named_as_the_way_to_go_further(runnable) -> None:
    """`1 finished runs` were told, and nothing of how to go further with one."""
    plan = runnable()
    folder = RunFolder(plan.loaded.output_dir / "1")
    folder.transcripts.mkdir(parents=True)
    recorded(plan, folder, status="done")
    with pytest.raises(RunFolderError, match=r"are done; .* and name it: --resume .*/1$"):
        find_unfinished(plan.loaded)


def test_a_run_on_rows_goes_further_by_a_key_that_it_has(make_sft_plan) -> None:
    """`training.updates` was to be raised, which supervised fine-tuning has not."""
    plan = make_sft_plan()
    folder = RunFolder(plan.loaded.output_dir / "1")
    folder.transcripts.mkdir(parents=True)
    with RunWriter(folder) as writer:
        row = replace(sft_row_of(plan), config_path=str(plan.loaded.path), status="done")
        writer.run_started(row)
    with pytest.raises(RunFolderError, match=r"the newest, raise training\.epochs and name it"):
        find_unfinished(plan.loaded)


def test_resuming_nothing_is_an_error(runnable) -> None:
    plan = runnable()
    with pytest.raises(RunFolderError, match=r"nothing to resume: .* holds no run"):
        find_unfinished(plan.loaded)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.learning_rate=0.5", "training.learning_rate (then 4e-05, now 0.5)"),
        ("training.adam.beta1=0.5", "training.adam.beta1 (then 0.9, now 0.5)"),
        ("model.lora_rank=4", "model.lora_rank (then 32, now 4)"),
        ("training.shuffle=false", "training.shuffle (then true, now false)"),
        ("sampling.max_attempt_tokens=4", "sampling.max_attempt_tokens (then unset, now 4)"),
        ("training.updates=99", None),
        ('output.trace="off"', None),
        ("concurrency.sampling=3", None),
    ],
)
def test_a_config_that_differs_is_refused_with_the_keys(
    runnable, tmp_path: Path, override: str, told: str | None
) -> None:
    row = recorded(runnable(), new_run_folder("runs", tmp_path))
    now = runnable(override)
    if told is None:
        require_same(now.loaded, row, tmp_path)
        return
    with pytest.raises(ConfigError) as error:
        require_same(now.loaded, row, tmp_path)
    assert told in str(error.value)


def test_tasks_that_changed_are_refused(runnable, tmp_path: Path) -> None:
    """The order of tasks follows from their number, so a run would skip some and repeat others."""
    plan = runnable()
    digests = {"episode.tasks": "another"}
    row = recorded(plan, new_run_folder("runs", tmp_path), digests=digests)
    with pytest.raises(ConfigError, match=r"episode.tasks \(the file's content"):
        require_same(plan.loaded, row, tmp_path)


def test_code_that_changed_is_told_and_not_refused() -> None:
    """An Episode with another grader went on silently, with rewards that were no longer alike."""
    then = {"episode.py": "1", "words.py": "2", "gone.py": "3"}
    assert changed_code(then, then) is None
    assert changed_code({}, then) is None  # of a run that did not keep it
    told = changed_code(then, {"episode.py": "9", "words.py": "2", "new.py": "4"})
    assert told is not None
    assert "last at work: episode.py, gone.py, new.py; it goes on" in told
    many = {f"m{number}.py": "1" for number in range(7)}
    assert "m4.py and 2 more;" in str(changed_code(many, dict.fromkeys(many, "2")))


def test_an_episodes_module_is_part_of_the_code(runnable, project: Path) -> None:
    plan = runnable()
    content = hashlib.sha256((project / "spelling.py").read_bytes()).hexdigest()
    assert code_digests(plan.loaded) == {"spelling.py": content}


def test_a_folder_is_found_from_within_it(
    runnable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--resume .` called the run an empty name, at its services and in `run.json`."""
    plan = runnable()
    folder = new_run_folder("runs", tmp_path)
    recorded(plan, folder, scope=plan.scope.told)
    monkeypatch.chdir(folder.root)
    assert find_resumed(plan, ".").run.folder.root == folder.root


@pytest.mark.parametrize("named", [True, False])
def test_a_link_to_a_run_is_not_another_run(runnable, tmp_path: Path, named: bool) -> None:
    """`runs/latest` made a run that went on `latest` to its services, which then could not tell it
    from the next one."""
    plan = runnable()
    folder = new_run_folder(plan.loaded.output_dir, tmp_path)
    recorded(plan, folder, scope=plan.scope.told)
    link = folder.root.with_name("latest")
    link.symlink_to(folder.root.name)
    found = find_resumed(plan, str(link) if named else "")
    assert found.run.folder.root == folder.root


def test_a_folder_whose_name_no_service_takes_is_refused(runnable, tmp_path: Path) -> None:
    """The first checkpoint, or the first sandbox, failed in the middle of the run."""
    plan = runnable()
    folder = new_run_folder("runs", tmp_path)
    recorded(plan, folder, scope=plan.scope.told)
    renamed = folder.root.rename(folder.root.with_name("my best run"))
    with pytest.raises(RunFolderError, match="my best run: services know a run by the name"):
        find_resumed(plan, str(renamed))


def test_a_run_that_goes_on_begins_where_it_began(runnable, tmp_path: Path) -> None:
    """`start_from` a run that had gone further meanwhile meant another checkpoint the second time,
    and the kept batches were applied to weights that they were not sampled from."""
    plan = runnable()
    folder = new_run_folder("runs", tmp_path)
    recorded(plan, folder, started_from="bt://loops:a/weights/update-000002")
    now = replace(row_of(plan), started_from="bt://loops:a/weights/update-000004")
    row = Resumed(open_run(folder.root)).row(now, at=1.0, update=0)
    assert row.started_from == "bt://loops:a/weights/update-000002"


def test_a_run_is_resumed_under_its_own_scope_only(runnable, tmp_path: Path) -> None:
    """Another service would have gone on from weights that are not the run's."""
    plan = runnable()
    folder = new_run_folder("runs", tmp_path)
    recorded(plan, folder, scope="remote")
    folder.starts.write_text("{}\n")
    with pytest.raises(RunFolderError) as error:
        find_resumed(plan, str(folder.root))
    told = str(error.value)
    assert "was run under scope 'remote', and this is scope" in told
    assert told.endswith(": add --scope remote, or name another run: --resume RUN_DIR")


@pytest.mark.parametrize("fields", [{"scope": "remote"}, {"config": {}}, {"recipe": "sft"}])
def test_where_nothing_was_done_that_is_told_and_not_what_differs(
    runnable, tmp_path: Path, fields: dict[str, object]
) -> None:
    """Of a run whose server was never reached it said under which scope it goes on: there was
    nothing to go on with."""
    plan = runnable()
    folder = new_run_folder("runs", tmp_path)
    recorded(plan, folder, status="failed", **fields)
    scope = fields.get("scope", row_of(plan).scope)
    with pytest.raises(RunFolderError) as error:
        find_resumed(plan, str(folder.root))
    told = str(error.value)
    assert told.startswith(f"there is nothing to resume in {shown(folder.root)}: nothing was done")
    assert f"(scope {scope!r}, failed); run the config without --resume, or name" in told


def test_an_evaluation_is_not_gone_on_with(runnable, tmp_path: Path) -> None:
    """It was told as a run of the recipe 'eval', which no config has."""
    plan = runnable()
    folder = new_run_folder("runs", tmp_path)
    recorded(plan, folder, recipe="eval")
    folder.evaluations.write_text("{}\n")
    with pytest.raises(RunFolderError, match="is of `loops eval`, which is not gone on with: "):
        find_resumed(plan, str(folder.root))


def test_a_key_of_a_later_version_is_a_difference() -> None:
    assert [each.key for each in differences({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}})] == ["a.c"]
