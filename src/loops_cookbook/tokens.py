"""The exact tokens of an attempt: what the sampler was given, what it said, and how turns join.

The engine speaks ids and this module keeps them as they came; text is for people. A `Turn` is
one call of the sampler. `sequences` joins the turns of a `Trajectory` into the fewest token
rows a trainer can use: a turn whose prompt begins with everything a row already holds goes on
with that row, any other begins a new one. So each sampled token stands in exactly one row, and
prompt tokens are context in it, never trained.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
"""int32[T], token ids."""
Logprobs: TypeAlias = npt.NDArray[np.float32]
"""float32[T], natural logarithms of probabilities."""

Origin: TypeAlias = Literal["first", "extended", "rewritten", "tools", "template"]
"""Why a turn's prompt is what it is: `extended` goes on with an earlier turn's ids; the others
begin a new sequence, because it is the first, the history was rewritten, the tools differ, or
the chat template cannot be extended."""


def ids_of(values: AbstractSequence[int] | npt.NDArray[np.integer]) -> Ids:
    """A read-only int32 array of token ids."""
    ids = np.array(values, dtype=np.int32)
    ids.setflags(write=False)
    return ids


def logprobs_of(values: AbstractSequence[float] | npt.NDArray[np.floating]) -> Logprobs:
    """A read-only float32 array of log-probabilities."""
    logprobs = np.array(values, dtype=np.float32)
    logprobs.setflags(write=False)
    return logprobs


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens:
    """What one call of the sampler produced."""

    ids: Ids
    """int32[T], the sampled ids, a stop token included."""
    logprobs: Logprobs
    """float32[T], under the distribution they were drawn from."""
    stop: Literal["stop", "length"]
    """`stop`: a stop token or string ended it; `length`: the token limit did."""
    policy_version: int | None = None
    """The version that every one of these tokens was drawn from; None if the sampler cannot say."""
    logprob_sum: float = field(init=False, repr=False)
    """Of all its tokens."""

    def __post_init__(self) -> None:
        if self.ids.shape != self.logprobs.shape or self.ids.ndim != 1:
            raise ValueError(
                f"a sampler returned {self.ids.shape} ids and {self.logprobs.shape} logprobs: "
                "there must be one logprob for each sampled token"
            )
        total = float(sum(self.logprobs.tolist()))  # numpy takes thrice that for a short reply
        if not math.isfinite(total):  # no sum of finite float32 leaves a float64
            raise ValueError("a sampler returned a logprob that is not finite")
        object.__setattr__(self, "logprob_sum", total)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One call of the sampler: the prompt as it was sent, and the tokens that came back."""

    prompt_ids: Ids
    sampled: SampledTokens
    origin: Origin = "first"

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.prompt_ids), np.ndarray) or self.prompt_ids.ndim != 1:
            raise TypeError("a Turn's prompt_ids are no array of one dimension: use ids_of(...)")
        if not isinstance(cast(object, self.sampled), SampledTokens):
            raise TypeError("a Turn's sampled is no SampledTokens: keep what the sampler gave")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one attempt with the trained policy, in the order in which they ended."""

    turns: tuple[Turn, ...] = ()

    def __post_init__(self) -> None:
        for turn in self.turns:
            if not isinstance(cast(object, turn), Turn):
                raise TypeError("a Trajectory holds something else than Turns")

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled over all turns."""
        return sum(len(turn.sampled.ids) for turn in self.turns)

    @property
    def cut_turns(self) -> int:
        """How many of the turns a token limit ended."""
        return sum(turn.sampled.stop == "length" for turn in self.turns)

    def totals(self) -> "Totals":
        """What its turns add up to, in one look at each."""
        prompt = sampled = cut = 0
        logprob_sum = 0.0
        versions: set[int | None] = set()
        for turn in self.turns:
            said = turn.sampled
            tokens = len(said.ids)
            prompt += len(turn.prompt_ids)
            sampled += tokens
            cut += said.stop == "length"
            logprob_sum += said.logprob_sum
            if tokens:
                versions.add(said.policy_version)
        known = tuple(sorted(version for version in versions if version is not None))
        return Totals(prompt, sampled, cut, logprob_sum / sampled if sampled else None, known)


