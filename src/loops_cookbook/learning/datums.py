"""Sequences and an advantage become datums: rows of equal length that a trainer reads.

Position k of a datum predicts `target_ids[k]`, so a sequence of N tokens gives a datum of
N - 1 positions. Prompt and observation positions have advantage 0 and logprob 0: they are
context, never trained. Every stream of a datum has the same length, checked where it is made.

The trained tokens of a batch are those that the policy sampled in the attempts it trains on. An
attempt whose advantage is 0 is one of them, and so it counts in every mean; but no loss has a
gradient there, so no datum is made of it.
"""

from collections.abc import Sequence as AbstractSequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from loops_cookbook.tokens import Ids, Logprobs, Sequence
from loops_cookbook.values import value

Aggregation: TypeAlias = Literal["sum", "token_mean", "attempt_mean"]
"""How a batch's token losses become one number; see `aggregate`."""


@value(eq=False)
class Datum:
    """One row for the trainer. RL rows carry logprobs and advantages, supervised rows weights."""

    input_ids: Ids
    """int32[L]"""
    target_ids: Ids
    """int32[L], the token that each position predicts."""
    logprobs: Logprobs | None = None
    """float32[L], the sampler's, 0 where nothing was sampled."""
    advantages: npt.NDArray[np.float32] | None = None
    """float32[L], 0 where nothing is trained."""
    weights: npt.NDArray[np.float32] | None = None
    """float32[L], for cross_entropy only."""

    def __post_init__(self) -> None:
        shape = self.input_ids.shape
        for name in ("target_ids", "logprobs", "advantages", "weights"):
            stream = getattr(self, name)
            if stream is not None and stream.shape != shape:
                raise ValueError(
                    f"a datum's {name} has shape {stream.shape}, its input_ids "
                    f"{shape}: every stream has one length"
                )

    @property
    def trained_tokens(self) -> int:
        """Positions that move the policy."""
        stream = self.advantages if self.weights is None else self.weights
        return 0 if stream is None else int(np.count_nonzero(stream))


class ScoredAttempt(NamedTuple):
    """The rows of one attempt and the advantage that all their sampled tokens share."""

    sequences: tuple[Sequence, ...]
    advantage: float

    @property
    def trained_tokens(self) -> int:
        """Tokens that a position can predict and the policy sampled, over all its rows."""
        return sum(sequence.trained_tokens for sequence in self.sequences)


def datums(
    attempts: AbstractSequence[ScoredAttempt], aggregation: Aggregation = "sum"
) -> tuple[Datum, ...]:
    """Turn a batch's attempts into datums whose summed loss is the aggregated loss.

    `sum` leaves advantages as they are. `token_mean` divides them by the batch's trained
    tokens. `attempt_mean` divides each attempt's by its own trained tokens, then by the number
    of attempts; so an attempt weighs the same whether its turns merged into one row or not.

    Returns:
        One for each sequence of the attempts with an advantage other than 0, in their order.

    Raises:
        ValueError: a row has no sampled token to train.
    """
    counts = [[sequence.trained_tokens for sequence in each.sequences] for each in attempts]
    if any(count == 0 for of_attempt in counts for count in of_attempt):
        raise ValueError("a sequence without a sampled token after its first has nothing to train")
    own = [sum(of_attempt) for of_attempt in counts]
    total = sum(own)
    made: list[Datum] = []
    for attempt, tokens in zip(attempts, own, strict=True):
        if attempt.advantage == 0:
            continue
        divisor = {"sum": 1, "token_mean": total, "attempt_mean": tokens * len(attempts)}
        scaled = attempt.advantage / divisor[aggregation]
        made.extend(_datum(sequence, scaled) for sequence in attempt.sequences)
    return tuple(made)


def supervised(sequence: Sequence) -> Datum:
    """A demonstrated sequence as a datum of weight 1 where the model would have sampled.

    Raises:
        ValueError: there is nothing to train.
    """
    if sequence.trained_tokens == 0:
        raise ValueError("a sequence without a sampled token after its first has nothing to train")
    return Datum(
        input_ids=sequence.ids[:-1],
        target_ids=sequence.ids[1:],
        weights=sequence.is_sampled[1:].astype(np.float32),
    )


def _datum(sequence: Sequence, advantage: float) -> Datum:
    advantages = np.zeros(len(sequence.ids) - 1, np.float32)
    advantages[sequence.is_sampled[1:]] = advantage
    return Datum(
        input_ids=sequence.ids[:-1],
        target_ids=sequence.ids[1:],
        logprobs=sequence.logprobs[1:],
        advantages=advantages,
    )
