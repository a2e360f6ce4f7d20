"""Attempts and groups as the rules of learning see them."""

from collections.abc import Sequence as AbstractSequence

from loops_cookbook.attempts import Attempt, Discarded, Fate, Group
from loops_cookbook.tokens import SampledTokens, Sequence, Trajectory, Turn, ids_of, logprobs_of
from loops_cookbook.tokens import sequences as join


def row(prompt: int = 2, sampled: int = 3) -> Sequence:
    """One sequence: a prompt, then sampled tokens."""
    tokens = SampledTokens(ids_of(range(10, 10 + sampled)), logprobs_of([-0.5] * sampled), "stop")
    (made,) = join(Trajectory((Turn(ids_of(range(prompt)), tokens),)))
    return made


def attempt(index: int, reward: float | None, rows: AbstractSequence[Sequence] | None = None):
    """One attempt; without a reward it failed."""
    return Attempt(
        group=0,
        index=index,
        task="a task",
        reward=reward,
        discarded=Discarded(Fate.FAILED) if reward is None else None,
        sequences=(row(),) if rows is None else tuple(rows),
    )


def group(*rewards: float | None, serial: int = 0) -> Group:
    """A group of these rewards; None for an attempt that failed."""
    return Group(
        serial=serial,
        task=f"task-{serial}",
        task_index=serial,
        source=f"tasks.jsonl:{serial}",
        epoch=0,
        policy_version=0,
        attempts=tuple(attempt(index, reward) for index, reward in enumerate(rewards)),
    )
