import json
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from loops_cookbook.local.engine import BadRequest, Engine, Row, SampleJob
from loops_cookbook.local.places import Place, read_state

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
LESSON = Row(np.array(PROMPT, np.int32), np.array([6, 7, 8, 9]))
PLACE = Place("run", "weights", "u2")


def teach(engine: Engine, times: int) -> list[float]:
    """Steps towards the lesson; the loss before each."""
    losses: list[float] = []
    for _ in range(times):
        losses.append(engine.forward_backward([LESSON], "cross_entropy", None).loss)
        engine.optim_step(**ADAM)
    return losses


def sampled(engine: Engine, **changes: object) -> list[float]:
    """A fingerprint of the weights that serve."""
    job = SampleJob(PROMPT, **{"n": 2, "max_tokens": 3, "seed": 3, **changes})
    (completions,) = engine.sample([job])
    return [logprob for completion in completions for logprob in completion.logprobs]


def full_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPT])).logits


@pytest.mark.parametrize("rank", [0, 4])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    make_engine: MakeEngine, tmp_path: Path, rank: int
) -> None:
    first = make_engine(lora_rank=rank, checkpoints=tmp_path)
    teach(first, 2)
    first.save(PLACE)
    uninterrupted = teach(first, 3)
    second = make_engine(lora_rank=rank, checkpoints=tmp_path)
    assert second.load(PLACE, with_optimizer=True) == 2
    assert teach(second, 3) == uninterrupted
    assert second.step == 5


