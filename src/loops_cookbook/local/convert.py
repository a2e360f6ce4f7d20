"""A GGUF file becomes a plain model folder: config, bfloat16 safetensors, tokenizer, chat template.

Only Llama-shaped models with a byte-level BPE vocabulary are read; anything else in the file is
refused by name, since a model that loads and is slightly wrong is worse than none. Quantized
weights are dequantized. Nothing of it needs torch or transformers, and one tensor at a time is
held in memory.

Source of the names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; of the rows'
order in `attn_q` and `attn_k`: `LlamaModel.permute` of llama.cpp's `convert_hf_to_gguf.py`.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from loops_cookbook.errors import ModelError

ARCHITECTURE = "llama"
VOCABULARY = "gpt2"
"""What GGUF calls byte-level BPE."""

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_A_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_apart() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _byte_level()])


_SPLITTERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_apart,
}
"""How text is split before BPE, by `tokenizer.ggml.pre`: the file has a name for it, no rule."""


def convert(source: Path, folder: Path) -> None:
    """Write the model of a GGUF file into a folder that is there.

    Raises:
        ModelError: the file is not GGUF, or holds something that is not converted.
    """
    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"{source}: not a GGUF file ({error}): fetch it again") from error
    facts = _Facts(source, {name: field.contents for name, field in reader.fields.items()})
    tensors = {_tensor_name(tensor.name, source): tensor for tensor in reader.tensors}
    is_tied = "lm_head.weight" not in tensors
    config, ends = _config(facts, is_tied), _ends(facts)
    _write_json(folder / "config.json", config | ends)
    _write_json(folder / "generation_config.json", ends)
    _write_tokenizer(facts, folder)
    _write_weights(folder / "model.safetensors", tensors, config)


class _Facts:
    """The file's metadata."""

    def __init__(self, source: Path, fields: Mapping[str, Callable[[], Any]]) -> None:
        self._source = source
        self._fields = fields

    def get(self, name: str, default: object = None) -> Any:
        return self._fields[name]() if name in self._fields else default

    def need(self, name: str) -> Any:
        if name not in self._fields:
            raise ModelError(f"{self._source}: has no {name}, which is needed to convert it")
        return self._fields[name]()

    def refuse(self, name: str, *allowed: object) -> None:
        """Refuse a value that is not converted."""
        value = self.get(name)
        if value not in allowed:
            known = " or ".join(repr(each) for each in allowed if each is not None)
            raise ModelError(
                f"{self._source}: {name} is {value!r}, and only {known or 'its absence'} can be "
                "converted: get this model as a Hugging Face folder"
            )


def _config(facts: _Facts, is_tied: bool) -> dict[str, Any]:
    facts.refuse("general.architecture", ARCHITECTURE)
    facts.refuse("llama.rope.scaling.type", None, "none")
    facts.refuse("llama.expert_count", None, 0)
    heads, hidden = facts.need("llama.attention.head_count"), facts.need("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(facts.need("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": facts.need("llama.feed_forward_length"),
        "num_hidden_layers": facts.need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.get("llama.attention.head_count_kv", heads),
        "head_dim": facts.get("llama.attention.key_length", hidden // heads),
        "max_position_embeddings": facts.need("llama.context_length"),
        "rope_theta": facts.get("llama.rope.freq_base", 10000.0),
        # Written as float32, which is not quite the number that was meant.
        "rms_norm_eps": float(f"{facts.need('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "tie_word_embeddings": is_tied,
    }


def _ends(facts: _Facts) -> dict[str, Any]:
    return {
        f"{name}_token_id": facts.get(f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if facts.get(f"tokenizer.ggml.{key}_token_id") is not None
    }


def _write_tokenizer(facts: _Facts, folder: Path) -> None:
    facts.refuse("tokenizer.ggml.model", VOCABULARY)
    facts.refuse("tokenizer.ggml.pre", *_SPLITTERS)
    facts.refuse("tokenizer.ggml.add_space_prefix", None, False)
    facts.refuse("tokenizer.ggml.add_bos_token", None, False)
    tokens: list[str] = facts.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in facts.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, cast(Any, merges))
    )
    tokenizer.pre_tokenizer = _SPLITTERS[facts.need("tokenizer.ggml.pre")]()
    tokenizer.decoder = decoders.ByteLevel()
    special, own = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    kinds = zip(tokens, facts.need("tokenizer.ggml.token_type"), strict=True)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == special, normalized=False)
            for token, kind in kinds
            if kind in (special, own)
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    template: str = facts.need("tokenizer.chat_template")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="\n")
    named = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    ids = {name: facts.get(f"tokenizer.ggml.{key}_token_id") for name, key in named}
    settings = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    length = facts.need("llama.context_length")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": length,
            "clean_up_tokenization_spaces": False,
            **settings,
        },
    )


def _tensor_name(name: str, source: Path) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    block = _BLOCK.fullmatch(name)
    if block and block[2] in _OF_A_BLOCK:
        return f"model.layers.{block[1]}.{_OF_A_BLOCK[block[2]]}.weight"
    raise ModelError(
        f"{source}: the tensor {name!r} is none of a plain Llama's: get this model as a Hugging "
        "Face folder"
    )


def _write_weights(path: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write every tensor in bfloat16. The format: https://github.com/huggingface/safetensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * int(np.prod(tensor.shape))
        # GGUF writes the dimensions from the innermost on.
        shape = [int(size) for size in reversed(tensor.shape)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)
    with path.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for name, tensor in tensors.items():
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            file.write(_bfloat16(_in_order(values, name, config)).tobytes())


def _in_order(
    values: npt.NDArray[np.float32], name: str, config: Mapping[str, Any]
) -> npt.NDArray[np.float32]:
    """Undo the exchange of rows by which llama.cpp rotates neighbours instead of halves."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = heads.get(name.split(".")[-2])
    if key is None:
        return values
    by_head = values.reshape(config[key], -1, 2, values.shape[-1])
    return by_head.swapaxes(1, 2).reshape(values.shape)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    flat = np.ascontiguousarray(values, np.float32)
    return gguf.quantize(flat, gguf.GGMLQuantizationType.BF16)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8", newline="\n")
