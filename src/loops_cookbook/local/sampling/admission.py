"""Which jobs may begin: first come, first served, as far as memory goes.

A job begins part by part, at most `SHARING` completions at a time, and nothing behind it begins
before it has begun whole. What a part may come to need is reserved for it when it begins, so
nothing that is under way ever has to make room. A job that is to be alone begins when nothing
else is under way, and nothing else begins before it has ended. Decides only; computes nothing.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from loops_cookbook.local.requests import Weights
from loops_cookbook.local.sampling.drafts import Draft
from loops_cookbook.local.sampling.draw import UniformNoise
from loops_cookbook.local.sampling.reader import MOST_TOKENS, Prompt
from loops_cookbook.local.sampling.room import Room
from loops_cookbook.local.sampling.rows import SHARING
from loops_cookbook.local.sampling.tickets import Ticket


@dataclass(slots=True, eq=False)
class Part:
    """Completions of a job that begin together."""

    ticket: Ticket
    drafts: list[Draft]

    @property
    def going(self) -> int:
        """How many have not ended."""
        return sum(draft.is_going for draft in self.drafts)


class Admission:
    """Jobs that are waiting and parts that are under way.

    Args:
        room: memory for all parts together.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._noise = UniformNoise()
        self._waiting: deque[Ticket] = deque()
        self._parts: list[Part] = []

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._waiting or self._parts)

    def has(self, weights: Weights) -> bool:
        """Whether a job with some weights is waiting or under way."""
        tickets = [*self._waiting, *(part.ticket for part in self._parts)]
        return any(ticket.job.weights == weights for ticket in tickets)

    def add(self, ticket: Ticket) -> None:
        """Queue a job."""
        self._waiting.append(ticket)

    def admit(self) -> list[Part]:
        """Let begin what may, in order."""
        begun: list[Part] = []
        prompts: set[Prompt] = set()
        used = sum(self._reserved(part) for part in self._parts) if self._waiting else 0
        while self._waiting:
            ticket = self._waiting[0]
            if ticket.waiting:
                count = min(ticket.waiting, SHARING, self._room.fitting(ticket))
                used += self._room.needed(ticket, count)
                prompts.add(ticket.prompt)
                # What nothing stands in the way of begins, whatever it needs.
                if (self._parts or begun) and (
                    used > self._room.rows
                    or (begun and sum(map(len, prompts)) > MOST_TOKENS)
                    or self._must_wait(ticket, [*self._parts, *begun])
                ):
                    break
                begun.append(Part(ticket, ticket.begin(count, self._noise)))
            if not ticket.waiting:
                self._waiting.popleft()
        self._parts += begun
        return begun

    def settle(self) -> list[Ticket]:
        """Forget parts that have ended; the jobs that have ended with them, unless left."""
        tickets = dict.fromkeys(part.ticket for part in self._parts)
        self._parts = [part for part in self._parts if part.going]
        return [ticket for ticket in tickets if ticket.is_ended and not ticket.is_left]

    def fail(self, draft: Draft, fault: Exception) -> None:
        """End the job of a draft with a fault."""
        next(part.ticket for part in self._parts if draft in part.drafts).fail(fault)

    def begin_again(self, weights: Weights, fault: Exception) -> list[Ticket]:
        """Let what is under way with some weights begin again, alone; which jobs these are.

        One that was alone already ends with the fault.
        """
        tickets = dict.fromkeys(
            part.ticket
            for part in self._parts
            if part.ticket.job.weights == weights and not part.ticket.is_ended
        )
        again = [ticket for ticket in tickets if not ticket.is_alone]
        for ticket in tickets:
            if ticket.is_alone:
                ticket.fail(fault)
        for ticket in reversed(again):
            ticket.begin_again()
            if ticket not in self._waiting:
                self._waiting.appendleft(ticket)
        return again

    def _reserved(self, part: Part) -> int:
        return self._room.needed(part.ticket, part.going) if part.going else 0

    def _must_wait(self, ticket: Ticket, parts: Sequence[Part]) -> bool:
        others = [part.ticket for part in parts if part.ticket is not ticket]
        return bool(others) and (ticket.is_alone or any(other.is_alone for other in others))
