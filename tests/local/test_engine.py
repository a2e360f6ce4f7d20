import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from loops_cookbook.errors import ModelError
from loops_cookbook.local.engine import BadRequest, Completion, Engine, Row, SampleJob
from loops_cookbook.local.model import Policy
from loops_cookbook.local.probe import Packing
from loops_cookbook.local.requests import Sampled
from loops_cookbook.services.command import STAGES

pytestmark = pytest.mark.torch

MakeEngine = Callable[..., Engine]
ADAM = {
    "learning_rate": 3e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 1.0,
}
PROMPT = [1, 3, 4, 5]
JOB = SampleJob(PROMPT, n=4, max_tokens=5, stop_token_ids=(0,), seed=3)
LESSON = Row(np.array(PROMPT, np.int32), np.array([6, 7, 8, 9]))


def row(job: SampleJob, completion: Completion, advantage: float = 1.0) -> Row:
    """What a completion becomes when it is trained on."""
    ids = np.array(job.prompt_ids + completion.ids)
    context = len(job.prompt_ids) - 1
    zeros = np.zeros(context, np.float32)
    trained = np.array(completion.logprobs, np.float32)
    return Row(
        ids[:-1].astype(np.int32),
        ids[1:],
        logprobs=np.append(zeros, trained),
        advantages=np.append(zeros, np.full(len(trained), advantage, np.float32)),
    )


def teach(engine: Engine, times: int = 1) -> list[float]:
    """Steps towards the lesson; the loss before each."""
    losses: list[float] = []
    for _ in range(times):
        losses.append(engine.forward_backward([LESSON], "cross_entropy", None).loss)
        engine.optim_step(**ADAM)
    return losses


def lora_parameters(engine: Engine) -> int:
    return int(engine.description()["trainable"])


def sampled(engine: Engine, **changes: object) -> list[float]:
    """A fingerprint of the weights that serve: the logprobs of seeded completions."""
    job = SampleJob(PROMPT, **{"n": 2, "max_tokens": 3, "seed": 3, **changes})
    (completions,) = engine.sample([job])
    return [logprob for completion in completions for logprob in completion.logprobs]


def near(logprobs: list[float]) -> object:
    """Equal but for rounding, which depends on where tensors lie."""
    return pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_trainer_agree_before_and_after_an_update(
    make_engine: MakeEngine, rank: int, temperature: float
) -> None:
    engine = make_engine(lora_rank=rank)
    jobs = [
        SampleJob(PROMPT, n=4, max_tokens=5, temperature=temperature, seed=1),
        SampleJob([1, 9], n=2, max_tokens=9, temperature=temperature, seed=2),
    ]
    for _ in range(2):
        answers = engine.sample(jobs)
        pairs = [(job, c) for job, cs in zip(jobs, answers, strict=True) for c in cs]
        rows = [row(job, c, place - 2.5) for place, (job, c) in enumerate(pairs)]
        output = engine.forward_backward(rows, "cispo", {"temperature": temperature})
        for trained, logprobs in zip(rows, output.logprobs, strict=True):
            assert logprobs == pytest.approx(trained.logprobs, abs=1e-4)
        assert output.metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
        engine.optim_step(**ADAM)
        engine.publish()


@pytest.mark.parametrize("rank", [0, 4])
def test_supervised_training_reduces_the_loss(make_engine: MakeEngine, rank: int) -> None:
    losses = teach(make_engine(lora_rank=rank), times=12)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_policy_training_raises_the_reward(make_engine: MakeEngine, loss: str) -> None:
    engine = make_engine()
    means: list[float] = []
    for update in range(8):
        job = SampleJob(PROMPT, n=32, max_tokens=1, seed=update)
        (completions,) = engine.sample([job])
        rewards = np.array([float(c.ids[0] < 20) for c in completions])
        means.append(rewards.mean())
        rows = [row(job, c, r - means[-1]) for c, r in zip(completions, rewards, strict=True)]
        engine.forward_backward(rows, loss, None)
        engine.optim_step(**ADAM)
        engine.publish()
    assert sum(means[-3:]) > sum(means[:3]) + 0.3


def test_steps_are_counted_and_versions_follow_publishing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert (engine.step, engine.policy_version) == (0, 0)
    teach(engine, times=2)
    assert (engine.step, engine.policy_version) == (2, 0)
    assert engine.publish() == 2
    assert (engine.step, engine.policy_version) == (2, 2)


@pytest.mark.parametrize("rank", [0, 4])
def test_samples_come_from_the_published_weights(make_engine: MakeEngine, rank: int) -> None:
    engine = make_engine(lora_rank=rank)
    first = sampled(engine)
    teach(engine, times=2)
    assert sampled(engine) == near(first)
    engine.publish()
    second = sampled(engine)
    assert second != near(first)
    teach(engine)
    assert sampled(engine) == near(second)


