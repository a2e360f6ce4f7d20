"""Which task a group works at, and every seed: pure functions of numbers, the same everywhere.

Group serials count the tasks as they are drawn: the first `count` serials are epoch 0, the next
`count` epoch 1. Each epoch draws every task once, in an order of its own. All randomness is a hash
of a name and some numbers, so it does not depend on a process, on a version of Python or numpy,
or on what ran before; a group that is sampled anew works at the same task with the same seeds.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

from loops_cookbook.values import value

SEEDS = 2**31
"""Seeds are below this: non-negative, and an int32 to whoever takes them."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A group that may be started."""

    serial: int
    epoch: int
    index: int
    """Its task's place among the tasks."""


def draw(
    tasks: int,
    seed: int,
    *,
    epochs: int | None = None,
    shuffle: bool = True,
    first: int = 0,
    again: Iterable[int] = (),
) -> Iterator[Drawn]:
    """Draw tasks without replacement, epoch after epoch.

    Args:
        tasks: how many there are.
        seed: of the order.
        epochs: how often to go through them; None: without an end.
        shuffle: False: in the order of the file, in every epoch.
        first: the serial to begin with.
        again: serials to draw before it, which were drawn by another process.
    """
    if tasks < 1:
        return
    for serial in again:
        yield next(draw(tasks, seed, epochs=epochs, shuffle=shuffle, first=serial))
    start, position = divmod(first, tasks)
    serial = first
    for epoch in count(start) if epochs is None else range(start, epochs):
        order = task_order(tasks, seed, epoch) if shuffle else tuple(range(tasks))
        for index in order[position:]:
            yield Drawn(serial, epoch, index)
            serial += 1
        position = 0


def task_order(tasks: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order in which an epoch draws its tasks: a permutation of their indices."""
    return tuple(sorted(range(tasks), key=lambda index: _hash("order", seed, epoch, index)))


@value
class CallSeeds:
    """The seeds of one try's model calls: `seeds(i)` is that of call `i`, from 0.

    Calls of training and of each evaluation set draw from streams of their own.
    """

    seed: int
    """Of the run."""
    purpose: str
    group: int
    attempt: int
    trial: int

    def __call__(self, call: int) -> int:
        """A number from 0 to 2**31 - 1."""
        return _hash(self.purpose, self.seed, self.group, self.attempt, self.trial, call) % SEEDS


def _hash(name: str, *numbers: int) -> int:
    text = f"{' '.join(map(str, numbers))} {name}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