class Totals(NamedTuple):
    """What the turns of a trajectory add up to."""

    prompt_tokens: int
    """Sent, over all turns."""
    sampled_tokens: int
    cut_turns: int
    """Turns that a token limit ended."""
    logprob_mean: float | None
    """The mean log-probability of the sampled tokens; None where there is none."""
    policy_versions: tuple[int, ...]
    """The versions that its tokens were sampled from, ascending, as far as they are known."""


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One token row for a trainer: ids of which some were sampled."""

    ids: Ids
    """int32[N]"""
    logprobs: Logprobs
    """float32[N], the sampler's at sampled positions, 0 elsewhere."""
    is_sampled: npt.NDArray[np.bool_]
    """bool[N], True where the policy sampled the token."""

    @property
    def sampled_tokens(self) -> int:
        """How many of its tokens the policy sampled."""
        return int(self.is_sampled.sum())

    @property
    def trained_tokens(self) -> int:
        """How many of its sampled tokens a position predicts: all but one that stands first."""
        return int(np.count_nonzero(self.is_sampled[1:]))


def sequences(trajectory: Trajectory) -> tuple[Sequence, ...]:
    """Join turns into the fewest rows in which each sampled token stands exactly once.

    A turn goes on with the longest row that its prompt begins with, token for token. Turns
    without a sampled token add nothing. Rows stand in the order of their first turns' ends.
    """
    # From the shortest prompt up, so that every turn that a row may hold before another comes
    # before it. Then the longest row is never the wrong one to take: whatever could go on with
    # it later can go on with a shorter one just as well.
    said = [turn for turn in trajectory.turns if len(turn.sampled.ids)]
    if len(said) == 1:  # as most attempts have
        return (_row(said),)
    rows = _Rows()
    for turn in sorted(said, key=lambda turn: len(turn.prompt_ids)):
        rows.place(turn)
    place = {id(turn): index for index, turn in enumerate(said)}
    return tuple(map(_row, sorted(rows.rows, key=lambda turns: place[id(turns[0])])))


class _Rows:
    """Rows that are found by the length and the last ids of what they hold.

    An agent may call a model thousands of times, and each call may be a row of its own; to compare
    each prompt with each row would hold the event loop for minutes.
    """

    def __init__(self) -> None:
        self.rows: list[list[Turn]] = []
        self._lengths: list[int] = []
        """Of what rows hold, or held, ascending, each once."""
        self._ends: dict[int, dict[bytes, list[int]]] = {}
        """The places of rows by their length and their last ids."""

    def place(self, turn: Turn) -> None:
        """Go on with the longest row that the turn's prompt begins with, or begin one."""
        prompt = _bytes(turn.prompt_ids)
        index = self._taken(turn, prompt)
        if index is None:
            index = len(self.rows)
            self.rows.append([])
        self.rows[index].append(turn)
        end = _length(turn)
        if end not in self._ends:
            insort(self._lengths, end)
        last = _last(prompt + _bytes(turn.sampled.ids), end)
        insort(self._ends.setdefault(end, {}).setdefault(last, []), index)

    def _taken(self, turn: Turn, prompt: bytes) -> int | None:
        fitting = bisect_right(self._lengths, len(turn.prompt_ids))
        for length in reversed(self._lengths[:fitting]):
            like_it = self._ends[length].get(_last(prompt, length), [])
            for place, index in enumerate(like_it):
                if _goes_on_with(turn, self.rows[index][-1]):
                    return like_it.pop(place)
        return None


_WIDTH = np.dtype(np.int32).itemsize
_LAST_IDS = 64


def _bytes(ids: Ids) -> bytes:
    return ids.astype(np.int32, copy=False).tobytes()


def _last(data: bytes, end: int) -> bytes:
    """The last of so many ids."""
    return data[max(0, end - _LAST_IDS) * _WIDTH : end * _WIDTH]


def _goes_on_with(turn: Turn, earlier: Turn) -> bool:
    """Whether its prompt begins with all that an earlier turn holds."""
    ids, start, end = turn.prompt_ids, len(earlier.prompt_ids), _length(earlier)
    return len(ids) >= end and bool(
        np.array_equal(ids[:start], earlier.prompt_ids)
        and np.array_equal(ids[start:end], earlier.sampled.ids)
    )


def _length(turn: Turn) -> int:
    return len(turn.prompt_ids) + len(turn.sampled.ids)


def _row(turns: list[Turn]) -> Sequence:
    last = turns[-1]
    ids = np.concatenate([last.prompt_ids, last.sampled.ids])
    logprobs = np.zeros(len(ids), np.float32)
    is_sampled = np.zeros(len(ids), np.bool_)
    for turn in turns:
        start = len(turn.prompt_ids)
        stop = start + len(turn.sampled.ids)
        logprobs[start:stop] = turn.sampled.logprobs
        is_sampled[start:stop] = True
    for array in (ids, logprobs, is_sampled):
        array.setflags(write=False)
    return Sequence(ids=ids, logprobs=logprobs, is_sampled=is_sampled)
