"""Tasks files: every line validated, every bad line named."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from loops_cookbook.errors import TaskFileError
from loops_cookbook.tasks import PROBLEMS_SHOWN, Task, load_tasks


class Sum(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    a: int
    b: int = 0

    @field_validator("a")
    @classmethod
    def _small(cls, a: int) -> int:
        if a == 13:
            raise KeyError(a)
        return a


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "tasks.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(folder: Path, content: str | bytes) -> list[str]:
    with pytest.raises(TaskFileError) as caught:
        load_tasks(written(folder, content), Sum)
    return str(caught.value).splitlines()


def test_a_line_becomes_a_task(folder: Path) -> None:
    path = written(folder, '{"name": "one", "a": 1}\n\n  \n{"a": 2, "b": 3}')
    assert load_tasks(path, Sum) == [
        Task(0, "one", Sum(name="one", a=1), "tasks.jsonl:1"),
        Task(1, "tasks.jsonl:4", Sum(a=2, b=3), "tasks.jsonl:4"),
    ]


def test_a_byte_order_mark_and_dos_line_ends_are_no_fault(folder: Path) -> None:
    path = written(folder, b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n')
    assert [task.value.a for task in load_tasks(path, Sum)] == [1, 2]


def test_a_line_separator_within_a_string_ends_no_line(folder: Path) -> None:
    path = written(folder, '{"name": "a\u2028b\x85c", "a": 1}\n')
    assert load_tasks(path, Sum)[0].name == "a\u2028b\x85c"


def test_every_bad_line_is_named_with_its_field(folder: Path) -> None:
    content = '{"a": "x"}\n{"a": 1}\n\n{"c": 1}\n'
    assert refusal(folder, content) == [
        "tasks.jsonl:1: a: found 'x'; use a whole number",
        "tasks.jsonl:4: a: missing; add it",
        "tasks.jsonl:4: c: unknown key; the keys here are name, a, b",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            b'{"a" 1}',
            "not JSON: Expecting ':' delimiter at column 6; write one JSON object a line",
        ),
        (b"[1]", "found [1]; write one JSON object a line"),
        (b"null", "found null; write one JSON object a line"),
        (b'{"a": NaN}', "found NaN, which is not JSON; use a number, a string or null"),
        (b'{"a": 1, "a": 2}', "a: stands twice in one object; keep one"),
        (
            b'{"name": "caf\xe9", "a": 1}',
            "byte 14 of the line is 0xe9, which is not UTF-8; save the file as UTF-8",
        ),
        (b'{"a": 13}', "Sum raised KeyError: 13; let it raise ValueError on a bad value"),
    ],
)
def test_a_line_that_is_not_one_json_object_is_refused(
    folder: Path, line: bytes, problem: str
) -> None:
    assert refusal(folder, b'{"a": 1}\n' + line) == [f"tasks.jsonl:2: {problem}"]


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a": ' + "1" * 10_000 + "}"])
def test_json_that_cannot_be_read_is_a_fault_of_its_line(folder: Path, line: str) -> None:
    (said,) = refusal(folder, line)
    assert said.startswith("tasks.jsonl:1: not JSON that can be read: ")


def test_a_name_that_is_used_twice_is_refused(folder: Path) -> None:
    content = '{"name": "x", "a": 1}\n{"name": "y", "a": 1}\n{"name": "x", "a": 2}'
    assert refusal(folder, content) == [
        "tasks.jsonl:3: name: 'x' is already the name of line 1; give each task its own"
    ]


def test_many_bad_lines_are_counted_after_the_first_ones(folder: Path) -> None:
    said = refusal(folder, '{"a": "x"}\n' * (PROBLEMS_SHOWN + 7))
    assert len(said) == PROBLEMS_SHOWN + 1
    assert said[-1].startswith("... and 7 more")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_a_task_is_refused(folder: Path, content: str) -> None:
    assert refusal(folder, content) == ["tasks.jsonl: holds no task; write one JSON object a line"]


def test_utf_16_is_named(folder: Path) -> None:
    said = refusal(folder, '{"a": 1}'.encode("utf-16"))
    assert said == ["tasks.jsonl: is UTF-16 text; save it as UTF-8"]


def test_a_file_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(TaskFileError, match=r"^none\.jsonl: no such tasks file; "):
        load_tasks(folder / "none.jsonl", Sum)


def test_a_file_that_is_called_almost_like_it_is_named(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text("{}")
    with pytest.raises(TaskFileError, match=r"no such tasks file; did you mean tasks\.jsonl\?$"):
        load_tasks(folder / "task.jsonl", Sum)


def test_a_link_to_nothing_is_told_as_one(folder: Path) -> None:
    """`did you mean tasks.jsonl?` was told of `tasks.jsonl`."""
    (folder / "tasks.jsonl").symlink_to("moved.jsonl")
    with pytest.raises(TaskFileError, match=r"^tasks\.jsonl: is a link to 'moved\.jsonl', which"):
        load_tasks(folder / "tasks.jsonl", Sum)


def test_a_folder_is_no_tasks_file(folder: Path) -> None:
    with pytest.raises(TaskFileError, match="cannot be read as a tasks file"):
        load_tasks(folder, Sum)


@given(st.lists(st.builds(Sum, name=st.text(), a=st.integers(-99, 9)), unique_by=lambda s: s.name))
def test_what_was_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, values: list[Sum]
) -> None:
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    text = "".join(json.dumps(value.model_dump(), ensure_ascii=False) + "\n" for value in values)
    path.write_text(text, encoding="utf-8")
    if values:
        assert [task.value for task in load_tasks(path, Sum)] == values
    else:
        with pytest.raises(TaskFileError):
            load_tasks(path, Sum)


class Forgetful(BaseModel):
    """Its validator is the commonest mistake with pydantic."""

    answer: int

    @model_validator(mode="after")
    def nothing(self) -> Any: ...


class Leaving(BaseModel):
    answer: int

    @model_validator(mode="after")
    def leave(self) -> Any:
        raise SystemExit(3)


class Nameless(BaseModel):
    answer: int

    @property
    def name(self) -> str:
        raise LookupError("no name yet")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (Forgetful, "a validator of Forgetful gave null in its place; let it end with `return"),
        (Leaving, "Leaving raised SystemExit: 3; let it raise ValueError on a bad value"),
        (Nameless, "Nameless raised LookupError: no name yet; let it raise ValueError on a"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_users_model_does_wrong_is_told_with_the_line(
    schema: type[BaseModel], said: str, tmp_path: Path
) -> None:
    """`loops check` ended as a bug of ours, and one that left with its own status and no word."""
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"answer": 1}\n')
    with pytest.raises(TaskFileError) as refused:
        load_tasks(path, schema)
    assert f"tasks.jsonl:1: {said}" in str(refused.value)
