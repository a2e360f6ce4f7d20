import subprocess
import sys
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.rollouts.order import CallSeeds, draw, task_order


@given(tasks=st.integers(1, 40), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_an_epoch_draws_each_task_once(tasks: int, seed: int, epoch: int) -> None:
    assert sorted(task_order(tasks, seed, epoch)) == list(range(tasks))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {task_order(20, seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@given(tasks=st.integers(1, 9), epochs=st.integers(0, 4), first=st.integers(0, 40))
def test_drawing_from_a_serial_on_goes_on_as_if_it_had_never_stopped(
    tasks: int, epochs: int, first: int
) -> None:
    whole = list(draw(tasks, 3, epochs=epochs))
    assert list(draw(tasks, 3, epochs=epochs, first=first)) == whole[first:]
    assert [each.serial for each in whole] == list(range(tasks * epochs))
    assert [each.epoch for each in whole] == [s // tasks for s in range(tasks * epochs)]


def test_drawing_without_epochs_has_no_end() -> None:
    assert [each.epoch for each in islice(draw(2, 0), 7)] == [0, 0, 1, 1, 2, 2, 3]


def test_without_shuffling_the_order_is_that_of_the_file() -> None:
    assert [each.index for each in draw(3, 0, epochs=2, shuffle=False)] == [0, 1, 2, 0, 1, 2]


def test_without_tasks_nothing_is_drawn() -> None:
    assert list(draw(0, 0)) == []


@given(
    st.integers(0, 2**63),
    st.sampled_from(["train", "held_out"]),
    st.tuples(*[st.integers(0, 10**6)] * 4),
)
def test_a_call_seed_is_a_small_non_negative_int(
    seed: int, purpose: str, place: tuple[int, int, int, int]
) -> None:
    group, attempt, trial, call = place
    drawn = CallSeeds(seed, purpose, group, attempt, trial)(call)
    assert 0 <= drawn < 2**31


def test_call_seeds_differ_in_every_part() -> None:
    seeds = {
        CallSeeds(seed, purpose, group, attempt, trial)(call)
        for seed in (0, 1)
        for purpose in ("train", "held_out")
        for group in (0, 1, 11)
        for attempt in (0, 1, 11)
        for trial in (0, 1)
        for call in (0, 1)
    }
    assert len(seeds) == 2 * 2 * 3 * 3 * 2 * 2


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_seeds_and_orders_are_the_same_in_every_process_and_release(hash_seed: str) -> None:
    """A resumed run must draw what the run before it would have drawn."""
    code = (
        "from loops_cookbook.rollouts.order import *;"
        "print(task_order(6, 1, 2), CallSeeds(1, 'train', 2, 3, 4)(5))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": hash_seed},
    )
    assert out.stdout.strip() == "(5, 4, 3, 0, 1, 2) 1054182016"
