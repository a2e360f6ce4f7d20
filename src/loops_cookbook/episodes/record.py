"""What one try has sampled and said so far; it grows by whole calls."""

from loops_cookbook.attempts import Call
from loops_cookbook.runtimes.base import Place
from loops_cookbook.tokens import Turn


class TryRecord:
    """What one try has sampled and said so far; it grows by whole calls."""

    def __init__(self, place: Place, max_seq_len: int) -> None:
        self.place = place
        self.max_seq_len = max_seq_len
        self.turns: list[Turn] = []
        self.calls: list[Call] = []
        self.context_full = False
        self._started = 0
        self._sampled = 0
        self._promised = 0

    def next_seed(self) -> int:
        """The seed of the call that starts now."""
        self._started += 1
        return self.place.call_seed(self._started - 1)

    def tokens_left(self, wanted: int) -> int:
        """How many of the wanted tokens the attempt's limit still allows; calls at once share."""
        limit = self.place.max_attempt_tokens
        return wanted if limit is None else min(wanted, limit - self._sampled - self._promised)

    def promise(self, tokens: int) -> None:
        """Keep these tokens of the attempt's limit for one call, until it is over."""
        self._promised += tokens

    def end_promise(self, tokens: int) -> None:
        """The call is over."""
        self._promised -= tokens

    def add(self, turn: Turn) -> int:
        """Record what was sampled; its index among the turns."""
        self._sampled += len(turn.sampled.ids)
        self.turns.append(turn)
        return len(self.turns) - 1
