"""Whatever survives of a journal's bytes reads as a prefix of its rows."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loops_cookbook.errors import RunFolderError, RunStopped
from loops_cookbook.journal import (
    Journal,
    encode,
    read_rows,
    utf8,
    whole_folder,
    write_atomically,
)

in_one_folder = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

any_text = st.text(st.characters(exclude_categories=()))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)
rows_of_any_kind = st.lists(st.dictionaries(any_text, values, max_size=4), max_size=5)


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: str


def rows_in(path: Path) -> list[dict[str, object]]:
    return [row for _, row in read_rows(path)]


def as_json(rows: Sequence[Mapping[str, object]]) -> list[object]:
    return [json.loads(encode(row)) for row in rows]


@in_one_folder
@given(rows=rows_of_any_kind, data=st.data())
def test_any_prefix_of_the_bytes_reads_as_a_prefix_of_the_rows(
    tmp_path: Path, rows: list[dict[str, object]], data: st.DataObject
) -> None:
    path = tmp_path / "rows.jsonl"
    path.unlink(missing_ok=True)
    with Journal(path) as journal:
        journal.append(rows)
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])

    survived = rows_in(path)

    assert survived == as_json(rows)[: len(survived)]
    assert len(survived) >= content[:cut].count(b"\n")


@in_one_folder
@given(rows=rows_of_any_kind, data=st.data())
def test_a_journal_goes_on_after_any_torn_line_as_its_reader_saw_it(
    tmp_path: Path, rows: list[dict[str, object]], data: st.DataObject
) -> None:
    path = tmp_path / "rows.jsonl"
    content = utf8("".join(f"{encode(row)}\n" for row in rows))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    survived = rows_in(path)

    with Journal(path) as journal:
        journal.append([{"next": 1}])

    assert rows_in(path) == [*survived, {"next": 1}]
    assert path.read_bytes().endswith(b"\n")


def test_the_last_row_can_be_given_more_keys_and_rows_go_on_after_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Journal(path) as journal:
        journal.append([{"a": 1}, {"a": 2, "b": {"c": []}}])
        journal.amend({"d": float("nan"), "e": "é"})
        journal.amend({})
        journal.amend({"f": 3})
        journal.append([{"a": 4}])
    assert [row for _, row in read_rows(path)] == [
        {"a": 1},
        {"a": 2, "b": {"c": []}, "d": None, "e": "é", "f": 3},
        {"a": 4},
    ]


def test_a_torn_line_longer_than_a_chunk_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": "' + b"x" * 200_000)

    Journal(path).close()

    assert path.read_bytes() == b'{"a": 1}\n'


def test_a_torn_line_in_the_middle_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"b": \n{"c": 3}\n')

    with pytest.raises(RunFolderError, match=r"rows\.jsonl:2 is not a JSON object"):
        rows_in(path)


def test_line_numbers_count_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"a": 1}\n\n{"b": 2}')

    assert list(read_rows(path)) == [(2, {"a": 1}), (4, {"b": 2})]


def test_what_cannot_be_read_is_told_by_its_path(tmp_path: Path) -> None:
    """A run of another user came out as a bug of ours."""
    path = tmp_path / "rows.jsonl"
    path.mkdir()
    with pytest.raises(RunFolderError, match=r"rows\.jsonl: cannot be read \(Is a directory\): "):
        rows_in(path)


def test_no_file_has_no_rows(tmp_path: Path) -> None:
    assert rows_in(tmp_path / "absent.jsonl") == []


def test_text_with_line_separators_stays_one_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"text": "one\ntwo\r\u2028three\x85four"}
    with Journal(path, fsync=True) as journal:
        journal.append([row, row])

    assert rows_in(path) == [row, row]
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"x": float("nan"), "y": [float("inf"), 1.5]}, {"x": None, "y": [None, 1.5]}),
        (
            {"x": np.float32(0.5), "y": np.arange(2), "z": np.float64("nan")},
            {"x": 0.5, "y": [0, 1], "z": None},
        ),
        ({"x": "\\\ud83d\\"}, {"x": "\\\ud83d\\"}),
        ({(1, 2): {"a"}, "c": 1 + 2j}, {"1,2": ["a"], "c": "1+2j"}),
        ({"x": Point(0.5, "a")}, {"x": {"x": 0.5, "y": "a"}}),
        ({"x": Point(0.5, "\ud83d")}, {"x": {"x": 0.5, "y": "\ud83d"}}),
        ({"x": [object], "half": "\ud83d"}, {"x": ["<class 'object'>"], "half": "\ud83d"}),
        (MappingProxyType({"x": (1, 2)}), {"x": [1, 2]}),
    ],
)
def test_what_json_cannot_hold_is_written_all_the_same(value: object, expected: object) -> None:
    line = encode(value)

    assert json.loads(utf8(line).decode()) == expected


class Thorny:
    """What a message of user code may hold."""

    def __repr__(self) -> str:
        raise RuntimeError("do not look")


class Listed(Thorny):
    def tolist(self) -> list[object]:
        raise RuntimeError("do not look")


@pytest.mark.parametrize("value", [Thorny(), Listed()], ids=lambda value: type(value).__name__)
def test_what_cannot_be_looked_at_ends_no_run(value: object) -> None:
    """A grader that put such an object into its transcript ended the run as our bug."""
    line = json.loads(encode({"x": [value], "half": "\ud83d"}))

    assert line["x"] == [f"<{type(value).__name__} that cannot be written>"]


def test_an_endless_value_is_written_in_part() -> None:
    endless: list[object] = []
    endless.append(endless)

    assert "..." in encode({"x": endless})


@pytest.mark.parametrize(
    "written", ['append([{"long": "x" * 200}])', 'amend({"long": "x" * 200})'], ids=["row", "keys"]
)
def test_what_does_not_fit_the_disk_leaves_no_half_behind(tmp_path: Path, written: str) -> None:
    """A file-size limit stands in for a full disk: the system takes a part first.

    Of keys that part stayed, and the next `Journal` cut the torn row off: it was lost.
    """
    script = f"""
        import resource, signal, sys
        from pathlib import Path
        from loops_cookbook.errors import RunStopped
        from loops_cookbook.journal import Journal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with Journal(Path(sys.argv[1])) as journal:
            journal.append([{{"short": 1}}])
            try:
                journal.{written}
            except RunStopped as error:
                sys.stdout.write(str(error))
            journal.append([{{"short": 2}}])
    """
    path = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), path],
        capture_output=True,
        text=True,
        check=True,
    )

    assert "rows.jsonl cannot be written" in done.stdout
    assert "rows are missing" in done.stdout  # though `run.json` counts what they told
    assert "--resume, which writes them" in done.stdout
    assert rows_in(path) == [{"short": 1}, {"short": 2}]


def test_a_file_that_cannot_be_opened_ends_the_run_by_name(tmp_path: Path) -> None:
    """A resumed run whose rows belonged to another user ended with a traceback, as our bug."""
    (tmp_path / "rows.jsonl").mkdir()  # as root, nothing is another user's
    with pytest.raises(RunStopped, match=r"rows\.jsonl cannot be written \(Is a directory\)"):
        Journal(tmp_path / "rows.jsonl")


def test_a_killed_writer_leaves_every_row_it_wrote_and_no_torn_one(tmp_path: Path) -> None:
    """Case D8: a driver killed in the middle loses nothing that it had reported."""
    script = """
        import sys
        from itertools import count
        from pathlib import Path
        from loops_cookbook.journal import Journal

        with Journal(Path(sys.argv[1])) as journal:
            for i in count():
                journal.append([{"i": i, "text": "x" * (i % 5000)}])
                if i % 200 == 0:
                    sys.stdout.write(f"{i}\\n")
                    sys.stdout.flush()
    """
    path = tmp_path / "rows.jsonl"
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), path], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    reported = [int(writer.stdout.readline()) for _ in range(4)][-1]
    writer.kill()
    writer.communicate()

    Journal(path).close()

    numbers = [row["i"] for row in rows_in(path)]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > reported


def test_a_file_is_the_old_or_the_new_one_when_its_writer_is_killed(tmp_path: Path) -> None:
    """Case D3: a kill in the middle of a write."""
    script = """
        import sys
        from itertools import count
        from pathlib import Path
        from loops_cookbook.journal import write_atomically

        for i in count():
            write_atomically(Path(sys.argv[1]), str(i % 10) * 100_000)
            if i % 50 == 0:
                sys.stdout.write("more\\n")
                sys.stdout.flush()
    """
    path = tmp_path / "run.json"
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), path], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for _ in range(3):
        writer.stdout.readline()
    writer.kill()
    writer.communicate()

    content = path.read_text()
    assert len(content) == 100_000
    assert len(set(content)) == 1


def test_a_file_that_cannot_be_written_leaves_nothing_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()

    with pytest.raises(RunStopped, match="taken cannot be written"):
        write_atomically(tmp_path / "taken", "new", fsync=True)
    assert os.listdir(tmp_path) == ["taken"]


def test_a_file_is_replaced_whole_and_nothing_stays_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomically(path, "old and long")
    write_atomically(path, "new", fsync=True)

    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "a" / "b") as made:
        (made / "one").write_text("1")
        assert not (tmp_path / "a" / "b").exists()
    assert (tmp_path / "a" / "b" / "one").read_text() == "1"
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "a" / "c"):
        raise ZeroDivisionError
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_a_folder_takes_nobody_s_place(tmp_path: Path) -> None:
    """A rename takes the place of a folder that is empty."""
    with pytest.raises(FileExistsError), whole_folder(tmp_path / "a"):
        (tmp_path / "a").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
