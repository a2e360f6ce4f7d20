"""How large micro-batches may be, and which keep their activations: decided once, from estimates.

A device lends so many bytes, once each for a micro-batch's activations, for its logits, and (a
quarter) for its mask. While the activations fit, they are kept for the backward pass. A
micro-batch of more tokens than that, be it one long row or a tree of rows that is cheaper whole,
keeps the inputs of the model's blocks only and computes each block again when its gradient is
due (gradient checkpointing): a third more arithmetic, and a fraction of the memory. Nothing that
is computed depends on any of this, but for rounding.

Source: Chen et al. 2016, "Training deep nets with sublinear memory cost" (arXiv:1604.06174).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from loops_cookbook.local.memory import (
    lendable_bytes,
    scored_position_bytes,
    trained_token_bytes,
)
from loops_cookbook.local.model import Policy
from loops_cookbook.local.pack import Bounds, cost
from loops_cookbook.local.pad import MicroBatch

MAX_TOKENS = 8192
"""Of a micro-batch, padding included: more at once is not faster."""
RECOMPUTED_COST = 4 / 3
"""Of a micro-batch whose blocks are computed twice: a backward pass takes two forward passes."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one micro-batch may hold."""

    bounds: Bounds
    """With activations kept."""
    recomputed_tokens: int
    """What may take the place of `bounds.max_tokens` where activations are not kept."""

    def recomputes(self, batch: MicroBatch) -> bool:
        """Whether a micro-batch is too large for its activations to be kept."""
        return batch.ids.size > self.bounds.max_tokens

    @property
    def choices(self) -> list[Bounds]:
        """The bounds that a request may be laid out in."""
        if self.recomputed_tokens <= self.bounds.max_tokens:
            return [self.bounds]
        return [self.bounds, replace(self.bounds, max_tokens=self.recomputed_tokens)]

    def cost(self, batches: Iterable[MicroBatch]) -> float:
        """What some micro-batches take to compute, in tokens."""
        return sum(
            cost(batch, self.bounds) * (RECOMPUTED_COST if self.recomputes(batch) else 1.0)
            for batch in batches
        )

    def __str__(self) -> str:
        kept = self.bounds.max_tokens
        if kept >= MAX_TOKENS:
            return "kept"
        return f"kept up to {kept} tokens of a micro-batch, recomputed beyond"


def budget(policy: Policy, *, lent_bytes: int | None = None) -> Budget:
    """What the micro-batches of a policy may hold.

    Args:
        policy: what computes them.
        lent_bytes: see above; None: what the device can lend now.
    """
    lent = lent_bytes or lendable_bytes(policy.device)
    text = policy.module.config.get_text_config()
    layers, hidden, item = text.num_hidden_layers, text.hidden_size, policy.dtype.itemsize
    token = trained_token_bytes(policy.module.config, policy.dtype)
    # The mask and what makes it; without a fused kernel, each layer's scores three times besides.
    pair = 2 * item + 4
    if getattr(text, "_attn_implementation", None) != "sdpa":
        pair += 3 * item * layers * getattr(text, "num_attention_heads", 1)
    # Of all blocks the inputs, of one at a time the rest.
    recomputed = layers * hidden * item + token // layers
    return Budget(
        Bounds(
            max_tokens=min(lent // token, MAX_TOKENS),
            max_scored=lent // scored_position_bytes(policy.vocab_size),
            max_pairs=lent // 4 // pair,
            # A block takes some 24 x hidden² operations for a column, and for a pair of columns
            # 4 x hidden, twice that with softmax and mask.
            pairs_per_token=3 * hidden,
        ),
        recomputed_tokens=min(lent // recomputed, MAX_TOKENS) if policy.can_recompute else 0,
    )
