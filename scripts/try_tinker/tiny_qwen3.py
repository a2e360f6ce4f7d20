"""Writes a Qwen3 of two layers with random weights, its tokenizer and chat template.

    python tiny_qwen3.py FOLDER

Nothing is downloaded. It is as small as a server that only knows real architectures can load, and
it learns as little as that: to move its reward is all that it is for.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen3Config

TEXTS = ("hello world ", "the quick brown fox user assistant system \n", "def f(x): return x + 1\n")
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
WIDTH, HEADS, KEY_HEADS, HEAD, INNER, LAYERS = 64, 4, 2, 16, 128, 2


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the pairs of them that some words have."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=MARKS)
    pairs.train_from_iterator([text * 50 for text in TEXTS], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=pairs, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = TEMPLATE
    return made


def weights(vocabulary: int) -> dict[str, np.ndarray]:
    """Under the names that Qwen3 has for them."""
    generator = np.random.default_rng(0)

    def noise(*shape: int) -> np.ndarray:
        return (generator.standard_normal(shape) * 0.05).astype(np.float32)

    ones = {"model.norm.weight": WIDTH}
    made = {"model.embed_tokens.weight": noise(vocabulary, WIDTH)}
    made["lm_head.weight"] = noise(vocabulary, WIDTH)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, heads in (("q", HEADS), ("k", KEY_HEADS), ("v", KEY_HEADS)):
            made[f"{at}self_attn.{name}_proj.weight"] = noise(heads * HEAD, WIDTH)
        made[f"{at}self_attn.o_proj.weight"] = noise(WIDTH, HEADS * HEAD)
        made[f"{at}mlp.gate_proj.weight"] = noise(INNER, WIDTH)
        made[f"{at}mlp.up_proj.weight"] = noise(INNER, WIDTH)
        made[f"{at}mlp.down_proj.weight"] = noise(WIDTH, INNER)
        ones |= {f"{at}self_attn.{name}_norm.weight": HEAD for name in "qk"}
        ones |= {f"{at}{name}_layernorm.weight": WIDTH for name in ("input", "post_attention")}
    return made | {name: np.ones(size, np.float32) for name, size in ones.items()}


def write(folder: Path) -> None:
    """The whole model."""
    folder.mkdir(parents=True, exist_ok=True)
    text = tokenizer()
    text.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(text),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    # SkyRL looks for it, and transformers leaves it out of a config that was never a model.
    (folder / "config.json").write_text(json.dumps(said | {"dtype": "float32"}, indent=2))
    save_file(weights(len(text)), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    write(Path(sys.argv[1]))
