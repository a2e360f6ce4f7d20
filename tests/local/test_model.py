import json
import re
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from loops_cookbook.errors import ModelError
from loops_cookbook.local.model import Policy, copies, load_policy

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]])


def load(path: Path, *, dtype: torch.dtype = torch.float32, max_seq_len: int = 32) -> Policy:
    return load_policy(path, device=CPU, dtype=dtype, max_seq_len=max_seq_len)


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.logits_at(IDS, torch.tensor([0, 1]), torch.tensor([3, 2]))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding, which depends on where tensors lie."""
    return torch.allclose(one, other, atol=1e-5)


def disturb(policy: Policy) -> None:
    """Move every trained tensor."""
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.add_(0.1)


def test_facts_come_from_the_files(model_dir: Path) -> None:
    policy = load(model_dir)
    assert (policy.vocab_size, policy.max_positions, policy.eos_ids) == (41, 64, {2})
    assert policy.parameters == sum(p.numel() for p in policy.module.parameters())


def test_eos_ids_of_the_generation_config_come_first(model_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load(copy).eos_ids == {5, 6}


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model in .*: give a directory"):
        load(tmp_path)


def test_a_model_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="cannot be loaded") as refusal:
        load(tmp_path)
    assert "\n" not in str(refusal.value)


def test_weights_of_which_a_part_is_missing_are_refused(model_dir: Path, tmp_path: Path) -> None:
    """They were filled with random numbers and trained, with a line in a log at most."""
    shutil.copytree(model_dir, tmp_path / "part")
    file = tmp_path / "part" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj" in name)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"lacks {re.escape(name)}"):
        load(tmp_path / "part")


def test_weights_of_another_shape_or_cut_short_are_refused(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path / "part")
    file = tmp_path / "part" / "model.safetensors"
    whole = file.read_bytes()
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj" in name)
    save_file({**tensors, name: tensors[name][:-1]}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError):
        load(tmp_path / "part")
    file.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path / "part")


def test_code_in_a_models_folder_is_never_run(model_dir: Path, tmp_path: Path) -> None:
    """The loader asked on the terminal whether to run it."""
    shutil.copytree(model_dir, tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    (tmp_path / "own" / "own.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path / "own")


def test_a_window_beyond_the_models_positions_is_refused(model_dir: Path) -> None:
    with pytest.raises(ModelError, match=r"max_seq_len is 65, .* has 64 positions"):
        load(model_dir, max_seq_len=65)


def test_logits_at_some_positions_are_those_of_the_whole_pass(model_dir: Path) -> None:
    policy = load(model_dir)
    with torch.no_grad():
        whole = policy.module(input_ids=IDS).logits
    assert torch.allclose(logits(policy), torch.stack([whole[0, 3], whole[1, 2]]), atol=1e-5)


def test_a_line_may_hold_rows_that_branch(model_dir: Path) -> None:
    policy = load(model_dir)
    # Rows 3 4 5 6 and 3 4 7, then row 8 9, and one column of padding that only sees itself.
    line = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 0]])
    positions = torch.tensor([[0, 1, 2, 3, 2, 0, 1, 0]])
    ends = torch.tensor([[5, 5, 4, 4, 5, 7, 7, 8]])
    columns = torch.tensor([3, 4, 6])
    with torch.no_grad():
        packed = policy.logits_at(
            line, torch.zeros_like(columns), columns, positions=positions, ends=ends
        )
        rows = [torch.tensor([ids]) for ids in ([3, 4, 5, 6], [3, 4, 7], [8, 9])]
        alone = torch.stack([policy.module(input_ids=ids).logits[0, -1] for ids in rows])
    assert torch.allclose(packed, alone, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 4])
def test_activations_that_are_recomputed_give_the_same_gradients(
    model_dir: Path, rank: int
) -> None:
    policy = load(model_dir)
    policy.reset(rank, lora_alpha=16, seed=0)
    assert policy.can_recompute
    reads = 0

    def read(*_: object) -> None:
        nonlocal reads
        reads += 1

    policy.module.model.layers[0].mlp.act_fn.register_forward_hook(read)

    def gradients(context: AbstractContextManager[None]) -> list[torch.Tensor]:
        with context:
            loss = policy.logits_at(IDS, torch.tensor([0, 1]), torch.tensor([3, 2])).sum()
        # The backward pass may come after the block.
        return list(torch.autograd.grad(loss, policy.trainable))

    kept = gradients(nullcontext())
    assert reads == 1
    again = gradients(policy.recomputing())
    assert reads == 3
    for one, other in zip(kept, again, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    gradients(nullcontext())
    assert reads == 4


def test_rank_0_trains_every_weight(model_dir: Path) -> None:
    policy = load(model_dir)
    policy.reset(0, lora_alpha=16, seed=0)
    assert sum(parameter.numel() for parameter in policy.trainable) == policy.parameters


def test_an_adapter_is_on_every_linear_layer_but_the_head(model_dir: Path) -> None:
    policy = load(model_dir)
    linear = {n for n, m in policy.module.named_modules() if isinstance(m, nn.Linear)}
    policy.reset(4, lora_alpha=16, seed=0)
    trained = [n for n, p in policy.module.named_parameters() if p.requires_grad]
    assert {name.split(".lora_")[0] for name in trained} == linear - {"lm_head"}
    assert len(trained) == len(policy.trainable) == 2 * 7 * 2


def test_a_fresh_adapter_changes_nothing_and_follows_the_seed(model_dir: Path) -> None:
    policy = load(model_dir)
    plain = logits(policy)
    made: list[list[torch.Tensor]] = []
    for seed in (1, 1, 2):
        policy.reset(4, lora_alpha=16, seed=seed)
        assert same(logits(policy), plain)
        made.append(copies(policy.trainable))
    assert all(torch.equal(a, b) for a, b in zip(made[0], made[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(made[0], made[2], strict=True))


def test_making_an_adapter_leaves_torchs_own_generator_alone(model_dir: Path) -> None:
    policy = load(model_dir)
    before = torch.random.get_rng_state()
    policy.reset(4, lora_alpha=16, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("second", [0, 4])
def test_a_reset_forgets_all_training(model_dir: Path, first: int, second: int) -> None:
    policy = load(model_dir)
    plain = logits(policy)
    policy.reset(first, lora_alpha=16, seed=0)
    disturb(policy)
    assert not same(logits(policy), plain)
    policy.reset(second, lora_alpha=16, seed=0)
    assert same(logits(policy), plain)


@pytest.mark.parametrize("rank", [0, 4])
def test_other_weights_stand_in_for_the_length_of_a_block(model_dir: Path, rank: int) -> None:
    policy = load(model_dir)
    policy.reset(rank, lora_alpha=16, seed=0)
    plain, held = logits(policy), copies(policy.trainable)
    disturb(policy)
    moved = logits(policy)
    with policy.holding(held):
        assert same(logits(policy), plain)
    with policy.untrained():
        assert same(logits(policy), plain)
    assert same(logits(policy), moved)
    assert all(parameter.requires_grad for parameter in policy.trainable)


def test_every_weight_in_half_precision_is_refused(model_dir: Path) -> None:
    policy = load(model_dir, dtype=torch.bfloat16)
    with pytest.raises(ModelError, match="lora_rank 0 trains every weight"):
        policy.reset(0, lora_alpha=16, seed=0)
    policy.reset(4, lora_alpha=16, seed=0)
    assert {parameter.dtype for parameter in policy.trainable} == {torch.float32}


def test_random_weights_follow_from_the_seed_and_need_no_weights_in_the_folder(
    model_dir: Path, tmp_path: Path
) -> None:
    shutil.copy(model_dir / "config.json", tmp_path)

    def drawn(seed: int) -> torch.Tensor:
        policy = load_policy(
            tmp_path, device=CPU, dtype=torch.float32, max_seq_len=32, random_seed=seed
        )
        policy.reset(0, lora_alpha=1.0, seed=seed)
        return logits(policy)

    state = torch.random.get_rng_state()
    assert same(drawn(1), drawn(1))
    assert not same(drawn(1), drawn(2))
    assert not same(drawn(1), logits(load(model_dir)))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_shape_that_is_no_model_is_refused_when_weights_are_drawn_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    with pytest.raises(ModelError, match="no model can be made from"):
        load_policy(tmp_path, device=CPU, dtype=torch.float32, max_seq_len=32, random_seed=0)
