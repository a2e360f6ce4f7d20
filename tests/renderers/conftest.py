"""A tiny byte-level tokenizer, and the chat templates of `templates/` as models carry them.

Every text has an encoding; `hello`, `ll` and a few more are tokens beside their letters, so a
text can be spelt in ways that the tokenizer itself would not choose.
"""

import json
from pathlib import Path
from typing import Protocol

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from loops_cookbook.renderers.tokenizers import ChatTokenizer

MARKS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin|>", "<|user|>", "<|assistant|>",
    "<|system|>", "<|start|>", "<|end|>", "<|eot|>", "[INST]", "[/INST]",
)  # fmt: skip
MERGES = [("l", "l"), ("h", "e"), ("ll", "o"), ("he", "llo"), ("Ġ", "t")]
TEMPLATES = Path(__file__).parent / "templates"


class MakeTokenizer(Protocol):
    def __call__(
        self,
        template: str | None = "chatml",
        *,
        eos: str = "<|im_end|>",
        more: tuple[str, ...] = (),
    ) -> ChatTokenizer: ...


class SaveModel(Protocol):
    def __call__(
        self,
        folder: Path,
        template: str | None = "chatml",
        *,
        config: dict[str, object] | None = None,
        more: tuple[str, ...] = (),
    ) -> Path: ...


def _backend(more: tuple[str, ...]) -> Tokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    backend = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in (*MARKS, *more)])
    return backend


def _source(template: str | None) -> str | None:
    return None if template is None else (TEMPLATES / f"{template}.jinja").read_text()


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """A tokenizer with one of the templates."""

    def make(
        template: str | None = "chatml", *, eos: str = "<|im_end|>", more: tuple[str, ...] = ()
    ) -> ChatTokenizer:
        backend = _backend(more)
        end_id = backend.token_to_id(eos)
        return ChatTokenizer(
            name=f"models/{template}",
            backend=backend,
            template=_source(template),
            special_tokens={"bos_token": "<|begin|>", "eos_token": eos},
            end_ids=() if end_id is None else (end_id,),
        )

    return make


@pytest.fixture(scope="session")
def save_model() -> SaveModel:
    """The same as a model's folder: tokenizer.json, tokenizer_config.json, config.json."""

    def save(
        folder: Path,
        template: str | None = "chatml",
        *,
        config: dict[str, object] | None = None,
        more: tuple[str, ...] = (),
    ) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        _backend(more).save(str(folder / "tokenizer.json"))
        tokenizer_config = {
            "bos_token": "<|begin|>",
            "eos_token": {"content": "<|im_end|>", "special": True},
            "add_bos_token": False,
            "chat_template": _source(template),
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
        return folder

    return save
