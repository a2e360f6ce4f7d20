import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.learning.builders import group

from loops_cookbook.attempts import Group
from loops_cookbook.errors import NoLearningSignal
from loops_cookbook.learning.batches import Batch, Batcher


def good(serial: int) -> Group:
    return group(0.0, 1.0, serial=serial)


def flat(serial: int) -> Group:
    return group(0.0, 0.0, serial=serial)


def empty(serial: int) -> Group:
    return group(None, 1.0, serial=serial)


def serials(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [judged.group.serial for judged in batch.groups]


def rejected(batch: Batch) -> list[int]:
    return [judged.group.serial for judged in batch.rejected]


def fed(batcher: Batcher, *groups: Group) -> list[Batch]:
    return [batch for settled in groups for batch in batcher.add(settled).batches]


def test_a_batch_is_full_with_so_many_usable_groups() -> None:
    batcher = Batcher(2)
    assert batcher.add(good(0)).batches == ()
    (batch,) = batcher.add(good(1)).batches
    assert serials(batch) == [0, 1]


def test_the_only_group_of_an_update_is_not_trained_when_it_is_constant() -> None:
    outcome = Batcher(1).add(flat(0))
    assert outcome.batches == ()
    assert outcome.group.rejection is not None
    assert outcome.group.rejection.reason == "no_variance"


def test_a_batch_tells_which_groups_were_rejected_since_the_one_before() -> None:
    batcher = Batcher(1)
    first, second = fed(batcher, flat(0), good(1), empty(2), flat(3), good(4))
    assert (serials(first), rejected(first)) == ([1], [0])
    assert (serials(second), rejected(second)) == ([4], [2, 3])


def test_groups_are_trained_in_the_order_in_which_they_started() -> None:
    batcher = Batcher(2)
    assert fed(batcher, good(3), good(1), good(2)) == []
    first, second = batcher.add(good(0)).batches
    assert [serials(first), serials(second)] == [[0, 1], [2, 3]]


def test_a_rejection_is_known_at_once_and_does_not_wait_for_earlier_groups() -> None:
    outcome = Batcher(1).add(flat(5))
    assert outcome.group.rejection is not None


def test_datums_stand_in_the_order_of_the_trained_attempts() -> None:
    (batch,) = Batcher(1).add(group(0.0, None, 1.0)).batches
    advantages = [float(d.advantages[-1]) for d in batch.datums if d.advantages is not None]
    assert [attempt.index for attempt in batch.attempts] == [0, 2]
    assert advantages == [-0.5, 0.5]


def test_an_attempt_that_is_not_trained_has_no_advantage() -> None:
    (batch,) = Batcher(1).add(group(0.0, None, 1.0)).batches
    ((first, low), (second, high)) = batch.groups[0].trained
    assert (first.index, low, second.index, high) == (0, -0.5, 2, 0.5)


def test_the_aggregation_is_over_the_whole_batch() -> None:
    batches = fed(Batcher(2, aggregation="token_mean"), good(0), good(1))
    values = [abs(float(d.advantages[-1])) for d in batches[0].datums if d.advantages is not None]
    assert values == pytest.approx([0.5 / 12] * 4)  # four attempts of three tokens


def test_the_last_batch_is_short_when_the_tasks_run_out() -> None:
    """Groups that were accepted while a rejected one awaited its replacement were dropped."""
    batcher = Batcher(3)
    fed(batcher, good(0), flat(1), good(2))
    batch = batcher.flush()
    assert serials(batch) == [0, 2]
    assert batcher.leftovers == ()


def test_there_is_no_last_batch_without_a_usable_group() -> None:
    batcher = Batcher(3)
    fed(batcher, flat(0))
    assert batcher.flush() is None
    assert [judged.group.serial for judged in batcher.leftovers] == [0]


def test_what_is_in_no_batch_is_left_over() -> None:
    batcher = Batcher(2)
    fed(batcher, good(0), good(1), flat(2), good(3), good(5))
    assert [judged.group.serial for judged in batcher.leftovers] == [2, 3, 5]


def test_a_run_may_begin_at_a_later_serial() -> None:
    (batch,) = Batcher(1, first_serial=7).add(good(7)).batches
    assert serials(batch) == [7]


@pytest.mark.parametrize("again", [0, 2])
def test_a_group_that_comes_twice_is_refused(again: int) -> None:
    batcher = Batcher(5)
    fed(batcher, good(0), good(2))
    with pytest.raises(ValueError, match=f"group {again} came in twice"):
        batcher.add(good(again))


def test_too_many_unusable_groups_in_a_row_end_the_run() -> None:
    batcher = Batcher(2, max_consecutive_unusable=3)
    fed(batcher, flat(0), empty(1))
    with pytest.raises(NoLearningSignal):
        batcher.add(flat(2))
    assert len(batcher.leftovers) == 3


def test_a_usable_group_sets_the_count_to_nothing() -> None:
    batcher = Batcher(9, max_consecutive_unusable=3)
    fed(batcher, flat(0), flat(1), good(2), flat(3), flat(4), good(5), flat(6))


def test_the_row_is_counted_over_batches() -> None:
    batcher = Batcher(1, max_consecutive_unusable=2)
    fed(batcher, good(0), flat(1))
    with pytest.raises(NoLearningSignal):
        batcher.add(flat(2))


def test_zero_never_ends_the_run() -> None:
    fed(Batcher(1, max_consecutive_unusable=0), *(flat(serial) for serial in range(100)))


def test_a_whole_row_ends_the_run_though_an_earlier_group_is_yet_to_settle() -> None:
    batcher = Batcher(1, max_consecutive_unusable=2)
    batcher.add(flat(2))
    with pytest.raises(NoLearningSignal):
        batcher.add(flat(1))


def test_groups_that_are_not_in_a_row_do_not_count_together() -> None:
    batcher = Batcher(1, max_consecutive_unusable=3)
    fed(batcher, flat(1), flat(3), flat(0))
    with pytest.raises(NoLearningSignal, match="4 groups in a row"):
        batcher.add(flat(2))


def test_the_message_says_how_many_why_with_which_rewards_and_what_to_change() -> None:
    batcher = Batcher(1, max_consecutive_unusable=3)
    fed(batcher, flat(0), group(1.0, 1.0, 1.0, serial=1))
    with pytest.raises(NoLearningSignal) as caught:
        batcher.add(empty(2))
    text = str(caught.value)
    assert text.startswith(
        "3 groups in a row taught nothing (no_variance (2 times), too_few (1 times)): "
        "0 (task-0) to 2 (task-2); rewards 1 (4 times), 0 (2 times); "
        "attempts without a reward: discarded/failed (1 times); "
    )
    for what in ("easier", "harder", "group_size", "temperature", "max_tokens"):
        assert what in text
    assert "\n" not in text


@given(
    kinds=st.lists(st.sampled_from([good, flat, empty]), max_size=25),
    per_update=st.integers(1, 4),
    limit=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_the_order_in_which_groups_settle_changes_nothing(
    kinds: list[Callable[[int], Group]], per_update: int, limit: int, seed: int
) -> None:
    """Same batches, same leftovers, and the same runs end for want of a signal."""
    groups = [kind(serial) for serial, kind in enumerate(kinds)]
    shuffled = random.Random(seed).sample(groups, len(groups))
    assert history(groups, per_update, limit) == history(shuffled, per_update, limit)


def history(groups: list[Group], per_update: int, limit: int) -> object:
    batcher = Batcher(per_update, max_consecutive_unusable=limit)
    batches: list[Batch] = []
    is_over = False
    for number, settled in enumerate(groups, 1):
        try:
            batches.extend(batcher.add(settled).batches)
        except NoLearningSignal:
            is_over = True
        seen = sum(len(batch.groups) + len(batch.rejected) for batch in batches)
        assert seen + len(batcher.leftovers) == number
        if is_over:
            return "no signal"
    trained = [(serials(batch), rejected(batch)) for batch in batches]
    last = batcher.flush()
    return trained, last and (serials(last), rejected(last)), len(batcher.leftovers)
