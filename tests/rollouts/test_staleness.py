from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.rollouts.staleness import Gate


def test_in_sync_mode_one_batch_is_live_at_a_time() -> None:
    gate = Gate(groups_per_update=2)
    assert gate.may_start(started=1, rejected=0, published=0)
    assert not gate.may_start(started=2, rejected=0, published=0)
    assert gate.may_start(started=2, rejected=1, published=0)
    assert gate.may_start(started=2, rejected=0, published=2)


def test_each_update_of_staleness_is_one_more_batch() -> None:
    gate = Gate(groups_per_update=2, max_staleness=2)
    assert gate.may_start(started=5, rejected=0, published=0)
    assert not gate.may_start(started=6, rejected=0, published=0)


def test_groups_that_no_update_could_use_are_not_started() -> None:
    gate = Gate(groups_per_update=2, max_staleness=5, updates=2)
    assert gate.may_start(started=3, rejected=0, published=0)
    assert not gate.may_start(started=4, rejected=0, published=2)
    assert gate.may_start(started=4, rejected=1, published=2)


def test_a_run_is_done_when_all_its_updates_are_published() -> None:
    gate = Gate(groups_per_update=2, updates=2)
    assert not gate.is_done(published=2)
    assert gate.is_done(published=4)
    assert not Gate(groups_per_update=2).is_done(published=10**6)


@given(
    per_update=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    settles=st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=200),
)
def test_at_most_max_staleness_updates_lie_between_a_start_and_its_training(
    per_update: int, max_staleness: int, settles: list[tuple[int, bool]]
) -> None:
    """Whatever order groups settle in, and whichever of them are rejected."""
    gate = Gate(per_update, max_staleness)
    version = started = rejected = published = 0
    born: dict[int, int] = {}
    running: list[int] = []
    usable: set[int] = set()
    queue: list[int] = []  # what may yet be trained, in starting order
    for pick, is_usable in settles:
        while gate.may_start(started=started, rejected=rejected, published=published):
            born[started] = version
            running.append(started)
            queue.append(started)
            started += 1
        assert running, "the gate is shut and nothing can open it"
        serial = running.pop(pick % len(running))
        if is_usable:
            usable.add(serial)
        else:
            rejected += 1
            queue.remove(serial)
        while len(queue) >= per_update and usable.issuperset(queue[:per_update]):
            ages = [version - born[serial] for serial in queue[:per_update]]
            assert all(0 <= age <= max_staleness for age in ages)
            version += 1
            published += per_update
            del queue[:per_update]
