import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.learning.schedules import Schedule, ScheduleKind, learning_rate

KINDS: tuple[ScheduleKind, ...] = ("constant", "linear", "cosine")


def rates(schedule: Schedule) -> list[float]:
    return [learning_rate(schedule, update) for update in range(schedule.updates)]


def test_a_constant_rate_stays() -> None:
    assert rates(Schedule(2.0, updates=3)) == [2.0, 2.0, 2.0]


def test_a_linear_rate_falls_evenly_and_not_to_nothing() -> None:
    assert rates(Schedule(1.0, updates=4, kind="linear")) == pytest.approx([1, 0.75, 0.5, 0.25])


def test_a_cosine_rate_is_half_way_down_at_half_time() -> None:
    found = rates(Schedule(1.0, updates=4, kind="cosine"))
    assert found == pytest.approx([1, 0.8535534, 0.5, 0.1464466])


def test_a_warmup_rises_in_a_line_to_the_peak() -> None:
    found = rates(Schedule(1.0, updates=6, kind="linear", warmup=3))
    assert found == pytest.approx([0.25, 0.5, 0.75, 1, 2 / 3, 1 / 3])


@pytest.mark.parametrize("kind", KINDS)
def test_past_the_last_update_the_rate_stays(kind: ScheduleKind) -> None:
    schedule = Schedule(1.0, updates=4, kind=kind, warmup=1)
    assert learning_rate(schedule, 99) == learning_rate(schedule, 3)


def test_a_run_that_is_all_warmup_never_passes_the_peak() -> None:
    assert rates(Schedule(1.0, updates=2, kind="cosine", warmup=2)) == pytest.approx([1 / 3, 2 / 3])


def test_a_negative_update_is_refused() -> None:
    with pytest.raises(ValueError, match="from 0"):
        learning_rate(Schedule(1.0, updates=2), -1)


@given(
    kind=st.sampled_from(KINDS),
    updates=st.integers(1, 50),
    warmup=st.integers(0, 60),
    peak=st.floats(1e-7, 1.0),
)
def test_a_rate_is_positive_at_most_the_peak_and_falls_after_the_warmup(
    kind: ScheduleKind, updates: int, warmup: int, peak: float
) -> None:
    found = rates(Schedule(peak, updates=updates, kind=kind, warmup=warmup))
    assert all(0 < rate <= peak for rate in found)
    risen, fallen = found[:warmup], found[warmup:]
    assert risen == sorted(risen)
    assert fallen == sorted(fallen, reverse=True)
