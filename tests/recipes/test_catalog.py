"""What a model takes is read from headers, and told before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from loops_cookbook.config.bundled import bundled_models, bundled_root
from loops_cookbook.errors import ModelError
from loops_cookbook.recipes.catalog import (
    CPU_BATCH_BYTES,
    PROCESS_BYTES,
    Facts,
    Machine,
    catalog,
    longest,
    memory_needed,
    read_facts,
    this_machine,
    width,
)

CPU = Machine("cpu", 16 * 10**9)
LINEAR = {
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 64),
}
TENSORS = {"model.embed_tokens.weight": (50, 32), "model.norm.weight": (32,), **LINEAR}
PARAMETERS = 50 * 32 + 32 + 2 * 64 * 32


def write_tensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file that is all header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    header |= {n: {"dtype": "BF16", "shape": s, "data_offsets": [0, 0]} for n, s in shapes.items()}
    told = json.dumps(header).encode()
    path.write_bytes(len(told).to_bytes(8, "little") + told)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {
        "architectures": ["TinyForCausalLM"],
        "vocab_size": 50,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tensors(tmp_path / "model.safetensors", TENSORS)
    return tmp_path


def test_facts_come_from_the_header_and_the_config(folder: Path) -> None:
    assert read_facts(folder) == Facts(
        architecture="TinyForCausalLM",
        parameters=PARAMETERS,
        adapter_parameters=32 * 2 * (64 + 32),
        max_seq_len=128,
    )
    assert longest(folder) == 128


def test_a_head_that_is_stored_beside_the_embedding_it_is_tied_to_counts_once(folder: Path) -> None:
    write_tensors(folder / "model.safetensors", {**TENSORS, "lm_head.weight": (50, 32)})
    assert read_facts(folder).parameters == PARAMETERS


def test_weights_in_several_files_are_added_up(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    names = [*TENSORS]
    write_tensors(folder / "a.safetensors", {n: TENSORS[n] for n in names[:2]})
    write_tensors(folder / "b.safetensors", {n: TENSORS[n] for n in names[2:]})
    write_tensors(folder / "another-copy.safetensors", TENSORS)
    files = {name: "a.safetensors" if i < 2 else "b.safetensors" for i, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    assert read_facts(folder).parameters == PARAMETERS


def test_a_model_with_more_than_text_is_told_by_its_text(folder: Path) -> None:
    text = {"vocab_size": 50, "max_position_embeddings": 9, "hidden_size": 32}
    config = {"model_type": "many", "hidden_size": 999, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    assert width(folder) == 32
    facts = read_facts(folder)
    assert (facts.architecture, facts.max_seq_len) == ("many", 9)
    assert facts.adapter_parameters == 32 * 2 * (64 + 32)


@pytest.mark.parametrize(
    "data", [b"", b"version https://git-lfs", (5).to_bytes(8, "little") + b"{...}"]
)
def test_a_file_that_holds_no_tensors_is_refused(data: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors: not a safetensors file") as caught:
        read_facts(folder)
    assert "\n" not in str(caught.value)


def test_a_folder_without_safetensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        read_facts(folder)


def test_a_config_that_names_no_length_asks_for_one(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    assert read_facts(folder).max_seq_len is None
    with pytest.raises(ModelError, match="max_position_embeddings"):
        longest(folder)


def test_memory_is_the_weights_and_what_each_trained_one_brings() -> None:
    facts = Facts("Any", parameters=1000, adapter_parameters=10, max_seq_len=None)
    needed = memory_needed(facts, CPU)
    assert {use: size - PROCESS_BYTES for use, size in needed.items()} == {
        "sample": 4 * 1000,
        "train_lora": 4 * 1000 + 20 * 10,
        "train_all": 24 * 1000,
    }
    half = memory_needed(facts, Machine("cuda", 1))
    assert {use: size - PROCESS_BYTES for use, size in half.items()} == {
        "sample": 2 * 1000,
        "train_lora": 2 * 1000 + 20 * 10,
        "train_all": 24 * 1000,
    }


def test_what_fits_leaves_room_for_a_batch(folder: Path) -> None:
    def fits(memory: int) -> tuple[str, ...]:
        return catalog([str(folder)], Machine("cpu", memory))[-1].fits

    sample = 4 * PARAMETERS + PROCESS_BYTES + CPU_BATCH_BYTES
    assert fits(sample - 1) == ()
    assert fits(sample) == ("sample",)
    assert fits(2**40) == ("sample", "train_lora", "train_all")


def test_the_catalog_has_what_is_bundled_what_was_fetched_and_what_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOPS_CACHE", str(tmp_path / "cache"))
    fetched = tmp_path / "cache" / "models" / "smollm2-135m"
    fetched.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (fetched / name).write_bytes((folder / name).read_bytes())
    entries = catalog([str(folder)], CPU)
    assert [(entry.kind, entry.name) for entry in entries] == [
        *(("bundled", name) for name in bundled_models()),
        ("fetched", "smollm2-135m"),
        ("directory", str(folder)),
    ]
    assert json.loads(json.dumps(entries[-1].to_json()))["parameters"] == PARAMETERS


@pytest.mark.parametrize("name", ["gpt2", "./nothing"])
def test_a_named_folder_that_is_no_model_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"^FOLDER: "):
        catalog([name], CPU)


def test_this_machine_has_memory() -> None:
    machine = this_machine()
    assert machine.memory_bytes > 2**28
    assert machine.batch_bytes > 0


@pytest.mark.torch
def test_an_adapter_is_as_large_as_the_engines() -> None:
    torch = pytest.importorskip("torch")
    from loops_cookbook.local.model import load_policy

    counting = bundled_root() / "models" / "counting"
    policy = load_policy(counting, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=64)
    policy.reset(32, lora_alpha=32, seed=0)
    facts = read_facts(counting)
    assert facts.parameters == policy.parameters
    assert facts.adapter_parameters == sum(p.numel() for p in policy.trainable)
