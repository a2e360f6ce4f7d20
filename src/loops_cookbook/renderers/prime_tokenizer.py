"""Our tokenizer with the names that Prime's renderers call it by: the few methods that they use."""

from collections.abc import Sequence

from loops_cookbook.renderers.tokenizers import BREAK, ChatTokenizer


class PrimeTokenizer:
    """What Prime's renderers take for a tokenizer of transformers.

    Args:
        tokenizer: what it encodes and decodes with.
        known_as: the model's name on the hub.
    """

    def __init__(self, tokenizer: ChatTokenizer, known_as: str) -> None:
        special = tokenizer.special_tokens
        self._tokenizer = tokenizer
        self.name_or_path = known_as
        self.chat_template = tokenizer.template
        self.unk_token_id = tokenizer.id_of(special.get("unk_token", ""))
        self.eos_token_id = tokenizer.id_of(special.get("eos_token", ""))

    def encode(self, text: str, *_: object, **__: object) -> list[int]:
        """Ids of a text; no special token is added, whatever is asked for."""
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int] | int, *_: object, **__: object) -> str:
        """Text of ids, special tokens included."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """The id of one token, or of each; None for what is no token."""
        if isinstance(tokens, str):
            return self._tokenizer.id_of(tokens)
        return [self._tokenizer.id_of(token) for token in tokens]

    def __call__(self, text: str, **_: object) -> dict[str, object]:
        """Ids and where each stands in the text; some formats attribute tokens by it."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        for piece in self._tokenizer.pieces(text):
            encoding = self._tokenizer.backend.encode(piece, add_special_tokens=False)
            ids += encoding.ids
            offsets += [(start + begin, start + end) for begin, end in encoding.offsets]
            start += len(piece) + len(BREAK)
        return {"input_ids": ids, "offset_mapping": offsets}
