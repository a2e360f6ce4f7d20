"""The gate: when a group may start, so that no attempt is too old when it is trained.

A group is live from its start until its batch is published or it is rejected. Groups are trained
in the order they started, `groups_per_update` at a time, so with fewer than
`(max_staleness + 1) * groups_per_update` live groups at its start, at most `max_staleness`
updates lie between a group's start and its training. 0 is sync mode: each batch was sampled by
the very policy that it trains.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gate:
    """When groups may start."""

    groups_per_update: int
    max_staleness: int = 0
    """In updates."""
    updates: int | None = None
    """How many the run makes: groups that no update could use are not started. None: no end."""

    def may_start(self, *, started: int, rejected: int, published: int) -> bool:
        """Whether one more group may start.

        Args:
            started: groups started so far.
            rejected: those of them that were rejected.
            published: those of them whose update is published.
        """
        live = started - rejected - published
        has_room = live < (self.max_staleness + 1) * self.groups_per_update
        return has_room and (self._wanted is None or started - rejected < self._wanted)

    def is_done(self, *, published: int) -> bool:
        """Whether all updates are published, so that no group will ever start again."""
        return self._wanted is not None and published >= self._wanted

    @property
    def _wanted(self) -> int | None:
        return None if self.updates is None else self.updates * self.groups_per_update
