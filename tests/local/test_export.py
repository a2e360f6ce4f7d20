"""What is exported computes, in plain transformers and peft, what the engine sampled from."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from loops_cookbook.config.bundled import bundled_root
from loops_cookbook.errors import ModelError
from loops_cookbook.local.engine import Engine, Row, SampleJob
from loops_cookbook.local.export import export as write
from loops_cookbook.local.places import Place
from loops_cookbook.recipes.export import export
from loops_cookbook.records import RunRow
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.rows import CheckpointRow

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

COUNTING = bundled_root() / "models" / "counting"
ADAM = {
    "learning_rate": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 1.0,
}
PROMPT = [2, 5, 6, 7, 12, 9, 13, 14, 15, 16, 7, 17, 4, 3]
LESSON = Row(np.array(PROMPT, np.int32), np.array([*PROMPT[1:], 20]))
ROW = RunRow(
    run="20260101-000000-abcd",
    started_at=0.0,
    recipe="rl",
    scope="local",
    model="models/counting",
    updates=2,
    attempts_per_update=4,
    tasks={},
    service={},
    versions={},
    config_path="/nowhere/train.toml",
    config={},
)
SAVED = f"checkpoints/{ROW.run}/weights/update-000002"
MakeRun = Callable[..., tuple[Path, Engine]]


@pytest.fixture
def trained_run(make_engine: Callable[..., Engine], tmp_path: Path) -> MakeRun:
    """A run that has saved a checkpoint of update 2; and its engine, which serves the same."""

    def make(lora_rank: int, *, model_dir: Path = COUNTING, **model: Any) -> tuple[Path, Engine]:
        folder = RunFolder(tmp_path / "runs" / ROW.run)
        settings: dict[str, Any] = {"lora_rank": lora_rank, "lora_alpha": 16.0, **model}
        engine = make_engine(
            model_dir=model_dir,
            model_name="models/counting",
            max_seq_len=64,
            checkpoints=folder.checkpoints,
            **settings,
        )
        for _ in range(2):
            engine.forward_backward([LESSON], "cross_entropy", None)
            engine.optim_step(**ADAM)
        engine.publish()
        place = Place(ROW.run, "weights", "update-000002")
        engine.save(place)
        name = "models/counting" if model_dir == COUNTING else str(model_dir)
        row = replace(ROW, config={"model": {"name": name, **settings}})
        folder.run.write_text(json.dumps(row.to_json()))
        saved = CheckpointRow(
            update=2,
            name="update-000002",
            path=str(place),
            folder=str(place.folder(folder.checkpoints).relative_to(folder.root)),
            at=0.0,
        )
        folder.checkpoint_rows.write_text(json.dumps(saved.to_json()) + "\n")
        return folder.root, engine

    return make


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Writes a run's whole model in this process, since another takes seconds to import torch."""

    def make(run: Path, *, model_dir: Path = COUNTING, lora_rank: int = 0, **named: Any) -> Path:
        out = tmp_path / "written"
        out.mkdir()
        write(model_dir, run / SAVED, out, lora_rank=lora_rank, lora_alpha=16.0, **named)
        return out

    return make


def sampled(engine: Engine) -> tuple[list[int], list[float]]:
    """A reply, and what the sampler says of its tokens."""
    (completions,) = engine.sample([SampleJob(PROMPT, n=1, max_tokens=6, seed=3)])
    return list(completions[0].ids), list(completions[0].logprobs)


def logprobs_of(model: torch.nn.Module, reply: list[int]) -> list[float]:
    """What a plain model says of the same reply."""
    ids = torch.tensor([[*PROMPT, *reply]])
    with torch.no_grad():
        told = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
    return [float(told[len(PROMPT) + i - 1, token]) for i, token in enumerate(reply)]


def test_an_adapter_is_loaded_by_peft_onto_its_base_model(
    trained_run: MakeRun, tmp_path: Path
) -> None:
    run, engine = trained_run(4)
    reply, told = sampled(engine)
    exported = export(str(run), tmp_path / "adapter", merged=False)
    assert exported.is_adapter
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert named["base_model_name_or_path"] == str(COUNTING)
    base = AutoModelForCausalLM.from_pretrained(str(COUNTING), dtype=torch.float32)
    plain = logprobs_of(base, reply)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert logprobs_of(loaded, reply) == pytest.approx(told, abs=1e-4)
    assert plain != pytest.approx(told, abs=1e-2)
    found = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"), dtype=torch.float32)
    assert logprobs_of(found, reply) == pytest.approx(told, abs=1e-4)


