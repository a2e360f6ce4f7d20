import math
from collections.abc import Callable
from decimal import Decimal

import anyio
import numpy as np
import pytest

from loops_cookbook.errors import ClockRanOut, Discard, EngineDied, GradeError
from loops_cookbook.rollouts.grading import graded, reward_of, rewards_of
from loops_cookbook.rollouts.jobs import Timer
from loops_cookbook.rollouts.limits import Limit, PhaseSlot

NUMBERS = [
    *(0, 1, True, 0.5, -3),
    *(np.float16(2), np.float32(0.5), np.longdouble(1), np.int64(2), np.bool_(True)),
]
OTHERS = [
    None,
    "0.5",
    "nan",
    math.nan,
    math.inf,
    -math.inf,
    np.float32("nan"),
    np.float64("inf"),
    np.float16("inf"),  # its own bounds are infinite, and it was trained
    -np.float16("inf"),
    np.array(0.5),
    np.array([0.5]),
    [0.5],
    1j,
    Decimal("0.5"),
    np.str_("1"),
    10**400,
    1e31,
    object(),
]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_a_number_is_a_reward_as_a_plain_float(value: object) -> None:
    reward = reward_of(value, whose="attempt 1")
    assert type(reward) is float
    assert reward == value


def test_a_number_that_is_too_large_is_told_what_is_not() -> None:
    """It was told to be a finite number, which it is."""
    with pytest.raises(GradeError, match=r"return a finite number from -1e\+30 to 1e\+30$"):
        reward_of(-1e31, whose="attempt 1")


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: f"{type(value).__name__}-{value!r:.20}")
def test_anything_else_is_refused_with_whose_it_is(value: object) -> None:
    with pytest.raises(GradeError, match=r"attempt 3 of group 1.*finite number"):
        reward_of(value, whose="attempt 3 of group 1 (task 'x')")


def test_the_message_shows_what_was_returned() -> None:
    with pytest.raises(GradeError, match="returned 'yes' for attempt 1"):
        reward_of("yes", whose="attempt 1")


def test_an_int_that_python_does_not_write_is_refused_as_what_it_is() -> None:
    with pytest.raises(GradeError, match="too long to be written for attempt 1"):
        reward_of(10**5000, whose="attempt 1")


@pytest.mark.parametrize("values", [[1, 0.5], (1, 0.5), np.array([1, 0.5])], ids=type)
def test_a_group_has_one_reward_for_each_attempt(values: object) -> None:
    assert rewards_of(values, whose=["a", "b"], group="group 1") == (1.0, 0.5)


@pytest.mark.parametrize("value", [None, 1.0, "12", b"12", {"a": 1, "b": 2}, {1, 2}, iter([1, 2])])
def test_what_is_no_sequence_is_refused(value: object) -> None:
    with pytest.raises(GradeError, match="group 1: return a number for each attempt"):
        rewards_of(value, whose=["a", "b"], group="group 1")


def test_a_group_with_a_wrong_number_of_rewards_is_refused() -> None:
    with pytest.raises(GradeError, match="returned 1 rewards for group 1, which has 2"):
        rewards_of([1.0], whose=["a", "b"], group="group 1")


def test_a_group_with_one_bad_reward_is_refused_with_whose_it_is() -> None:
    with pytest.raises(GradeError, match="for b"):
        rewards_of([1.0, None], whose=["a", "b"], group="group 1")


Slots = Callable[[], PhaseSlot]


@pytest.fixture
def slots(new_timer: Callable[[], Timer]) -> Slots:
    limit = Limit("grading", 1)
    return lambda: PhaseSlot(limit, 10, new_timer())


def accept(value: object) -> float:
    return reward_of(value, whose="it")


class Grader:
    """Raises what it is given to raise, then returns the rest."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    async def __call__(self) -> object:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.anyio
async def test_a_grader_is_asked_until_it_gives_a_number(slots: Slots) -> None:
    grader = Grader(ValueError("once"), None, 0.5, 1.0)
    assert await graded(grader, accept, slots, tries=3) == 0.5
    assert grader.answers == [1.0]


@pytest.mark.anyio
async def test_the_last_fault_is_what_remains_of_a_grader_that_never_does(slots: Slots) -> None:
    result = await graded(Grader(None, ValueError("last")), accept, slots, tries=2)
    assert isinstance(result, ValueError)


@pytest.mark.anyio
async def test_a_grader_that_outlasts_its_clock_is_asked_again(slots: Slots) -> None:
    calls: list[float] = []

    async def slow_once() -> object:
        calls.append(anyio.current_time())
        if len(calls) == 1:
            await anyio.sleep_forever()
        return 1

    assert await graded(slow_once, accept, slots, tries=2) == 1.0
    assert calls[1] - calls[0] == 10


@pytest.mark.anyio
async def test_a_grader_that_always_outlasts_its_clock_gives_nothing(slots: Slots) -> None:
    result = await graded(anyio.sleep_forever, accept, slots, tries=2)
    assert isinstance(result, ClockRanOut)
    assert str(result) == "grading outlasted its clock of 10 s"


@pytest.mark.anyio
async def test_a_number_that_comes_after_the_clock_is_none(slots: Slots) -> None:
    """A grader that took no notice of the cut got its reward counted."""

    async def late() -> object:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(11)
        return 1.0

    assert isinstance(await graded(late, accept, slots, tries=2), ClockRanOut)


@pytest.mark.anyio
@pytest.mark.parametrize("final", [Discard("drop"), EngineDied("gone")], ids=["discard", "engine"])
async def test_some_faults_are_final(slots: Slots, final: Exception) -> None:
    assert await graded(Grader(final, 1.0), accept, slots, tries=2) is final
