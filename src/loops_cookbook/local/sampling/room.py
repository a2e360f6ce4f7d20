"""How much memory sampling may take, and what rows take of it.

Half of what the device can lend is for rows under way and half for texts that are held for later,
where any are; else the rows have it all. Rough upper bounds: they keep sampling from exhausting
memory, and nothing that is computed depends on them.

Rows that stand side by side are padded, so lengths are rounded up to the next of a few: that of a
row, and that of a prompt that rows share. What is padded is less than what is there.
"""

from dataclasses import dataclass

from loops_cookbook.local.memory import (
    cached_token_bytes,
    lendable_bytes,
    scored_position_bytes,
)
from loops_cookbook.local.model import Policy
from loops_cookbook.local.sampling.tickets import Ticket

SMALLEST_ROW = 8
SMALLEST_STEM = 64


def columns_of(tokens: int) -> int:
    """What a row of so many tokens is padded to, at most."""
    return max(SMALLEST_ROW, 1 << (tokens - 1).bit_length())


def stem_columns_of(tokens: int) -> int:
    """What a shared prompt of so many tokens is padded to, at most."""
    return max(SMALLEST_STEM, columns_of(tokens))


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
        prompt, limit = len(ticket.prompt), ticket.limit
        if not self.is_shared:
            return count * ((prompt + limit) * self.token + self.row)
        if count == 1:  # it holds its prompt itself
            return columns_of(prompt + limit) * self.token + self.row
        stem, row = stem_columns_of(prompt), columns_of(limit)
        return stem * self.token + count * (row * self.token + self.row)

    def fitting(self, ticket: Ticket) -> int:
        """How many completions of a job fit when there are no others; 1 at least."""
        two, three = self.needed(ticket, 2), self.needed(ticket, 3)
        return 1 if self.rows < two else 2 + (self.rows - two) // (three - two)

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
