import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.learning.builders import group

from loops_cookbook.attempts import Discarded, Fate, Group
from loops_cookbook.errors import NoLearningSignal, NothingWorks
from loops_cookbook.learning.batches import Batch, Batcher, Placed, judged
from loops_cookbook.tokens import SampledTokens, Trajectory, Turn, ids_of, logprobs_of


def good(serial: int) -> Group:
    return group(0.0, 1.0, serial=serial)


def flat(serial: int) -> Group:
    return group(0.0, 0.0, serial=serial)


def empty(serial: int) -> Group:
    return group(None, 1.0, serial=serial)


def serials(batch: Batch) -> list[int]:
    return [each.group.serial for each in batch.groups]


def add(batcher: Batcher, settled: Group) -> Placed:
    return batcher.add(judged(settled))


def fed(batcher: Batcher, *groups: Group) -> list[Batch]:
    return [batch for settled in groups for batch in add(batcher, settled).batches]


def left(batcher: Batcher) -> list[int]:
    return [each.group.serial for each in batcher.leftovers]


def test_a_batch_is_full_with_so_many_usable_groups() -> None:
    batcher = Batcher(2)
    assert add(batcher, good(0)).batches == ()
    (batch,) = add(batcher, good(1)).batches
    assert serials(batch) == [0, 1]


def test_the_only_group_of_an_update_is_not_trained_when_it_is_constant() -> None:
    one = judged(flat(0))
    assert one.rejection is not None
    assert one.rejection.reason == "no_variance"
    assert Batcher(1).add(one) == Placed()


def test_a_group_has_its_place_when_all_that_started_before_it_have_settled() -> None:
    batcher = Batcher(2)
    assert add(batcher, good(2)).groups == ()
    assert add(batcher, flat(0)).groups == ()
    placed = add(batcher, good(1)).groups + add(batcher, good(3)).groups
    assert [(each.group.serial, batch) for each, batch in placed] == [(1, 0), (2, 0), (3, 1)]


def test_groups_are_trained_in_the_order_in_which_they_started() -> None:
    batcher = Batcher(2)
    assert fed(batcher, good(3), good(1), good(2)) == []
    first, second = add(batcher, good(0)).batches
    assert [serials(first), serials(second)] == [[0, 1], [2, 3]]


def test_datums_stand_in_the_order_of_the_trained_attempts() -> None:
    (batch,) = add(Batcher(1), group(0.0, None, 1.0)).batches
    advantages = [float(d.advantages[-1]) for d in batch.datums if d.advantages is not None]
    assert [attempt.index for attempt in batch.attempts] == [0, 2]
    assert advantages == [-0.5, 0.5]


def test_an_attempt_that_is_not_trained_has_no_advantage() -> None:
    (batch,) = add(Batcher(1), group(0.0, None, 1.0)).batches
    ((first, low), (second, high)) = batch.groups[0].trained
    assert (first.index, low, second.index, high) == (0, -0.5, 2, 0.5)


def test_the_aggregation_is_over_the_whole_batch() -> None:
    batches = fed(Batcher(2, aggregation="token_mean"), good(0), good(1))
    values = [abs(float(d.advantages[-1])) for d in batches[0].datums if d.advantages is not None]
    assert values == pytest.approx([0.5 / 12] * 4)  # four attempts of three tokens


def test_an_attempt_at_the_mean_is_trained_without_a_datum() -> None:
    (batch,) = add(Batcher(1, aggregation="token_mean"), group(0.0, 0.5, 1.0)).batches
    values = [float(d.advantages[-1]) for d in batch.datums if d.advantages is not None]
    assert len(batch.attempts) == 3
    assert values == pytest.approx([-0.5 / 9, 0.5 / 9])  # three attempts of three tokens


def test_the_last_batch_is_short_when_the_tasks_run_out() -> None:
    """Groups that were accepted while a rejected one awaited its replacement were dropped."""
    batcher = Batcher(3)
    fed(batcher, good(0), flat(1), good(2))
    (batch,) = batcher.flush().batches
    assert serials(batch) == [0, 2]
    assert batcher.leftovers == ()


def test_there_is_no_last_batch_without_a_usable_group() -> None:
    batcher = Batcher(3)
    fed(batcher, flat(0))
    assert batcher.flush() == Placed()
    assert batcher.leftovers == ()


def test_what_is_usable_and_in_no_batch_is_left_over() -> None:
    batcher = Batcher(2)
    fed(batcher, good(0), good(1), flat(2), good(3), good(5))
    assert left(batcher) == [3, 5]
    assert [each.group.serial for each in batcher.waiting] == [5]


def test_nothing_of_a_rejected_group_is_kept_that_no_message_tells() -> None:
    """Rejected groups were kept whole, with every token, until a batch was full."""
    batcher = Batcher(1, max_consecutive_unusable=0)
    groups = [flat(serial) for serial in range(1, 20)]
    kept = [weakref.ref(attempt.sequences[0].ids) for each in groups for attempt in each.attempts]
    while groups:
        add(batcher, groups.pop())
    gc.collect()
    assert [ref for ref in kept if ref() is not None] == []


