"""Ids to text, for people and for stop strings; ids are never made from text here.

Special tokens are part of the text, so that it says what the ids say and a special token can be
given as a stop string.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from loops_cookbook.errors import ModelError

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Ids to text."""


def load_decode(model_dir: Path) -> Decode:
    """The decoder of a model directory: its `tokenizer.json`, else what transformers finds.

    Raises:
        ModelError: there is no tokenizer that can be read.
    """
    file = model_dir / "tokenizer.json"
    if file.is_file():
        try:
            light = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{file} cannot be read as a tokenizer: {error}") from error
        return lambda ids: light.decode(list(ids), skip_special_tokens=False)
    try:
        heavy = AutoTokenizer.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # foreign code over a foreign file: it may raise anything
        raise ModelError(
            f"no tokenizer can be read from {model_dir}: put the model's tokenizer.json there"
        ) from error
    return lambda ids: cast(str, heavy.decode(list(ids), skip_special_tokens=False))


def ends_in_stop(ids: Sequence[int], stops: Sequence[str], decode: Decode) -> bool:
    """Whether the newest of these ids completes one of the stop strings.

    Only a tail long enough for the longest stop string is decoded: a token gives at least one
    byte of text, and a few more tokens guard against those that give none.
    """
    if not stops:
        return False
    tail = max(len(stop.encode()) for stop in stops) + 8
    text = decode(ids[-tail:])
    return any(stop in text for stop in stops)
