"""The nouns of a rollout keep their promises."""

import dataclasses

import pytest

from loops_cookbook.attempts import Attempt, Discarded, Fate, Flags, Group, Rejection, Timing


def attempt(index: int, reward: float | None) -> Attempt:
    why = Discarded(Fate.UNGRADED, "grade raised") if reward is None else None
    return Attempt(group=0, index=index, task="sum", reward=reward, discarded=why)


@pytest.mark.parametrize(
    ("fate", "kind", "reason"),
    [
        (Fate.NO_REPLY, "discarded", "no_reply"),
        (Fate.NO_VARIANCE, "unused", "no_variance"),
        (Fate.TRAINED, "trained", "trained"),
        (Fate.EVALUATED, "evaluated", "evaluated"),
    ],
)
def test_a_fate_has_a_kind_and_a_reason(fate: Fate, kind: str, reason: str) -> None:
    assert (fate.kind, fate.reason) == (kind, reason)


@pytest.mark.parametrize("told", [Flags(retried=True), Timing(1.0, 2.0, 3.0, 4.0)])
def test_what_is_told_of_an_attempt_has_a_key_for_each_field(told: Flags | Timing) -> None:
    assert told.to_json() == dataclasses.asdict(told)


def test_every_fate_is_of_a_known_kind() -> None:
    assert {fate.kind for fate in Fate} == {"discarded", "unused", "trained", "evaluated"}


def test_an_attempt_has_a_reward_or_a_reason_and_never_both() -> None:
    with pytest.raises(ValueError, match="either a reward or a reason"):
        Attempt(group=0, index=0, task="sum")
    with pytest.raises(ValueError, match="either a reward or a reason"):
        Attempt(group=0, index=0, task="sum", reward=0.0, discarded=Discarded(Fate.FAILED))


def test_a_reward_of_zero_is_a_reward() -> None:
    assert attempt(0, 0.0).discarded is None


def test_an_attempt_is_not_edited() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        attempt(0, 1.0).reward = 0.0  # type: ignore[misc]


def test_a_group_knows_its_graded_attempts_in_order() -> None:
    attempts = tuple(attempt(i, reward) for i, reward in enumerate([1.0, None, 0.0]))
    group = Group(0, "sum", 0, "tasks.jsonl:1", 0, 0, attempts)
    assert [graded.index for graded in group.graded] == [0, 2]


@pytest.mark.parametrize(
    ("rejection", "fate"),
    [(Rejection("no_variance"), Fate.NO_VARIANCE), (Rejection("too_few"), Fate.TOO_FEW)],
)
def test_a_rejection_is_the_fate_of_its_attempts(rejection: Rejection, fate: Fate) -> None:
    assert rejection.fate is fate
