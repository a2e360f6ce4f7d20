"""What is known of a policy before its service is opened: what it will load, what may live on.

A trainer on another machine may have lived on while its run was killed. What it then has is told by
the keys of its updates: of the last that has a row here, and of the one that may have been sent
after it. A run that came to its end in order may have left a batch there that its records forgot,
so of that nothing is taken up again.
"""

from dataclasses import dataclass

from loops_cookbook.recipes.memory import AnyMemory
from loops_cookbook.records import Recorder
from loops_cookbook.rundir.past import Past
from loops_cookbook.services.base import Held, Left, Service, Surviving


@dataclass(frozen=True, slots=True)
class Before:
    """What is known beforehand."""

    loads: str | None = None
    """The checkpoint that is loaded unless the trainer lived on, as its service calls it."""
    left: Left | None = None
    """What the trainer has if it did; None: nothing that could be shown."""
    updates: int | None = None
    """Updates that the policy has when it is published first; None: it has its first weights, and
    nothing is loaded or applied before."""


NOTHING = Before()
"""Of a policy that is its model's own."""


def before(memory: AnyMemory) -> Before:
    """What a run's memory tells."""
    past = memory.past
    if isinstance(past, Past):
        path = None if past.checkpoint is None else past.checkpoint.path
        return Before(path or memory.start, _left_by_rl(memory, past), past.update)
    if past is not None:
        path = past.checkpoints[-1].path if past.checkpoints else None
        left = _left(memory, past.recorded, past.recorded + 1)
        return Before(path or memory.start, left, past.recorded)
    return Before(memory.start, updates=None if memory.start is None else 0)


def held_by(service: Service, recorder: Recorder) -> Held | None:
    """What the trainer still has, once its service is open; None: it has to be loaded."""
    held = service.held if isinstance(service, Surviving) else None
    if held is not None:
        recorder.note("info", "the trainer lived on, with all of it: nothing is loaded")
    return held


def _left_by_rl(memory: AnyMemory, past: Past) -> Left | None:
    last = past.kept[-1] if past.kept else past.recorded
    if last <= past.recorded:
        return _left(memory, past.recorded, None)
    # More than one without a row: rows were lost, so which the trainer confirmed is not known.
    return _left(memory, past.recorded, last) if last == past.recorded + 1 else None


def _left(memory: AnyMemory, recorded: int, sent: int | None) -> Left | None:
    if memory.beginning is None or (recorded == 0 and memory.start is not None):
        return None  # before its first update it may not have loaded what it begins with
    return Left(
        memory.beginning,
        confirmed=memory.past_keys(f"update-{recorded}") if recorded else (),
        sent=() if sent is None else memory.past_keys(f"update-{sent}"),
    )
