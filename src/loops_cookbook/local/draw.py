"""Drawing one token for each row of a batch, every row with its own settings.

Temperature first, then top_k, then top_p of what top_k left. The logprob that is recorded is of
the whole distribution after temperature: it is what the trainer can compute again, and truncation
isn't undone by it. A greedy row (temperature 0) records the logprob at temperature 1.

A draw turns one uniform number into a token by the inverse of the cumulative distribution. The
numbers of a row are a pure function of (seed, place of the completion in its job), so no row
depends on who shares its batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


class UniformNoise:
    """Uniform numbers by seed and place: numpy's Philox, keyed by the pair.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)
        self._state = self._philox.state

    def draw(self, seed: int, place: int, count: int) -> npt.NDArray[np.float32]:
        """float32[count] in [0, 1), the same whenever seed and place are."""
        # Setting the state is an order of magnitude cheaper than a new generator.
        inner = self._state["state"]
        inner["key"][:] = (seed % 2**64, place)
        inner["counter"][:] = 0
        self._philox.state = self._state
        return self._generator.random(count, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How one row is drawn."""

    temperature: float
    top_p: float
    top_k: int


class Draws:
    """The settings and the noise of a batch.

    Args:
        settings: one for each row.
        uniforms: float32[B, S], one number for each row and step.
        device: where the logits are.
    """

    def __init__(
        self,
        settings: Sequence[RowSettings],
        uniforms: npt.NDArray[np.float32],
        device: torch.device,
    ) -> None:
        temperature = torch.tensor([row.temperature for row in settings], device=device)
        self._is_greedy = temperature == 0
        self._temperature = torch.where(self._is_greedy, 1.0, temperature)[:, None]
        self._top_p = torch.tensor([row.top_p for row in settings], device=device)
        self._top_k = torch.tensor([row.top_k for row in settings], device=device)
        self._uniforms = torch.from_numpy(uniforms).to(device)
        self._look()

    def draw(self, logits: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64[B] and their logprobs float32[B], from logits float32[B, V]."""
        logprobs = torch.log_softmax(
            logits / self._temperature if self._is_tempered else logits, dim=-1
        )
        probabilities = logprobs.exp()
        if len(self._truncated):
            rows = self._truncated
            probabilities[rows] = truncate(
                probabilities[rows], self._top_k[rows], self._top_p[rows]
            )
        tokens = invert(probabilities, self._uniforms[:, step])
        if self._any_greedy:
            tokens = torch.where(self._is_greedy, logits.argmax(-1), tokens)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

    def keep(self, rows: torch.Tensor) -> None:
        """Let these rows be the batch, in this order."""
        self._is_greedy = self._is_greedy[rows]
        self._temperature = self._temperature[rows]
        self._top_p = self._top_p[rows]
        self._top_k = self._top_k[rows]
        self._uniforms = self._uniforms[rows]
        self._look()

    def _look(self) -> None:
        """See once which of the rarer settings occur, so that a draw does nothing in vain."""
        self._any_greedy = bool(self._is_greedy.any())
        self._is_tempered = bool((self._temperature != 1.0).any())
        is_truncated = ((self._top_p < 1.0) | (self._top_k > 0)) & ~self._is_greedy
        self._truncated = is_truncated.nonzero()[:, 0]


def invert(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The tokens at which the cumulative distributions pass these numbers, int64[B].

    A token of probability 0 is never drawn. Where the probabilities are NaN it is some token, whose
    logprob tells.
    """
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1]
    # Rounding may lift the product to the total itself, which nothing exceeds.
    below_total = torch.nextafter(total, torch.zeros_like(total))
    sought = torch.minimum(uniforms * total, below_total)
    tokens = torch.searchsorted(cumulative, sought[:, None], right=True)[:, 0]
    return tokens.clamp(max=probabilities.shape[-1] - 1)


def truncate(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set to 0 what top_k and then top_p leave out, float32[B, V]; the rest isn't rescaled.

    top_p keeps the fewest likeliest tokens whose share of what top_k left is at least top_p.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)[None]
    ordered = ordered.where((rank < top_k[:, None]) | (top_k[:, None] == 0), 0.0)
    cumulative = ordered.cumsum(-1)
    is_kept = (cumulative - ordered < top_p[:, None] * cumulative[:, -1:]) | (top_p[:, None] >= 1)
    return torch.zeros_like(ordered).scatter(-1, order, ordered.where(is_kept, 0.0))
