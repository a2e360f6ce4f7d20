import pytest

pytest.importorskip("torch")

from tests.local.sampling.builders import ticket

from loops_cookbook.local.sampling.admission import Admission, Part
from loops_cookbook.local.sampling.reader import MOST_TOKENS
from loops_cookbook.local.sampling.room import Room
from loops_cookbook.local.sampling.rows import SHARING

pytestmark = pytest.mark.torch


def admission(rows: int = 10**6) -> Admission:
    """Memory counted in tokens."""
    return Admission(Room(rows=rows, token=1, row=0, is_shared=False, held_tokens=0))


def begun(parts: list[Part]) -> list[tuple[int, int]]:
    """The prompts' first ids, and how many completions began."""
    return [(part.ticket.prompt[0], len(part.drafts)) for part in parts]


def end(part: Part, count: int | None = None) -> None:
    for draft in part.drafts[:count]:
        draft.ended = "stop"


def test_jobs_begin_in_the_order_in_which_they_came() -> None:
    its = admission()
    assert its.is_idle
    for first in (1, 2, 3):
        its.add(ticket([first], n=first))
    assert not its.is_idle
    assert begun(its.admit()) == [(1, 1), (2, 2), (3, 3)]
    assert its.admit() == []


def test_what_does_not_fit_waits_and_so_does_all_behind_it() -> None:
    its = admission(rows=20)
    for first, limit in ((1, 9), (2, 9), (3, 1)):
        its.add(ticket([first], limit=limit))
    its.add(ticket([4], limit=15))
    its.add(ticket([5], limit=1))
    parts = its.admit()
    assert begun(parts) == [(1, 1), (2, 1)]
    end(parts[0])
    assert [some.prompt for some in its.settle()] == [(1,)]
    assert begun(its.admit()) == [(3, 1)]
    end(parts[1])
    its.settle()
    assert begun(its.admit()) == [(4, 1), (5, 1)]


def test_a_completion_that_ends_makes_room_at_once() -> None:
    its = admission(rows=44)
    its.add(ticket([1], n=4, limit=10))
    its.add(ticket([2], limit=9))
    (part,) = its.admit()
    assert its.admit() == []
    end(part, 1)
    assert its.settle() == []
    assert begun(its.admit()) == [(2, 1)]


def test_a_large_job_begins_part_by_part() -> None:
    its = admission()
    its.add(ticket([1], n=2 * SHARING + 1))
    assert begun(its.admit()) == [(1, SHARING), (1, SHARING), (1, 1)]


def test_a_part_is_as_large_as_memory() -> None:
    its = admission(rows=35)
    its.add(ticket([1], n=5, limit=10))
    (part,) = its.admit()
    assert begun([part]) == [(1, 3)]
    end(part)
    assert its.settle() == []
    assert begun(its.admit()) == [(1, 2)]


def test_what_nothing_stands_in_the_way_of_begins() -> None:
    its = admission(rows=3)
    its.add(ticket([1], limit=10))
    its.add(ticket([2], limit=1))
    assert begun(its.admit()) == [(1, 1)]


def test_prompts_are_begun_as_fast_as_they_can_be_read() -> None:
    its = admission()
    half = MOST_TOKENS // 2
    for first in (1, 2, 3):
        its.add(ticket([first] * half))
    its.add(ticket([3] * half))
    assert begun(its.admit()) == [(1, 1), (2, 1)]
    assert begun(its.admit()) == [(3, 1), (3, 1)]


def test_a_job_that_is_to_be_alone_is() -> None:
    its = admission()
    its.add(ticket([1]))
    its.add(ticket([2], n=2, is_alone=True))
    its.add(ticket([3]))
    (part,) = its.admit()
    assert begun([part]) == [(1, 1)]
    end(part)
    its.settle()
    (part,) = its.admit()
    assert begun([part]) == [(2, 2)]
    end(part, 1)
    its.settle()
    assert its.admit() == []
    end(part)
    its.settle()
    assert begun(its.admit()) == [(3, 1)]


def test_a_job_that_was_left_is_forgotten_wherever_it_is() -> None:
    its = admission(rows=6)
    tickets = [ticket([first]) for first in (1, 2, 3)]
    for some in tickets:
        its.add(some)
    its.admit()
    tickets[0].leave()
    tickets[1].leave()
    assert its.settle() == []
    assert begun(its.admit()) == [(3, 1)]


def test_a_fault_of_a_draft_ends_its_job() -> None:
    its = admission()
    its.add(ticket([1], n=2))
    its.add(ticket([2]))
    first, _ = its.admit()
    its.fail(first.drafts[1], RuntimeError())
    assert [some.prompt for some in its.settle()] == [(1,)]


def test_jobs_of_a_failed_batch_begin_again_one_by_one_in_their_order() -> None:
    its = admission(rows=48)
    for first in (1, 2, 3, 4):
        its.add(ticket([first], n=3, limit=3, weights="base" if first == 2 else "live"))
    fault = RuntimeError("no memory")
    parts = its.admit()
    assert begun(parts) == [(1, 3), (2, 3), (3, 3), (4, 3)]
    again = its.begin_again("live", fault)
    assert [some.prompt for some in again] == [(1,), (3,), (4,)]
    assert its.settle() == []
    assert its.admit() == []  # the other weights' job is still under way
    end(parts[1])
    assert [some.prompt for some in its.settle()] == [(2,)]
    (part,) = its.admit()
    assert begun([part]) == [(1, 3)]
    assert its.begin_again("live", fault) == []
    (failed,) = its.settle()
    assert failed.fault is fault
    (part,) = its.admit()
    assert begun([part]) == [(3, 3)]


def test_a_job_that_had_begun_in_part_begins_again_whole_and_once() -> None:
    its = admission(rows=12)
    its.add(ticket([1], n=3, limit=5))
    its.admit()
    its.begin_again("live", RuntimeError())
    its.settle()
    (part,) = its.admit()
    assert begun([part]) == [(1, 2)]
    end(part)
    its.settle()
    (part,) = its.admit()
    assert begun([part]) == [(1, 1)]
    end(part)
    its.settle()
    assert its.is_idle
