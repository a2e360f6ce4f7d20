"""Which of some texts stand among others too, or nearly: what a held-out set must not do.

Texts are compared whatever their case, spacing and the spelling of their characters (NFKC). Two
are the same where all words and marks are; nearly the same where the sets of their runs of five
words share at least 0.8 of what they hold together (Jaccard). One changed
word spoils up to five runs, so a short text is near only where it is the same; a longer one may
differ in a word in fifty.

The comparison is exact, and touches only pairs that share one of their rarest runs: two sets
that share 0.8 cannot miss each other in both of their rarest fifths.

Source: the measure and its threshold: Lee et al. 2022, "Deduplicating training data makes
language models better" (arXiv:2107.06499), section 4.2, without its hashing. The prefix filter:
Bayardo, Ma and Srikant 2007, "Scaling up all pairs similarity search", section 4.
"""

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

RUN = 5
NEAR = 0.8

Words: TypeAlias = tuple[str, ...]
_WORD = re.compile(r"\w+|[^\w\s]")
_MARK = re.compile(r"\W")


@dataclass(frozen=True, slots=True)
class Shared:
    """A text that stands among the others."""

    place: int
    other: int
    """Where among the others; the first of several."""
    kind: Literal["same", "near"]


def shared(texts: Sequence[str], others: Sequence[str]) -> list[Shared]:
    """Those of `texts` that are among `others`, the same or nearly, in order."""
    theirs = [words(text) for text in others]
    first: dict[Words, int] = {}
    for place, their in enumerate(theirs):
        first.setdefault(their, place)
    index = _Index(first)
    found: list[Shared] = []
    for place, text in enumerate(texts):
        own = words(text)
        if own in first:
            found.append(Shared(place, first[own], "same"))
        elif (near := index.near(own)) is not None:
            found.append(Shared(place, near, "near"))
    return found


def words(text: str) -> Words:
    """The words and marks of a text, as they are compared."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def runs(text: Words) -> frozenset[Words]:
    """Every five words in a row, marks left out; none of a shorter text."""
    alone = tuple(word for word in text if _MARK.fullmatch(word) is None)
    return frozenset(alone[i : i + RUN] for i in range(len(alone) - RUN + 1))


class _Index:
    """Texts by the rarest of their runs."""

    def __init__(self, places: dict[Words, int]) -> None:
        self._places = list(places.values())
        self._runs = [runs(text) for text in places]
        self._frequency = Counter(run for some in self._runs for run in some)
        self._holders: dict[Words, list[int]] = defaultdict(list)
        for number, some in enumerate(self._runs):
            for run in self._rarest(some):
                self._holders[run].append(number)

    def near(self, text: Words) -> int | None:
        """The place of the first text that is near, None without one."""
        own = runs(text)
        candidates = {n for run in self._rarest(own) for n in self._holders.get(run, ())}
        for number in sorted(candidates):
            theirs = self._runs[number]
            common = len(own & theirs)
            if common >= NEAR * (len(own) + len(theirs) - common):
                return self._places[number]
        return None

    def _rarest(self, some: frozenset[Words]) -> list[Words]:
        """So many that a set which shares `NEAR` with this one holds at least one of them."""
        if not some:
            return []
        ordered = sorted(some, key=lambda run: (self._frequency[run], run))
        return ordered[: len(some) - math.ceil(NEAR * len(some)) + 1]
