"""Whether a model computes packed rows as it computes padded ones: tried on its present weights.

Packing stands on each layer's honouring the mask and the positions. Layers with a window, with
linear attention or with a state of their own do not, and not every config says so. So a few
made-up rows that share beginnings are computed both ways, the longest beginning longer than any
window that the config names and a row could outgrow. Packing is on where

- logprobs differ by at most 1e-4. In half precision that is less than rounding, so there they may
  differ by `HALF_NOISE` times as much as the same padded rows do when each is computed alone;
- the same lines without branches, in which rows do see one another, differ by far more: a
  hundred times as much (in half precision ten times), and 1e-3 at least. What could not tell
  proves nothing.

Everywhere else it is off and rows are padded: also where computing fails, in whatever way, where
a window is too long to be tried, and where the model has too few positions for it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig

from loops_cookbook.local.model import Policy
from loops_cookbook.local.pack import Bounds, pack
from loops_cookbook.local.pad import Branches, Flat, MicroBatch, flatten, micro_batches
from loops_cookbook.local.requests import Row
from loops_cookbook.local.score import score

TOLERANCE = 1e-4
HALF_NOISE = 4
"""A tree mask and the absence of one are served by different kernels, which is a little noise
more than that of shapes alone."""
PLAIN_BEGINNING = 16
MOST_BEGINNING = 1024
"""Tokens of the longest beginning that is tried: more take too long on a CPU."""

_TAIL = 8
"""Tokens that the longest row has behind the longest beginning, and that this is longer than a
window."""
_BOUNDLESS = 2**31


@dataclass(frozen=True, slots=True)
class Packing:
    """Whether rows are packed, and why."""

    is_on: bool
    reason: str

    def __str__(self) -> str:
        return f"on ({self.reason})" if self.is_on else f"off: {self.reason}"


@dataclass(frozen=True, slots=True)
class Differences:
    """How far logprobs are, at most, from those of rows that are padded together."""

    packed: float
    alone: float
    """Of padded rows that are computed one by one; 0 in full precision, where nobody asks."""
    leaking: float
    """Of packed rows that see one another."""


def probe(policy: Policy) -> Packing:
    """Find out whether this policy's rows may be packed."""
    windows = [window for window in _windows(policy.module.config) if window < policy.max_seq_len]
    beginning = max([PLAIN_BEGINNING, *(window + _TAIL for window in windows)])
    if beginning > MOST_BEGINNING:
        return Packing(False, f"rows may outgrow a window of {max(windows)}, too long to try")
    if policy.max_positions is not None and beginning + _TAIL > policy.max_positions:
        return Packing(False, f"{policy.max_positions} positions are too few to try")
    try:
        found = compare(policy, _rows(beginning, policy.vocab_size))
    except Exception as error:  # a model's own code may refuse a mask in any way
        told = str(error).strip().split("\n")[0]
        return Packing(False, f"this model takes no mask of its own ({told})")
    return judge(found, is_half=_is_half(policy))


@torch.no_grad()
def compare(policy: Policy, flat: Flat) -> Differences:
    """Compute some rows in each way."""
    together = micro_batches(flat, max_tokens=_BOUNDLESS, max_scored=_BOUNDLESS)
    packed = list(pack(flat, Bounds(_BOUNDLESS, _BOUNDLESS, _BOUNDLESS, _BOUNDLESS)))
    expected = _logprobs(policy, flat, together)

    def difference(batches: Iterable[MicroBatch]) -> float:
        return float(np.abs(_logprobs(policy, flat, batches) - expected).max())

    alone = micro_batches(flat, max_tokens=1, max_scored=1)
    return Differences(
        packed=difference(packed),
        alone=difference(alone) if _is_half(policy) else 0.0,
        leaking=difference(map(_leaking, packed)),
    )


def judge(found: Differences, *, is_half: bool) -> Packing:
    """The rule above."""
    allowed = max(TOLERANCE, HALF_NOISE * found.alone) if is_half else TOLERANCE
    # Written so that what is not a number is never allowed.
    if not found.packed <= allowed:
        return Packing(
            False, f"packed logprobs differ by up to {found.packed:.1e}, allowed are {allowed:.1e}"
        )
    if not max(found.packed * (10 if is_half else 100), 10 * TOLERANCE) <= found.leaking:
        return Packing(
            False, f"rows that see one another differ by {found.leaking:.1e} only, so nothing shows"
        )
    return Packing(True, f"largest difference {found.packed:.1e}")


def _is_half(policy: Policy) -> bool:
    return policy.dtype.itemsize < 4


def _windows(config: PreTrainedConfig) -> Iterator[int]:
    """Whatever may be the length of a window; a number that isn't one does no harm."""
    for name, value in config.get_text_config().to_dict().items():
        if ("window" in name or "chunk" in name) and isinstance(value, int) and value > 0:
            yield value


def _rows(beginning: int, vocab_size: int) -> Flat:
    """Branches of a branch, rows of several lengths, and two small trees that share a line."""
    random = np.random.default_rng(0)

    def draw(count: int) -> npt.NDArray[np.int32]:
        return random.integers(0, vocab_size, count, np.int32)

    stem = draw(beginning)
    branch = np.append(stem, draw(3))
    small, smaller = draw(5), draw(4)
    tails = ((stem, 6), (branch, 3), (branch, _TAIL - 3), (stem, 2))
    tails += ((small, 3), (small, 2), (smaller, 3), (smaller, 1))
    rows = [Row(np.append(shared, draw(own))) for shared, own in tails]
    return flatten(rows, is_supervised=True, every_target=True)


def _logprobs(policy: Policy, flat: Flat, batches: Iterable[MicroBatch]) -> npt.NDArray[np.float32]:
    logprobs_TK = np.zeros(flat.targets_TK.shape, np.float32)
    for batch in batches:
        logprobs_TK[batch.places] = score(policy, batch, flat).cpu().numpy()
    return logprobs_TK


def _leaking(batch: MicroBatch) -> MicroBatch:
    """The same columns at the same positions, but each sees all that stand before it."""
    assert batch.branches is not None
    everywhere = np.full_like(batch.branches.ends, batch.ids.shape[1])
    return replace(batch, branches=Branches(batch.branches.positions, everywhere))
