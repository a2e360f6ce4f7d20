"""Rows of a model whose memory is spans: they may come and go at any step.

Prompts are read by a `Reader`, so what is held of them is not read again, and what a row leaves
behind is held for whoever goes on from it. Rows of one prompt share it; rows of like length, whose
prompts are of like length too, stand on one `Shelf`, and all shelves are one batch to the model. A
row is computed as if it were alone, but for rounding.
"""

from collections.abc import Sequence, Set

import numpy as np
import torch

from loops_cookbook.local.model import Policy
from loops_cookbook.local.sampling.attention import attending, cache_over
from loops_cookbook.local.sampling.drafts import Draft
from loops_cookbook.local.sampling.reader import Prompt, Reader, Text
from loops_cookbook.local.sampling.room import columns_of, stem_columns_of
from loops_cookbook.local.sampling.shelf import Group, Shelf
from loops_cookbook.local.sampling.stand_ins import with_head_in_parts

SHARING = 16
"""At most so many rows share one stem: the others of a large group have the same again, so that
small groups are not padded to its size."""
WORTH_HOLDING = 32
"""What a row adds to its prompt is held from so many tokens on: less is sooner read again."""


class Rows:
    """A batch that rows join and leave.

    Args:
        policy: whose weights, as they are at each call, compute.
        reader: of the same weights.
    """

    def __init__(self, policy: Policy, reader: Reader) -> None:
        self._policy = policy
        self._reader = reader
        self._shelves: dict[tuple[int, int], Shelf[Draft]] = {}
        """By the columns of a stem and of a row."""
        self._texts: list[Text] = []
        layers = policy.module.config.get_text_config().num_hidden_layers
        self._cache = cache_over(self, layers)
        self._head = with_head_in_parts(policy.module)

    @property
    def drafts(self) -> list[Draft]:
        """Whose rows these are, in the order of the batch."""
        return [draft for shelf in self._shelves.values() for draft in shelf.owners]

    def read(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Read some prompts, no two alike; logits of what follows each, float32[N, V]."""
        self._texts = self._reader.read(prompts)
        return torch.stack([text.logits for text in self._texts if text.logits is not None])

    def join(self, drafts: Sequence[Sequence[Draft]]) -> None:
        """Add rows to the batch: for each prompt that was read last, those of its drafts."""
        groups: dict[tuple[int, int], list[Group[Draft]]] = {}
        for text, together in zip(self._texts, drafts, strict=True):
            for start in range(0, len(together), SHARING):
                owners = together[start : start + SHARING]
                room = max(draft.limit for draft in owners)
                key = 0, columns_of(room + len(text.ids))
                if len(owners) > 1:
                    key = stem_columns_of(len(text.ids)), columns_of(room)
                groups.setdefault(key, []).append(Group(text.spans, owners))
        for key, joining in groups.items():
            stem_columns, columns = key
            shelf = self._shelves.get(key) or Shelf(columns, stem_columns=stem_columns)
            shelf.join(joining)
            self._shelves[key] = shelf
        self._texts = []

    def extend(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read one more token in each row; logits of the one after it, float32[B, V]."""
        positions = [shelf.positions() for shelf in self._shelves.values()]
        for shelf in self._shelves.values():
            shelf.begin_step()
        with attending(self._policy.module), self._head.standing_in():
            output = self._policy.module(
                input_ids=tokens[:, None],
                attention_mask=None,
                position_ids=torch.tensor(np.concatenate(positions)).to(tokens.device)[:, None],
                use_cache=True,
                logits_to_keep=1,
                **{self._policy.cache_argument: self._cache},
            )
        return output.logits[:, -1].float()

    def drop(self, ended: Set[Draft]) -> None:
        """Let go of rows, and hold what they leave behind."""
        for key, shelf in list(self._shelves.items()):
            slots = {slot for slot, draft in enumerate(shelf.owners) if draft in ended}
            for slot in slots:
                draft = shelf.owners[slot]
                if len(draft.ids) > WORTH_HOLDING:
                    self._reader.hold((*draft.prompt, *draft.ids)[:-1], shelf.own(slot))
            if len(slots) == len(shelf):
                del self._shelves[key]
            elif slots:
                shelf.drop(slots)

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """What `loops_cookbook.local.sampling.attention` asks of a batch."""
        if len(self._shelves) == 1:
            (shelf,) = self._shelves.values()
            return shelf.attend(layer, queries, keys, values)
        counts = [len(shelf) for shelf in self._shelves.values()]
        parts = zip(
            self._shelves.values(),
            queries.split(counts),
            keys.split(counts),
            values.split(counts),
            strict=True,
        )
        return torch.cat([shelf.attend(layer, q, k, v) for shelf, q, k, v in parts])
