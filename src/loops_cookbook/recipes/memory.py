"""What a run knows of before, and where it keeps what it would have to know."""

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from loops_cookbook.rundir.past import Past, SFTPast
from loops_cookbook.rundir.savepoints import SavePoints

PastT = TypeVar("PastT")


@dataclass(frozen=True)  # with slots, Memory[X](...) fails on Python 3.11
class Memory(Generic[PastT]):
    """The memory of one run; that of a new one which keeps nothing is empty."""

    savepoints: SavePoints | None = None
    """None: nothing is kept, and the run cannot be gone on with."""
    past: PastT | None = None
    """Of a run that goes on."""
    life: int = 0
    """How often it was gone on with."""
    start: str | None = None
    """The checkpoint whose weights a new run begins with, as its service calls it."""
    beginning: str | None = None
    """The trainer's name of the weights that a run which was killed began with, if it told one;
    None also where the run came to an end in order: it may have left something unrecorded."""

    def key(self, name: str) -> str:
        """What a call is named at its service: another name in each life, for the same call is made
        again where a checkpoint was loaded in between."""
        return _key(name, self.life)

    def past_keys(self, name: str) -> tuple[str, ...]:
        """What it may have been named in the lives before."""
        return tuple(_key(name, life) for life in range(self.life))


AnyMemory: TypeAlias = Memory[Past] | Memory[SFTPast]


def _key(name: str, life: int) -> str:
    # Services make names of it, and some take letters, digits, - and _ alone.
    return f"{name}-life{life}" if life else name
