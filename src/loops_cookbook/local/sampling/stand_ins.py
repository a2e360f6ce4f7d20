"""Layers that stand in for a model's own while it samples, because they are faster.

An adapter costs two more products in every linear layer, and the library that holds it costs more
than that in a small model. Sampling needs neither: where an adapter is merged into a copy of its
layer's weight, what comes out is the same but for rounding; where it is left out, the layer is
the one that was loaded. The copies take as much memory as the layers themselves, and are made in
float32 only, since coarser weights would lose what an adapter adds.

On a CPU the product with a large output head is done in parts that stay in its cache: for a few
rows that takes two thirds of the time.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

PART = 1024
"""Tokens of the vocabulary in a part of the head."""


@dataclass(frozen=True, slots=True)
class _StandIn:
    parent: nn.Module
    name: str
    layer: nn.Module
    stand_in: nn.Module


class StandIns:
    """Layers and what stands in for them."""

    def __init__(self, layers: Iterable[_StandIn]) -> None:
        self._layers = list(layers)

    @contextmanager
    def standing_in(self) -> Generator[None]:
        """Compute with them, for the `with` block."""
        try:
            for its in self._layers:
                its.parent.register_module(its.name, its.stand_in)
            yield
        finally:
            for its in self._layers:
                its.parent.register_module(its.name, its.layer)


def without_adapters(module: nn.Module) -> StandIns:
    """Layers as they were loaded, for those with adapters."""
    return StandIns(
        _StandIn(parent, name, cast(nn.Module, layer), layer.get_base_layer())
        for parent, name, layer in _adapted(module)
    )


def with_merged_adapters(module: nn.Module) -> StandIns:
    """Layers with their adapters, as they are now, merged into copies of the weights."""
    return StandIns(
        _StandIn(parent, name, cast(nn.Module, layer), _merged(layer))
        for parent, name, layer in _adapted(module)
    )


def with_head_in_parts(module: PreTrainedModel) -> StandIns:
    """An output head that multiplies part by part; none where that gains nothing."""
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear or cast(object, head.bias) is not None:
        return StandIns(())
    if head.weight.device.type != "cpu" or head.out_features < 2 * PART:
        return StandIns(())
    return StandIns(
        _StandIn(parent, name, head, _HeadInParts(head))
        for parent in module.modules()
        for name, layer in parent.named_children()
        if layer is head
    )


class _HeadInParts(nn.Module):
    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self._head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made = [linear(hidden, part) for part in self._head.weight.split(PART)]
        return torch.cat(made, -1)


def merged_bytes(module: nn.Module) -> int | None:
    """What merged copies would take; None: some layer can't be merged."""
    from peft.tuners.lora import Linear

    size = 0
    for _, _, layer in _adapted(module):
        base = layer.get_base_layer()
        # Not isinstance: a kind of its own may compute something else.
        if type(layer) is not Linear or type(base) is not nn.Linear:
            return None
        if base.weight.dtype != torch.float32:
            return None
        size += base.weight.nbytes
    return size


def _adapted(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """The layers that an adapter is on, each with the module that holds it and its name there."""
    # Here, since a model without adapters needs none of it.
    from peft.tuners.lora import LoraLayer

    for parent in module.modules():
        for name, layer in parent.named_children():
            if isinstance(layer, LoraLayer):
                yield parent, name, layer


@torch.no_grad()
def _merged(layer: Any) -> nn.Module:
    base = cast(nn.Linear, layer.get_base_layer())
    (adapter,) = layer.active_adapters
    weight = base.weight + cast(torch.Tensor, layer.get_delta_weight(adapter))
    plain = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = base.bias
    return plain
