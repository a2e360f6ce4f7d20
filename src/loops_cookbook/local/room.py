"""How much memory sampling may take, and what rows take of it.

Half of what the device can lend is for rows under way and half for texts that are held for later,
where any are; else the rows have it all. Rough upper bounds: they keep sampling from exhausting
memory, and nothing that is computed depends on them.
"""

from dataclasses import dataclass

from loops_cookbook.local.memory import (
    cached_token_bytes,
    lendable_bytes,
    scored_position_bytes,
)
from loops_cookbook.local.model import Policy
from loops_cookbook.local.tickets import Ticket


@dataclass(frozen=True, slots=True)
class Room:
    """In bytes, but for `held_tokens`."""

    rows: int
    """For all rows under way."""
    token: int
    """One token of a row."""
    row: int
    """One row besides, whatever its length."""
    is_shared: bool
    """Whether rows that begin together share their prompt."""
    held_tokens: int
    """How many tokens may be held for later."""

    def needed(self, ticket: Ticket, count: int) -> int:
        """What so many completions of a job may come to take."""
        prompt = len(ticket.prompt) * self.token
        row = ticket.limit * self.token + self.row
        return prompt + count * row if self.is_shared else count * (prompt + row)

    def fitting(self, ticket: Ticket) -> int:
        """How many completions of a job fit when there are no others; 1 at least."""
        first, second = self.needed(ticket, 1), self.needed(ticket, 2)
        return 1 + max(0, self.rows - first) // (second - first)

    @property
    def most_tokens(self) -> int:
        """Of a single prompt with its completion."""
        return (self.rows - self.row) // self.token

    @property
    def most_scored(self) -> int:
        """Tokens whose logits fit, when there are no rows."""
        return self.rows // self.row


def room_for(
    policy: Policy, *, is_shared: bool, holds: bool, lent_bytes: int | None = None
) -> Room:
    """What sampling from a policy may take.

    Args:
        policy: that is sampled.
        is_shared: whether rows that begin together share their prompt.
        holds: whether texts are held for later.
        lent_bytes: for all of it; None: what the device can lend now.
    """
    lent = lent_bytes or lendable_bytes(policy.device)
    token = cached_token_bytes(policy.module.config, policy.dtype)
    rows = lent // 2 if holds else lent
    row = scored_position_bytes(policy.vocab_size)
    return Room(rows, token, row, is_shared, (lent - rows) // token)
