"""A tiny random Llama in a directory, and engines over it."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NEEDED = ("torch", "peft", "starlette", "uvicorn")

# Without the extra `local` there is nothing here to test.
collect_ignore_glob = [] if all(map(find_spec, NEEDED)) else ["test_*.py", "sampling/test_*.py"]

WORDS = ["<pad>", "<bos>", "<end>", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", " ", "\n"]
"""The vocabulary; ids are places in it, and text is the words joined."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """41 words, 2 layers of width 32, a window of 64; logits far enough apart to tell."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    # Two threads that meet in every small operation are slower by far on a busy machine.
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    vocabulary = {word: place for place, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def make_engine(model_dir: Path) -> Callable[..., Any]:
    """Engines over the tiny model; keyword arguments replace settings."""
    pytest.importorskip("torch")
    from loops_cookbook.local.engine import Engine, EngineSettings

    def make(**changes: Any) -> Engine:
        settings: dict[str, Any] = {
            "model_dir": model_dir,
            "model_name": "tiny",
            "max_seq_len": 32,
            "lora_rank": 0,
            "lora_alpha": 16.0,
            "seed": 0,
            "device": "cpu",
            "threads": 1,
        }
        return Engine(EngineSettings(**settings | changes))

    return make
