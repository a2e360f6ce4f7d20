"""A model's tokenizer, with what a chat needs beside it: its template, its special tokens, its end.

A folder that has a `tokenizer.json` is read by the `tokenizers` library, exactly as it stands
there but for truncation and padding, which would change prompts in silence. Only where there is
none does transformers build one. This is the only module that imports transformers, and only
inside the functions that need it. Nothing here uses the network: the files of a model on a hub
are found by `renderers.hub`.
"""

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Tokenizer

from loops_cookbook.errors import ModelError
from loops_cookbook.messages import well_formed
from loops_cookbook.problems import found, one_line

BREAK = "\ufdd0\ufdd1"
"""Where `encode` begins anew. Unicode keeps these two for a program's own use: no text has them."""


@dataclass(frozen=True, slots=True, eq=False)
class ChatTokenizer:
    """Text to ids and back, and the chat template that goes with it. Not thread-safe."""

    name: str
    """The model as people name it: `models/counting`, `Qwen/Qwen3.5-4B`."""
    backend: Tokenizer
    template: str | None = None
    """The source of the chat template."""
    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    """What templates call them, to their text: `eos_token` to `<|im_end|>`."""
    end_ids: tuple[int, ...] = ()
    """Ids that the model's files declare to end a text."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, in which special tokens are recognised and none is added.

        A token that a `BREAK` stands in is not recognised. A lone surrogate is read as U+FFFD.

        Raises:
            ValueError: the vocabulary has no token for a part of the text.
        """
        return [i for piece in self.pieces(text) for i in self._encode(piece)]

    def pieces(self, text: str) -> list[str]:
        """What `encode` gives to the tokenizer, one after another."""
        return well_formed(text).split(BREAK)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self.backend.decode(ids, skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        """The id of one token, None where the vocabulary does not have it."""
        return self.backend.token_to_id(token)

    def text_of(self, token_id: int) -> str:
        """One token as the vocabulary writes it."""
        return self.backend.id_to_token(token_id) or f"token {token_id}"

    def atomic_ids(self) -> frozenset[int]:
        """Ids of tokens that no neighbouring text can merge with: special and added ones."""
        return frozenset(self.backend.get_added_tokens_decoder())

    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that the tokenizer declares to be no text."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def _encode(self, text: str) -> list[int]:
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare `Exception`
            raise ValueError(
                f"the tokenizer of {self.name} refuses {found(text)}: {error}"
            ) from error


def load_tokenizer(folder: Path, *, name: str | None = None) -> ChatTokenizer:
    """Read the tokenizer of a model folder.

    Args:
        folder: holds `tokenizer.json`, or files that transformers can build one from.
        name: what to call the model; the folder's path if None.

    Raises:
        ModelError: there is no usable tokenizer, or a file of it does not parse.
    """
    name = name or str(folder)
    config = read_json(folder / "tokenizer_config.json")
    backend = _backend(folder, name)
    backend.no_truncation()
    backend.no_padding()
    _add_missing(backend, config)
    special_tokens = _special_tokens(read_json(folder / "special_tokens_map.json"), config)
    return ChatTokenizer(
        name=name,
        backend=backend,
        template=_template(folder, config),
        special_tokens=special_tokens,
        end_ids=_end_ids(folder, backend, special_tokens.get("eos_token")),
    )


def read_json(path: Path) -> dict[str, object]:
    """An object in a JSON file, empty where there is no such file.

    Raises:
        ModelError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not JSON ({error}): fetch or export the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object was expected: fetch or export the model again")
    return cast(dict[str, object], value)


def processor_class(source: str, parts: Sequence[str] = ()) -> str:
    """The class of a model's image processor, loaded from local files alone.

    Args:
        source: a folder, or the name of a cached model on a hub.
        parts: classes of transformers that the processor is known to need; they are tried
            first, so that a missing library is named before missing files.

    Raises:
        Exception: whatever transformers raises where it cannot be loaded.
    """
    transformers = importlib.import_module("transformers")
    for part in parts:
        getattr(transformers, part)()
    processor: object = transformers.AutoProcessor.from_pretrained(source, local_files_only=True)
    return type(processor).__name__


def _backend(folder: Path, name: str) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare `Exception`
            raise ModelError(
                f"{path}: not a tokenizer ({error}): fetch or export the model again"
            ) from error
    transformers = importlib.import_module("transformers")
    try:
        built: object = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True
        )
    except Exception as error:  # foreign code reads foreign files: any exception is possible
        reason = one_line(str(error))[:200]
        raise ModelError(
            f"{name}: no tokenizer.json in {folder}, and transformers cannot build a tokenizer "
            f"from what is there ({type(error).__name__}: {reason}): add a tokenizer.json, or name "
            "another folder in [model] tokenizer"
        ) from error
    backend = getattr(built, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelError(
            f"{name}: {type(built).__name__} has no fast tokenizer: save one as tokenizer.json, or "
            "name another folder in [model] tokenizer"
        )
    return backend


def _add_missing(backend: Tokenizer, config: Mapping[str, object]) -> None:
    """Add tokens that `tokenizer_config.json` alone declares, at the ids it gives them."""
    declared = cast(Mapping[str, Mapping[str, object]], config.get("added_tokens_decoder") or {})
    for number, token in sorted(declared.items(), key=lambda item: int(item[0])):
        content = str(token["content"])
        if backend.token_to_id(content) is None:
            flags = {k: v for k, v in token.items() if k != "content" and isinstance(v, bool)}
            backend.add_tokens([AddedToken(content, **flags)])  # pyright: ignore[reportUnknownMemberType]
        found = backend.token_to_id(content)
        if found != int(number):
            raise ModelError(
                f"tokenizer_config.json gives {content!r} the id {number}, tokenizer.json {found}: "
                "the two are of different models; fetch or export the model again"
            )


def _special_tokens(*files: Mapping[str, object]) -> dict[str, str]:
    """Texts of the keys that end in `_token`; a later file wins."""
    found: dict[str, str] = {}
    for file in files:
        for key, value in file.items():
            if isinstance(value, Mapping):
                value = cast(Mapping[str, object], value).get("content")
            if key.endswith("_token") and isinstance(value, str):
                found[key] = value
    return found


def _template(folder: Path, config: Mapping[str, object]) -> str | None:
    """The default chat template; a file of its own wins over the config, as in transformers."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if not isinstance(template, list):
        return template if isinstance(template, str) else None
    named = {
        str(entry.get("name")): str(entry.get("template"))
        for entry in cast(list[Mapping[str, object]], template)
    }
    return named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)


def _end_ids(folder: Path, backend: Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    declared = read_json(folder / "generation_config.json").get("eos_token_id")
    many: Iterable[object] = (
        cast(list[object], declared) if isinstance(declared, list) else [declared]
    )
    ids = [i for i in many if isinstance(i, int)]
    eos_id = backend.token_to_id(eos_token) if eos_token else None
    if eos_id is not None:
        ids.insert(0, eos_id)
    return tuple(dict.fromkeys(ids))