def test_a_run_may_begin_at_a_later_serial() -> None:
    (batch,) = add(Batcher(1, first_serial=7), good(7)).batches
    assert serials(batch) == [7]


def test_groups_that_were_settled_before_are_not_waited_for() -> None:
    """A run that goes on starts the groups again that were cut, and not those between them."""
    batcher = Batcher(2, first_serial=3, settled={4, 5})
    fed(batcher, good(7), good(6))
    (batch,) = add(batcher, good(3)).batches
    assert serials(batch) == [3, 6]
    assert left(batcher) == [7]


def test_unusable_groups_are_in_a_row_across_those_that_were_settled_before() -> None:
    batcher = Batcher(2, max_consecutive_unusable=2, first_serial=3, settled={4, 5})
    fed(batcher, flat(6))
    with pytest.raises(NoLearningSignal, match="2 groups in a row"):
        add(batcher, flat(3))


@pytest.mark.parametrize("again", [0, 2])
def test_a_group_that_comes_twice_is_refused(again: int) -> None:
    batcher = Batcher(5)
    fed(batcher, good(0), good(2))
    with pytest.raises(ValueError, match=f"group {again} came in twice"):
        add(batcher, good(again))


def test_too_many_unusable_groups_in_a_row_end_the_run() -> None:
    batcher = Batcher(2, max_consecutive_unusable=3)
    fed(batcher, flat(0), empty(1))
    with pytest.raises(NoLearningSignal):
        add(batcher, flat(2))


def test_a_usable_group_sets_the_count_to_nothing() -> None:
    batcher = Batcher(9, max_consecutive_unusable=3)
    fed(batcher, flat(0), flat(1), good(2), flat(3), flat(4), good(5), flat(6))


def test_the_row_is_counted_over_batches() -> None:
    batcher = Batcher(1, max_consecutive_unusable=2)
    fed(batcher, good(0), flat(1))
    with pytest.raises(NoLearningSignal):
        add(batcher, flat(2))


def test_zero_never_ends_the_run() -> None:
    fed(Batcher(1, max_consecutive_unusable=0), *(flat(serial) for serial in range(100)))


def test_a_whole_row_ends_the_run_though_an_earlier_group_is_yet_to_settle() -> None:
    batcher = Batcher(1, max_consecutive_unusable=2)
    add(batcher, flat(2))
    with pytest.raises(NoLearningSignal):
        add(batcher, flat(1))


def test_groups_that_are_not_in_a_row_do_not_count_together() -> None:
    batcher = Batcher(1, max_consecutive_unusable=3)
    fed(batcher, flat(1), flat(3), flat(0))
    with pytest.raises(NoLearningSignal, match="4 groups in a row"):
        add(batcher, flat(2))


def test_the_message_says_how_many_why_with_which_rewards_and_what_to_change() -> None:
    batcher = Batcher(1, max_consecutive_unusable=3)
    fed(batcher, flat(0), group(1.0, 1.0, 1.0, serial=1))
    with pytest.raises(NoLearningSignal) as caught:
        add(batcher, empty(2))
    text = str(caught.value)
    assert text.startswith(
        "3 groups in a row taught nothing (no_variance (2 times), too_few (once)): "
        "0 (task-0) to 2 (task-2); rewards 1 (4 times), 0 (2 times); "
        "attempts without a reward: discarded/failed (once), all alike: discarded/failed; "
    )
    for what in ("easier", "harder", "group_size", "temperature"):
        assert what in text
    assert "\n" not in text


def test_the_message_tells_of_a_grader_that_gives_one_number_and_of_replies_that_were_cut() -> None:
    """It said to see whether replies are cut, and left it to the reader to find that out."""
    ids, stops = ids_of([1]), ("length", "length", "stop")
    turns = [Turn(ids, SampledTokens(ids, logprobs_of([-0.5]), stop)) for stop in stops]
    whole = flat(0)
    cut, other = whole.attempts
    attempts = (
        replace(cut, trajectory=Trajectory(tuple(turns[:2]))),
        replace(other, trajectory=Trajectory(tuple(turns[2:]))),
    )
    with pytest.raises(NoLearningSignal) as caught:
        add(Batcher(1, max_consecutive_unusable=1), replace(whole, attempts=attempts))
    assert (
        "rewards 0 (2 times); 2 of 3 replies were cut at a token limit: see sampling.max_tokens; "
        "all rewards are one number: see that the grader can give another; attempts at a task"
    ) in str(caught.value)


def test_one_reason_for_all_groups_is_not_counted_beside_them() -> None:
    """It said `2 groups in a row taught nothing (no_variance (2 times))`."""
    batcher = Batcher(1, max_consecutive_unusable=2)
    fed(batcher, flat(0))
    with pytest.raises(
        NoLearningSignal, match=r"^2 groups in a row taught nothing \(no_variance\): "
    ):
        add(batcher, flat(1))


