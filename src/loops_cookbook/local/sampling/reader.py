"""Reading prompts: what of them is held already is not read again.

Prompts are read several at a time, padded on the left. One that shares a long beginning with
another waits until that one has been read and is held; so the beginning is read once. The last
token of a prompt is always read, since it gives the logits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import torch
from transformers import DynamicCache

from loops_cookbook.local.model import Policy
from loops_cookbook.local.sampling.prefixes import Prefixes
from loops_cookbook.local.sampling.spans import Span, spans_of

Prompt: TypeAlias = tuple[int, ...]
ItemT = TypeVar("ItemT")

MOST_TOKENS = 2048
"""Of one pass, padding included: more at once are not read faster."""
WORTH_WAITING = 32
"""A beginning of fewer tokens is read again sooner than waited for."""
SMALL = 256
"""A pass of so many tokens takes about as long as one of fewer."""


@dataclass(slots=True, eq=False)
class Text:
    """A prompt on its way."""

    ids: Prompt
    spans: list[Span] = field(default_factory=list[Span])
    """What is read of it, in order."""
    logits: torch.Tensor | None = None
    """float32[V], of the token after it, once it is read whole."""

    @property
    def read(self) -> int:
        """Tokens that are read."""
        return sum(map(len, self.spans))


class Reader:
    """Reads prompts with the weights that the policy holds at the call.

    Args:
        policy: of a model that has spans.
        prefixes: where spans are looked up and held.
        weights: the name of those that read.
    """

    def __init__(self, policy: Policy, prefixes: Prefixes, weights: str) -> None:
        self._policy = policy
        self._prefixes = prefixes
        self._weights = weights

    def read(self, prompts: Sequence[Prompt]) -> list[Text]:
        """Every prompt, read whole, in order."""
        texts = [Text(prompt) for prompt in prompts]
        later: Sequence[Text] = texts
        while later:
            for text in later:
                text.spans = self._prefixes.find(self._weights, text.ids[:-1])
            now, later = _without_shared(later)
            while now:
                for together in of_like_length(now, lambda text: len(text.ids) - text.read):
                    self._pass(together)
                now = [text for text in now if text.logits is None]
        return texts

    def hold(self, ids: Sequence[int], span: Span) -> None:
        """Hold what was computed of a text's end."""
        self._prefixes.hold(self._weights, ids, span)

    def _pass(self, texts: Sequence[Text]) -> None:
        """Read on in some texts."""
        starts = [text.read for text in texts]
        ends = [
            min(len(text.ids), start + MOST_TOKENS)
            for text, start in zip(texts, starts, strict=True)
        ]
        past = max(starts)
        width = max(end - start for start, end in zip(starts, ends, strict=True))
        ids = torch.zeros(len(texts), width, dtype=torch.long)
        mask = torch.ones(len(texts), past + width, dtype=torch.long)
        for row, (text, start, end) in enumerate(zip(texts, starts, ends, strict=True)):
            ids[row, width - (end - start) :] = torch.tensor(text.ids[start:end])
            mask[row, : past - start] = 0
            mask[row, past : past + width - (end - start)] = 0
        device = self._policy.device
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
        cache = DynamicCache(config=self._policy.module.config)
        if past:
            _fill(cache, texts, past)
        output = self._policy.module(
            input_ids=ids.to(device),
            attention_mask=None if bool(mask.all()) else mask.to(device),
            position_ids=positions.to(device),
            use_cache=True,
            logits_to_keep=1,
            **{self._policy.cache_argument: cache},
        )
        logits = output.logits[:, -1].float()
        texts_read = zip(texts, starts, ends, spans_of(cache), strict=True)
        for row, (text, start, end, span) in enumerate(texts_read):
            new = span.part(len(span) - (end - start), len(span))
            text.spans.append(new)
            self.hold(text.ids[:end], new)
            if end == len(text.ids):
                text.logits = logits[row]


def _fill(cache: DynamicCache, texts: Sequence[Text], past: int) -> None:
    """Let a cache begin with what is read of some texts, padded on the left."""
    like = next(span for text in texts for span in text.spans)
    layers, heads = like.keys.shape[:2]
    held = [
        kind.new_zeros(layers, len(texts), heads, past, kind.shape[-1])
        for kind in (like.keys, like.values)
    ]
    for row, text in enumerate(texts):
        column = past - text.read
        for span in text.spans:
            end = column + len(span)
            held[0][:, row, :, column:end] = span.keys
            held[1][:, row, :, column:end] = span.values
            column = end
    for layer in range(layers):
        cache.update(held[0][layer], held[1][layer], layer)


def _without_shared(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Those to be read now, and those that had better wait for one of them."""
    now: list[Text] = []
    later: list[Text] = []
    shared = 0
    before: Prompt = ()
    for text in sorted(texts, key=lambda text: text.ids):
        common = _common(before, text.ids)
        shared = min(shared, common) if later and before is later[-1].ids else common
        is_worth = min(shared, len(text.ids) - 1) - text.read >= WORTH_WAITING
        (later if is_worth else now).append(text)
        before = text.ids
    return now, later


def _common(one: Prompt, other: Prompt) -> int:
    """How many tokens two texts begin with alike."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(place for place in range(length) if one[place] != other[place])


def of_like_length(items: Iterable[ItemT], length: Callable[[ItemT], int]) -> Iterator[list[ItemT]]:
    """Items by length, the longest first, in lists that little padding makes rectangles of.

    Args:
        items: of any lengths.
        length: of one of them, in tokens.
    """
    together: list[ItemT] = []
    width = real = 0
    for item in sorted(items, key=length, reverse=True):
        width = width if together else length(item)
        real += length(item)
        padded = width * (len(together) + 1)
        if together and padded > min(MOST_TOKENS, max(SMALL, 1.25 * real)):
            yield together
            together, width, real = [], length(item), length(item)
        together.append(item)
    if together:
        yield together