def test_a_checkpoint_can_be_read_by_whom_the_umask_lets(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    """The library writes files that only their owner may read: nobody else could use a policy."""
    engine = make_engine(lora_rank=4, checkpoints=tmp_path)
    teach(engine, 1)
    engine.save(PLACE)
    any_other = tmp_path / "any_other"
    any_other.touch()
    modes = {path.stat().st_mode for path in PLACE.folder(tmp_path).iterdir()}
    assert modes == {any_other.stat().st_mode}


def test_without_the_optimizer_training_begins_at_step_0(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    first = make_engine(checkpoints=tmp_path)
    losses = teach(first, 3)
    first.save(PLACE)
    second = make_engine(checkpoints=tmp_path)
    assert second.load(PLACE, with_optimizer=False) == 0
    assert second.step == second.policy_version == 0
    assert teach(second, 1)[0] < losses[-1]


@pytest.mark.parametrize("rank", [0, 4])
def test_loaded_weights_are_served_at_once_beside_the_untrained_ones(
    make_engine: MakeEngine, tmp_path: Path, rank: int
) -> None:
    first = make_engine(lora_rank=rank, checkpoints=tmp_path)
    untrained = sampled(first)
    teach(first, 2)
    first.publish()
    first.save(PLACE)
    trained = sampled(first)
    second = make_engine(lora_rank=rank, checkpoints=tmp_path)
    second.load(PLACE, with_optimizer=False)
    assert sampled(second) == pytest.approx(trained, abs=1e-5)
    assert sampled(second, weights="base") == pytest.approx(untrained, abs=1e-5)
    teach(second, 1)
    second.publish()
    assert sampled(second) != pytest.approx(trained, abs=1e-3)
    assert sampled(second, weights="start") == pytest.approx(trained, abs=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_peft_loads_an_adapter_as_it_was_saved(
    make_engine: MakeEngine, tmp_path: Path, model_dir: Path
) -> None:
    engine = make_engine(lora_rank=4, checkpoints=tmp_path)
    teach(engine, 3)
    engine.save(PLACE)
    base = AutoModelForCausalLM.from_pretrained(str(model_dir))
    plain = full_logits(base)
    loaded = PeftModel.from_pretrained(base, str(PLACE.folder(tmp_path)))
    trained = full_logits(loaded)
    assert not torch.allclose(trained, plain, atol=1e-3)
    output = engine.forward([LESSON], "cross_entropy", None)
    logprobs = torch.log_softmax(trained[0], -1).gather(
        -1, torch.tensor(LESSON.target_ids)[:, None]
    )
    np.testing.assert_allclose(output.logprobs[0], logprobs[:, 0].numpy(), atol=1e-5)


def test_a_checkpoint_to_sample_from_has_no_optimizer(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(checkpoints=tmp_path)
    teach(engine, 1)
    place = Place("run", "sampler_weights", "u1")
    engine.save(place)
    assert not (place.folder(tmp_path) / "optimizer.safetensors").exists()
    with pytest.raises(BadRequest, match="no optimizer"):
        engine.load(place, with_optimizer=True)


def test_a_save_that_fails_leaves_the_one_before(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(checkpoints=tmp_path)
    teach(engine, 1)
    engine.save(PLACE)
    teach(engine, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # as a disk that is full
    try:
        with pytest.raises((OSError, SafetensorError)):
            engine.save(PLACE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_state(PLACE.folder(tmp_path)).step == 1
    assert [path.name for path in PLACE.folder(tmp_path).parent.iterdir()] == ["u2"]


def test_a_kill_between_the_renames_leaves_a_whole_checkpoint(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    engine = make_engine(checkpoints=tmp_path)
    teach(engine, 1)
    engine.save(PLACE)
    folder = PLACE.folder(tmp_path)
    folder.rename(folder.with_name(".u2.old"))  # as after the first of two
    assert engine.load(PLACE, with_optimizer=True) == 1
    engine.save(PLACE)
    assert [path.name for path in folder.parent.iterdir()] == ["u2"]


def test_a_checkpoint_of_another_rank_is_refused_and_changes_nothing(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    make_engine(lora_rank=8, checkpoints=tmp_path).save(PLACE)
    engine = make_engine(lora_rank=4, checkpoints=tmp_path)
    teach(engine, 1)
    before = engine.forward([LESSON], "cross_entropy", None).loss
    with pytest.raises(BadRequest, match="does not fit"):
        engine.load(PLACE, with_optimizer=True)
    assert engine.forward([LESSON], "cross_entropy", None).loss == before
    assert engine.step == 1


def test_an_engine_without_a_folder_keeps_none(make_engine: MakeEngine) -> None:
    with pytest.raises(BadRequest, match="keeps no checkpoints"):
        make_engine().save(PLACE)


@pytest.mark.parametrize(
    "path",
    [
        "bt://loops:../weights/x",
        "bt://loops:run/weights/..",
        "bt://loops:run/weights/.hidden",
        "bt://loops:run/other/x",
        "bt://loops:run/weights/a/b",
        "/etc/passwd",
        f"bt://loops:run/weights/{'a' * 200}",
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(BadRequest, match=r"bt://|a checkpoint's folder"):
        Place.parse(path)


def test_a_path_is_read_as_it_is_written() -> None:
    assert Place.parse(str(PLACE)) == PLACE


def test_a_checkpoint_of_another_schema_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(checkpoints=tmp_path)
    engine.save(PLACE)
    state = PLACE.folder(tmp_path) / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "schema": 2}))
    with pytest.raises(BadRequest, match="schema 2"):
        engine.load(PLACE, with_optimizer=True)


def test_a_torn_file_is_refused_with_its_name(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(checkpoints=tmp_path)
    engine.save(PLACE)
    weights = PLACE.folder(tmp_path) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(BadRequest, match=r"weights\.safetensors cannot be read"):
        engine.load(PLACE, with_optimizer=True)


def test_every_weight_is_there_under_its_own_name(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(checkpoints=tmp_path)
    engine.save(PLACE)
    held = load_file(str(PLACE.folder(tmp_path) / "weights.safetensors"))
    assert "model.embed_tokens.weight" in held
    assert sum(tensor.numel() for tensor in held.values()) == engine.description()["trainable"]