@pytest.mark.slow
def test_a_whole_model_is_loaded_by_plain_transformers(
    trained_run: MakeRun, tmp_path: Path
) -> None:
    run, engine = trained_run(4)
    reply, told = sampled(engine)
    exported = export(f"{run}@2", tmp_path / "model", merged=True)
    assert not exported.is_adapter
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"))
    assert loaded.dtype == torch.float32
    assert logprobs_of(loaded, reply) == pytest.approx(told, abs=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "model"))
    original = AutoTokenizer.from_pretrained(str(COUNTING))
    chat = [{"role": "user", "content": "orders: paid, unpaid. how many are paid?"}]
    assert tokenizer.apply_chat_template(chat) == original.apply_chat_template(chat)
    ends = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert ends == json.loads((COUNTING / "generation_config.json").read_text())


@pytest.mark.parametrize("model", [{}, {"init": "random", "seed": 7}], ids=["loaded", "random"])
def test_every_trained_weight_is_in_a_checkpoint_without_an_adapter(
    trained_run: MakeRun, written: Callable[..., Path], model: dict[str, Any]
) -> None:
    run, engine = trained_run(0, **model)
    reply, told = sampled(engine)
    loaded = AutoModelForCausalLM.from_pretrained(str(written(run, random_seed=model.get("seed"))))
    assert logprobs_of(loaded, reply) == pytest.approx(told, abs=1e-4)


def test_what_is_written_can_be_trained_on(
    trained_run: MakeRun, written: Callable[..., Path], make_engine: Callable[..., Engine]
) -> None:
    run, engine = trained_run(4)
    reply, told = sampled(engine)
    model = written(run, lora_rank=4)
    (model / "tokenizer.json").write_text((COUNTING / "tokenizer.json").read_text())
    again, said = sampled(make_engine(model_dir=model, max_seq_len=64, lora_rank=0))
    assert again == reply
    assert said == pytest.approx(told, abs=1e-4)


def test_experts_are_written_under_the_names_that_they_are_read_by(
    trained_run: MakeRun, written: Callable[..., Path], tmp_path: Path
) -> None:
    """A library joins the experts of a layer on the way in, and must part them on the way out."""
    config = Qwen3MoeConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        eos_token_id=4,
    )
    moe = tmp_path / "moe"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(moe)
    (moe / "tokenizer.json").write_text((COUNTING / "tokenizer.json").read_text())
    run, engine = trained_run(0, model_dir=moe)
    reply, told = sampled(engine)
    model = written(run, model_dir=moe)
    loaded = AutoModelForCausalLM.from_pretrained(str(model))
    assert logprobs_of(loaded, reply) == pytest.approx(told, abs=1e-4)
    assert load_file(model / "model.safetensors").keys() == (
        load_file(moe / "model.safetensors").keys()
    )


@pytest.mark.slow
def test_weights_of_another_model_are_refused_and_leave_nothing(
    trained_run: MakeRun, tmp_path: Path
) -> None:
    run, _ = trained_run(0)
    weights = run / SAVED / "weights.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if "norm" not in name}, weights)
    with pytest.raises(ModelError, match="does not fit") as refused:
        export(str(run), tmp_path / "model", merged=False)
    assert len(str(refused.value).splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_a_model_that_comes_out_wrong_is_refused(
    trained_run: MakeRun, written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library would write it that reads an architecture otherwise than it writes it."""
    run, _ = trained_run(4)
    honest = PreTrainedModel.save_pretrained

    def scaled(self: PreTrainedModel, folder: str, **options: Any) -> None:
        with torch.no_grad():
            next(p for name, p in self.named_parameters() if "o_proj" in name).mul_(1.1)
        honest(self, folder, **options)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", scaled)
    with pytest.raises(ModelError, match="does not come out as it went in"):
        written(run, lora_rank=4)
