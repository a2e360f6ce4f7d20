"""A GGUF file becomes the folder of the model that it was made from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import pre_tokenizers

pytest.importorskip("gguf")

import gguf

from loops_cookbook.errors import ModelError
from loops_cookbook.local.convert import convert
from loops_cookbook.renderers.tokenizers import load_tokenizer

SPECIAL = ["<|end|>", "<|start|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["h e", "Ġ Ġ", "he y", "1 2"]
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
HEADS, KV_HEADS, HIDDEN, INNER = 4, 2, 32, 64
KINDS = [gguf.TokenType.CONTROL] * len(SPECIAL)
KINDS += [gguf.TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL))

EIGHT_BITS = gguf.GGMLQuantizationType.Q8_0

Weights = Mapping[str, npt.NDArray[np.float32]]

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def written(
    path: Path, weights: Weights, *, pre: str = "smollm", architecture: str = "llama", **more: Any
) -> Path:
    """A GGUF file as llama.cpp writes it, with quantized matrices."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1234.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, value in more.items():
        writer.add_string(name.replace("__", "."), value)
    for name, values in weights.items():
        for theirs, its in _NAMES.items():
            name = name.replace(theirs, its)
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2])
        if heads:
            values = permuted(values, heads)
        if values.ndim == 2:
            writer.add_tensor(name, gguf.quantize(values, EIGHT_BITS), raw_dtype=EIGHT_BITS)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """As `LlamaModel.permute` of llama.cpp does it."""
    by_half = values.reshape(heads, 2, len(values) // heads // 2, values.shape[1])
    return np.ascontiguousarray(by_half.swapaxes(1, 2).reshape(values.shape))


def after_quantizing(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    if values.ndim == 1:
        return values
    return gguf.dequantize(gguf.quantize(values, EIGHT_BITS), EIGHT_BITS)


def embedding() -> Weights:
    return {"model.embed_tokens.weight": np.ones((len(TOKENS), HIDDEN), np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A conversion of a file with hardly any weights."""
    made = tmp_path / "model"
    made.mkdir()
    convert(written(tmp_path / "m.gguf", embedding()), made)
    return made


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.torch
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_model_computes_what_it_did(is_tied: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rope_theta=1234.0,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        tie_word_embeddings=is_tied,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if is_tied:
        del weights["lm_head.weight"]
    convert(written(tmp_path / "m.gguf", weights), tmp_path)
    rounded = {name: torch.from_numpy(after_quantizing(w)) for name, w in weights.items()}
    model.load_state_dict({n: w.bfloat16() for n, w in rounded.items()}, strict=not is_tied)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before, after = model(input_ids=ids).logits, again(input_ids=ids).logits
    assert again.config.tie_word_embeddings == is_tied
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)


def test_the_config_has_what_the_file_says(folder: Path) -> None:
    config = config_of(folder)
    assert config["model_type"] == "llama"
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (1234.0, 1e-5)
    assert config["vocab_size"] == len(TOKENS)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}


def test_the_tokenizer_ends_where_the_file_says_and_has_its_template(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_tokens["eos_token"] == "<|end|>"
    assert tokenizer.end_ids == (0,)
    assert tokenizer.template == "{{ messages[0].content }}"
    assert tokenizer.encode("hey<|end|>") == [TOKENS.index("hey"), 0]


def test_digits_are_split_before_anything_is_merged(folder: Path) -> None:
    """A plain byte-level split makes `  1` two spaces in a row of their own."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("he  12") == [TOKENS.index(t) for t in ("he", "ĠĠ", "1", "2")]
    assert tokenizer.decode(tokenizer.encode("he  12 é\n")) == "he  12 é\n"


def test_without_a_rule_for_digits_they_are_merged(tmp_path: Path) -> None:
    convert(written(tmp_path / "m.gguf", embedding(), pre="gpt-2"), tmp_path)
    assert load_tokenizer(tmp_path).encode("12") == [TOKENS.index("12")]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architecture": "mamba"}, "general.architecture is 'mamba'"),
        ({"pre": "mystery"}, "tokenizer.ggml.pre is 'mystery'"),
        ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.type is 'yarn'"),
    ],
)
def test_what_is_not_converted_is_refused_by_name(
    change: dict[str, str], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=told):
        convert(written(tmp_path / "m.gguf", embedding(), **change), tmp_path)


def test_a_tensor_that_no_llama_has_is_refused(tmp_path: Path) -> None:
    strange = {"model.layers.0.attn_q_norm.weight": np.ones(32, np.float32)}
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q_norm\.weight"):
        convert(written(tmp_path / "m.gguf", {**embedding(), **strange}), tmp_path)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"something else")
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert(tmp_path / "m.gguf", tmp_path)
