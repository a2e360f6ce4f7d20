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

CACHED_VALUES = 2**18
"""Logits that are worked on at a time on a CPU: a megabyte, which stays in its cache."""


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

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are left out of a draw."""
        return (self.top_p < 1.0 or self.top_k > 0) and self.temperature > 0


class Draws:
    """How the rows of a batch are drawn, for as long as they are the batch.

    Args:
        settings: one for each row.
        device: where the logits are.
    """

    def __init__(self, settings: Sequence[RowSettings], device: torch.device) -> None:
        temperature = torch.tensor([row.temperature for row in settings], device=device)
        self._is_greedy = temperature == 0
        self._temperature = torch.where(self._is_greedy, 1.0, temperature)[:, None]
        self._settings = settings
        # Which of the rarer settings occur is seen once, so that a draw does nothing in vain.
        self._any_greedy = any(row.temperature == 0 for row in settings)
        self._is_tempered = any(row.temperature not in (0, 1) for row in settings)

    def draw(
        self,
        logits: torch.Tensor,
        uniforms: npt.NDArray[np.float32],
        lines: Sequence[int] | None = None,
    ) -> tuple[list[int], list[float]]:
        """A token and its logprob for each of B rows.

        Args:
            logits: float32[N, V]
            uniforms: float32[B]
            lines: which of the N each row is drawn from; None: N is B, in order.
        """
        numbers = torch.from_numpy(uniforms).to(logits.device)
        chosen = None if lines is None else torch.tensor(lines, device=logits.device)
        rows = len(uniforms)
        step = rows
        if logits.device.type == "cpu":
            step = max(1, CACHED_VALUES // logits.shape[-1])
        tokens = torch.empty(rows, dtype=torch.long, device=logits.device)
        logprobs = torch.empty(rows, device=logits.device)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            some = logits[part] if chosen is None else logits.index_select(0, chosen[part])
            tokens[part], logprobs[part] = self._draw(some, numbers[part], part)
        return tokens.tolist(), logprobs.tolist()

    def _draw(
        self, logits: torch.Tensor, uniforms: torch.Tensor, part: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64[B] and their logprobs float32[B]."""
        logprobs = torch.log_softmax(
            logits / self._temperature[part] if self._is_tempered else logits, dim=-1
        )
        probabilities = logprobs.exp()
        settings = self._settings[part]
        truncated = [row for row, its in enumerate(settings) if its.is_truncated]
        if truncated:
            probabilities[truncated] = truncate(
                probabilities[truncated],
                torch.tensor([settings[row].top_k for row in truncated], device=logits.device),
                torch.tensor([settings[row].top_p for row in truncated], device=logits.device),
            )
        tokens = invert(probabilities, uniforms)
        if self._any_greedy:
            tokens = torch.where(self._is_greedy[part], logits.argmax(-1), tokens)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


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
