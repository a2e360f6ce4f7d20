"""How a model of transformers is made to attend to memory that we hold.

The model hands each layer's new keys and values to a cache and gives what comes back to the
attention function that its config names. The cache here hands back a handle in the place of
tensors, and the function here asks the handle. That holds for one new token a row. A model that
does anything else with keys, or asks for anything but plain attention, fails; so a model is tried
before it is relied on (`loops_cookbook.local.sampling.probe`).
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol, cast

import torch
from torch import nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

NAME = "loops_rows"


class Attends(Protocol):
    """Memory that rows attend to."""

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Take in the newest token and attend to all there are.

        Args:
            layer: of the model.
            queries: [B, H, R, D], scaled; R query heads share a key-value head.
            keys, values: [B, H, D]

        Returns:
            [B, H, R, D]
        """
        ...


class _Layer(DynamicLayer):
    """A layer of the cache, and the handle that stands for its keys and values."""

    def __init__(self, memory: Attends, layer: int) -> None:
        super().__init__()
        self._memory = memory
        self._layer = layer
        self._newest: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._newest = key_states, value_states
        return cast(torch.Tensor, self), cast(torch.Tensor, self)

    def attend(self, queries: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """[B, 1, H * R, D], from queries [B, H * R, 1, D]."""
        assert self._newest is not None
        (keys, values), self._newest = self._newest, None
        rows, heads, tokens, width = keys.shape
        if tokens != 1:
            raise ValueError(f"{tokens} new tokens a row, where one is expected")
        scaled = queries * (width**-0.5 if scaling is None else scaling)
        seen = self._memory.attend(
            self._layer, scaled.view(rows, heads, -1, width), keys[:, :, 0], values[:, :, 0]
        )
        return seen.reshape(rows, 1, -1, seen.shape[-1])


def cache_over(memory: Attends, layers: int) -> Cache:
    """A cache that keeps nothing itself."""
    return Cache(layers=[_Layer(memory, layer) for layer in range(layers)])


@contextmanager
def attending(module: PreTrainedModel) -> Generator[None]:
    """Let a model attend through the handles of `cache_over`, for the `with` block."""
    config = module.config.get_text_config()
    before = config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    config._attn_implementation = NAME  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        config._attn_implementation = before  # pyright: ignore[reportPrivateUsage]


def _attend(
    _: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    __: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **asked: object,
) -> tuple[torch.Tensor, None]:
    unknown = [
        name
        for name, value in asked.items()
        # What is False, such as whether a mixture tells its routing, asks for nothing.
        if value is not None and value is not False and name not in HARMLESS
    ]
    if attention_mask is not None or dropout or unknown:
        raise ValueError(f"attention with {', '.join(unknown) or 'a mask or dropout'} is not plain")
    return cast(_Layer, key).attend(query, scaling), None


HARMLESS = {"position_ids", "use_cache", "cache_position", "is_causal"}
"""What models pass to attention functions that changes nothing here."""

AttentionInterface.register(NAME, _attend)