@pytest.mark.parametrize("rank", [0, 4])
def test_sampling_between_steps_does_not_disturb_training(
    make_engine: MakeEngine, rank: int
) -> None:
    quiet, busy = make_engine(lora_rank=rank), make_engine(lora_rank=rank)
    teach(quiet, times=2)
    for _ in range(2):
        busy.forward_backward([LESSON], "cross_entropy", None)
        sampled(busy)
        sampled(busy, weights="base")
        busy.optim_step(**ADAM)
        sampled(busy)
    losses = [e.forward([LESSON], "cross_entropy", None).loss for e in (quiet, busy)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("rank", [0, 4])
def test_base_weights_stay_as_they_were_loaded(make_engine: MakeEngine, rank: int) -> None:
    engine = make_engine(lora_rank=rank)
    base = sampled(engine)
    teach(engine, times=2)
    engine.publish()
    teach(engine)
    assert sampled(engine, weights="base") == near(base)
    assert sampled(engine) != near(base)


def test_live_and_base_jobs_are_answered_in_order(make_engine: MakeEngine) -> None:
    engine = make_engine()
    teach(engine, times=2)
    engine.publish()
    live, base = (
        SampleJob(PROMPT, n=1, max_tokens=3, seed=1, weights="live"),
        SampleJob(PROMPT, n=2, max_tokens=3, seed=1, weights="base"),
    )
    mixed = engine.sample([base, live, base])
    alone = [engine.sample([job])[0] for job in (base, live, base)]
    for one, other in zip(mixed, alone, strict=True):
        assert [c.logprobs for c in one] == [near(c.logprobs) for c in other]
    assert mixed[1][0].logprobs != near(mixed[0][0].logprobs)


@pytest.mark.parametrize("rank", [0, 4])
def test_init_trainer_begins_again(make_engine: MakeEngine, rank: int) -> None:
    engine = make_engine(lora_rank=rank)
    first = sampled(engine)
    losses = teach(engine, times=3)
    engine.publish()
    engine.forward_backward([LESSON], "cross_entropy", None)
    engine.init_trainer(rank)
    assert (engine.step, engine.policy_version, engine.lora_rank) == (0, 0, rank)
    with pytest.raises(BadRequest, match="optim_step without gradients"):
        engine.optim_step(**ADAM)
    assert sampled(engine) == near(first)
    assert teach(engine, times=3) == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("rank", [0, 4])
def test_what_an_old_version_read_is_of_no_use_to_a_new_one(
    make_engine: MakeEngine, rank: int
) -> None:
    engine, fresh = make_engine(lora_rank=rank), make_engine(lora_rank=rank)
    for learner in (engine, fresh):
        if learner is engine:
            sampled(engine)
        teach(learner, times=2)
        learner.publish()
    assert sampled(engine) == near(sampled(fresh))
    engine.init_trainer(rank)
    assert sampled(engine) == near(sampled(make_engine(lora_rank=rank)))


@pytest.mark.parametrize("rank", [0, 4])
def test_a_completion_is_of_one_version_whatever_is_trained_meanwhile(
    make_engine: MakeEngine, rank: int
) -> None:
    engine = make_engine(lora_rank=rank)
    ((expected,),) = engine.sample([replace(JOB, n=1)])
    assert not engine.is_sampling
    ticket = engine.ask(replace(JOB, n=1))
    ended: dict[object, object] = {}
    while engine.is_sampling:
        ended.update(engine.draw())
        teach(engine)
    outcome = ended[ticket]
    assert isinstance(outcome, Sampled)
    (completion,) = outcome.completions
    assert (completion.ids, completion.logprobs) == (expected.ids, near(expected.logprobs))
    engine.publish()
    assert engine.sample([replace(JOB, n=1)])[0][0].logprobs != near(expected.logprobs)


def test_a_deterministic_engine_gives_the_same_to_the_last_bit(make_engine: MakeEngine) -> None:
    others = [replace(JOB, prompt_ids=[1, 9], n=3, seed=8), replace(JOB, max_tokens=9, seed=9)]
    alone = make_engine(deterministic=True).sample([JOB])[0]
    engine = make_engine(deterministic=True)
    engine.sample(others)
    assert engine.sample([others[0], JOB, others[1]])[1] == alone


def test_what_memory_does_not_hold_is_refused(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loops_cookbook.local.memory.CPU_BYTES", 2 * (20 * 256 + 16 * 41))
    engine = make_engine()
    engine.check_job(replace(JOB, max_tokens=16))
    with pytest.raises(BadRequest, match="at most 20 tokens together"):
        engine.ask(replace(JOB, max_tokens=17))


def test_init_trainer_may_change_the_rank(make_engine: MakeEngine) -> None:
    engine = make_engine(lora_rank=4)
    plain = sampled(engine)
    trainable = [engine.description()["trainable"]]
    for rank in (0, 2):
        teach(engine)
        engine.init_trainer(rank)
        assert engine.lora_rank == rank
        assert sampled(engine) == near(plain)
        trainable.append(engine.description()["trainable"])
    assert trainable[0] == 2 * trainable[2]
    assert trainable[1] == engine.description()["parameters"]
    with pytest.raises(BadRequest, match="lora_rank is -1"):
        engine.init_trainer(-1)


def test_a_refused_step_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = sampled(engine)
    with pytest.raises(BadRequest):
        engine.optim_step(**ADAM)
    assert engine.step == 0
    teach(engine)
    with pytest.raises(BadRequest):
        engine.optim_step(**ADAM)
    assert engine.step == 1
    assert sampled(engine) == near(first)


def test_requests_are_refused_before_they_run(make_engine: MakeEngine) -> None:
    engine = make_engine()
    long = Row(np.zeros(33, np.int32))
    wordy = SampleJob([3] * 32, n=1, max_tokens=1)
    for act in (engine.check_rows, engine.forward, engine.forward_backward):
        with pytest.raises(BadRequest, match="datum 0: model_input has 33 tokens"):
            act([long], "cross_entropy", None)
        with pytest.raises(BadRequest, match="unknown option 'beta' of loss 'ppo'"):
            act([], "ppo", {"beta": 1.0})
    with pytest.raises(BadRequest, match="prompt has 32 tokens"):
        engine.check_job(wordy)
    with pytest.raises(BadRequest, match="prompt has 32 tokens"):
        engine.sample([JOB, wordy])


def test_the_description_says_what_the_engine_is(make_engine: MakeEngine) -> None:
    engine = make_engine(threads=None)
    described = engine.description()
    assert described["device"] == "cpu"
    assert described["dtype"] == "float32"
    assert described["threads"] == 1
    assert described["trainable"] == described["parameters"]
    assert described["torch"] == torch.__version__
    assert described["packed_training"].startswith("on (largest difference ")
    assert described["activations"] == "kept"
    assert (engine.model_name, engine.max_seq_len) == ("tiny", 32)


def test_settings_that_cannot_be_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model in"):
        make_engine(model_dir=tmp_path)
    with pytest.raises(ModelError, match="unknown dtype 'float8': use one of float32"):
        make_engine(dtype="float8")
    with pytest.raises(ModelError, match="unknown device 'abacus'"):
        make_engine(device="abacus")
    with pytest.raises(ModelError, match="threads is 0"):
        make_engine(threads=0)


class TestRanks:
    @pytest.mark.parametrize("rank", [-1, 257])
    def test_one_beyond_the_layers_is_refused(self, make_engine: MakeEngine, rank: int) -> None:
        """Any rank was taken, however much memory it asked for."""
        engine = make_engine(lora_rank=256)
        with pytest.raises(BadRequest, match=f"lora_rank is {rank}: give 0 .* to 256"):
            engine.init_trainer(rank)
        with pytest.raises(ModelError, match=f"lora_rank is {rank}: give 0 .* to 256"):
            make_engine(lora_rank=rank)

    def test_one_that_the_model_cannot_have_leaves_the_engine_as_it_began(
        self, make_engine: MakeEngine
    ) -> None:
        engine = make_engine(lora_rank=4, dtype="bfloat16")
        before = lora_parameters(engine)
        with pytest.raises(ModelError, match="use dtype float32"):
            engine.init_trainer(0)
        assert (engine.lora_rank, lora_parameters(engine)) == (4, before)
        teach(engine)
        assert engine.publish() == 1


def test_a_model_is_probed_once_however_often_a_run_begins(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was probed when the engine started and again when the client began the run."""
    probed: list[Policy] = []

    def note(policy: Policy) -> Packing:
        probed.append(policy)
        return Packing(True, "noted")

    monkeypatch.setattr("loops_cookbook.local.engine.probe", note)
    engine = make_engine()
    engine.init_trainer(4)
    assert len(probed) == 1
    assert engine.description()["packed_training"] == "on (noted)"


@pytest.mark.slow
def test_peft_is_not_imported_where_every_weight_is_trained(model_dir: Path) -> None:
    """It took half a second of each start."""
    program = (
        "import sys; from pathlib import Path;"
        "from loops_cookbook.local.engine import Engine, EngineSettings;"
        f"engine = Engine(EngineSettings(Path({str(model_dir)!r}), 'tiny', 32, lora_rank=0,"
        "    lora_alpha=8.0, seed=0, device='cpu', threads=1));"
        "print('peft' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert told.stdout == "False\n", told.stderr


def test_the_trials_of_a_model_are_a_stage_of_the_start_in_words(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """What a probe had found was told as what the engine was at."""
    caplog.set_level("INFO", logger=STAGES)
    make_engine()
    told = [record.getMessage() for record in caplog.records if record.name == STAGES]
    assert told == ["trying out what the model allows"]