def test_the_message_tells_of_the_commonest_way_to_be_lost_in_its_own_words() -> None:
    """It counted what was lost and did not say by what."""

    def lost(serial: int, kind: str, *details: str) -> Group:
        whole = empty(serial)
        attempts = [
            replace(whole.attempts[0], index=i, discarded=Discarded(Fate.FAILED, detail, kind))
            for i, detail in enumerate(details)
        ]
        return replace(whole, attempts=tuple(attempts))

    batcher = Batcher(1, max_consecutive_unusable=2)
    fed(batcher, lost(0, "KeyError", "run: KeyError: 'a'"))
    with pytest.raises(
        NoLearningSignal, match=r"\(3 times\), most often \(2 times\): run: OSError: 1"
    ):
        add(batcher, lost(1, "OSError", "run: OSError: 1", "run: OSError: 2"))


def test_attempts_that_never_asked_the_model_are_told_what_to_look_for() -> None:
    """A call of generate() that is not awaited was told as attempts that said nothing."""
    silent = tuple(
        replace(attempt, reward=None, discarded=Discarded(Fate.NO_REPLY, "it said nothing"))
        for attempt in flat(0).attempts
    )
    with pytest.raises(NoLearningSignal, match=r"it said nothing; see that run\(\) calls generate"):
        add(Batcher(1, max_consecutive_unusable=1), replace(flat(0), attempts=silent))


def broken(serial: int, exception: str = "KeyError", place: str = "episode.py:3 in run") -> Group:
    """A group of which every attempt failed by one line of code."""
    whole = group(None, None, serial=serial)
    why = Discarded(Fate.FAILED, f"run: {exception}: {serial} ({place})", exception, place)
    attempts = tuple(replace(attempt, discarded=why) for attempt in whole.attempts)
    return replace(whole, attempts=attempts)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_run_whose_first_groups_all_fail_at_one_line_ends_with_it(order: Sequence[int]) -> None:
    """A typo in an Episode ran 320 attempts, each tried three times, before the run stopped."""
    batcher = Batcher(2)
    *before, last = map(broken, order)
    fed(batcher, *before)
    with pytest.raises(NothingWorks) as caught:
        add(batcher, last)
    assert str(caught.value) == (
        "nothing has worked so far: all 6 attempts of the first 3 groups are discarded/failed "
        f"alike: run: KeyError: {order[0]} (episode.py:3 in run); mend that, then start again"
    )


@pytest.mark.parametrize(
    "beginning",
    [
        [good(0), broken(1), broken(2), broken(3)],
        [empty(0), broken(1), broken(2), broken(3)],
        [broken(0), broken(1), good(7), broken(2)],
        [broken(0), broken(1), broken(2, place="episode.py:9 in run"), broken(3)],
        [broken(0), broken(1), broken(2, "TypeError"), broken(3)],
        [broken(serial, "ServiceUnavailable") for serial in range(4)],
        [broken(serial, "SandboxError") for serial in range(4)],
        [broken(serial, "ClockRanOut") for serial in range(4)],
        [group(None, None, serial=serial) for serial in range(4)],
        [broken(1), broken(2), broken(3), broken(4)],
    ],
    ids=[
        "a usable group",
        "a reward",
        "a later group is usable",
        "another line",
        "another exception",
        "a service may come back",
        "a sandbox may",
        "a clock may suffice",
        "no exception",
        "the first is yet to settle",
    ],
)
def test_a_run_of_which_more_is_to_be_hoped_goes_on(beginning: list[Group]) -> None:
    fed(Batcher(2), *beginning)


def test_only_the_beginning_of_a_run_can_show_that_nothing_works() -> None:
    fed(Batcher(2, first_serial=3), *(broken(serial) for serial in range(3, 9)))
    fed(Batcher(2, settled=[5]), *(broken(serial) for serial in range(3)))
    fed(Batcher(2, max_consecutive_unusable=0), *(broken(serial) for serial in range(30)))


@given(
    kinds=st.lists(st.sampled_from([good, flat, empty]), max_size=25),
    per_update=st.integers(1, 4),
    limit=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_the_order_in_which_groups_settle_changes_nothing(
    kinds: list[Callable[[int], Group]], per_update: int, limit: int, seed: int
) -> None:
    """Same batches, same places, and the same runs end for want of a signal."""
    groups = [kind(serial) for serial, kind in enumerate(kinds)]
    shuffled = random.Random(seed).sample(groups, len(groups))
    assert history(groups, per_update, limit) == history(shuffled, per_update, limit)


def history(groups: list[Group], per_update: int, limit: int) -> object:
    batcher = Batcher(per_update, max_consecutive_unusable=limit)
    batches: list[Batch] = []
    places: list[tuple[int, int]] = []
    for number, settled in enumerate(groups, 1):
        try:
            placed = add(batcher, settled)
        except NoLearningSignal:
            return "no signal"
        batches.extend(placed.batches)
        places.extend((each.group.serial, batch) for each, batch in placed.groups)
        usable = sum(judged(each).rejection is None for each in groups[:number])
        assert sum(len(batch.groups) for batch in batches) + len(batcher.leftovers) == usable
    last = batcher.flush()
    places.extend((each.group.serial, batch) for each, batch in last.groups)
    trained = [serials(batch) for batch in (*batches, *last.batches)]
    assert places == [(serial, i) for i, batch in enumerate(trained) for serial in batch]
    return trained
