"""The ledger: what may still be there, whatever was cut off when."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loops_cookbook.errors import RunFolderError
from loops_cookbook.sandboxes.base import Entry
from loops_cookbook.sandboxes.ledger import Ledger, OpenEntry, Owner, open_entries

FIRST, SECOND = (Entry(f"loops-run-{n}", "run", "memory", f"/at/{n}", "task a") for n in (1, 2))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sandboxes.jsonl"


def test_what_was_opened_and_not_released_is_held(path: Path) -> None:
    with Ledger(path, now=lambda: 12.5) as ledger:
        ledger.opens(FIRST)
        ledger.opens(SECOND)
        ledger.released(FIRST)
    assert open_entries(path) == (OpenEntry(SECOND, Owner.this_process(), 12.5),)


def test_a_row_is_there_before_the_next_thing_happens(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.opens(FIRST)
        assert [each.entry for each in open_entries(path)] == [FIRST]


def test_a_run_that_goes_on_goes_on_counting(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.opens(FIRST)
    with Ledger(path) as ledger:
        assert ledger.written == 1
        ledger.opens(SECOND)
    assert [each.entry for each in open_entries(path)] == [FIRST, SECOND]


def test_no_ledger_holds_nothing(path: Path) -> None:
    assert open_entries(path) == ()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=12), st.integers(0, 2000))
def test_a_kill_at_any_byte_never_hides_what_was_opened_before(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[bool, int]], cut: int
) -> None:
    """Of any prefix of the file, what is held is what its whole rows say."""
    path = tmp_path_factory.mktemp("ledger") / "sandboxes.jsonl"
    with Ledger(path, now=lambda: 0.0) as ledger:
        for is_opened, number in events:
            entry = Entry(f"loops-run-{number}", "run", "memory")
            (ledger.opens if is_opened else ledger.released)(entry)
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    whole = content.count(b"\n") + (content[-1:] == b"}")
    held: dict[str, None] = {}
    for is_opened, number in events[:whole]:
        if is_opened:
            held[f"loops-run-{number}"] = None
        else:
            held.pop(f"loops-run-{number}", None)
    assert {each.entry.name for each in open_entries(path)} == set(held)


@pytest.mark.parametrize(
    "row",
    [
        {"event": "opened", "name": "x"},
        {"event": "closed", "name": "x"},
        {"event": "opened", "name": "x", "run": "r", "backend": "b", "owner": {}, "at": 1},
        {"event": "released"},
    ],
)
def test_a_row_that_is_damaged_is_told_with_its_place(path: Path, row: dict) -> None:
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"sandboxes\.jsonl:1 .*mend or remove that line"):
        open_entries(path)
