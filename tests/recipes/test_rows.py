"""What a data row may hold, and what of it is trained on."""

import json
from pathlib import Path

import pytest

from loops_cookbook.errors import TaskFileError
from loops_cookbook.recipes.rows import Row
from loops_cookbook.tasks import load_tasks

USER = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}
NO = {"role": "assistant", "content": "no"}
BAD_CALL = {"name": "f", "arguments": "x"}


def row(*messages: dict[str, object], **more: object) -> Row:
    return Row.model_validate({"messages": list(messages), **more})


@pytest.mark.parametrize(
    ("messages", "train_on", "trained"),
    [
        ((USER, YES, USER, NO), "all", (1, 3)),
        ((USER, YES, USER, NO), "last", (3,)),
        ((USER, {**YES, "train": False}, USER, NO), "all", (3,)),
        ((USER, {**YES, "train": True}, USER, NO), "last", (1, 3)),
        ((USER, YES, USER, {**NO, "train": False}), "last", ()),
        ((USER,), "all", ()),
    ],
)
def test_a_message_says_for_itself_whether_it_is_trained(messages, train_on, trained) -> None:
    assert row(*messages).trained(train_on) == trained


def test_reasoning_has_one_name_and_nulls_say_nothing() -> None:
    said = {**YES, "reasoning": "since", "tool_calls": None, "name": None}
    assert row(USER, said).conversation()[1] == {**YES, "reasoning_content": "since"}


def test_train_is_no_part_of_the_message() -> None:
    assert row(USER, {**YES, "train": True}).conversation() == (USER, YES)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"messages": []}, "messages: found []; use 1 or more items"),
        ({"message": [USER]}, "messages: missing; add it"),
        (
            {"messages": [USER, {**YES, "trian": False}]},
            "messages[1].trian: unknown key; did you mean train?",
        ),
        (
            {"messages": [{**USER, "train": True}, YES]},
            "messages[0].train: set on a user message; only an assistant has it",
        ),
        (
            {"messages": [USER, {"role": "assistant"}]},
            "messages[1].content: missing, and there are no tool_calls; add either",
        ),
        ({"messages": [{"role": "user"}, YES]}, "messages[0].content: missing; add it"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": BAD_CALL}]}]},
            "messages[1].tool_calls[0].function.arguments: not JSON (Expecting value: line 1 "
            "column 1 (char 0)); write an object",
        ),
    ],
)  # fmt: skip
def test_a_bad_row_is_told_with_its_line_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: dict[str, object], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(
        f"{json.dumps({'messages': [USER, YES], 'id': 7})}\n{json.dumps(line)}\n"
    )
    with pytest.raises(TaskFileError) as caught:
        load_tasks(tmp_path / "train.jsonl", Row, kind="data")
    assert str(caught.value) == f"train.jsonl:2: {said}"


def test_an_empty_file_is_told_as_one_without_rows(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n")
    with pytest.raises(TaskFileError, match="holds no row; write one JSON object a line"):
        load_tasks(tmp_path / "train.jsonl", Row, kind="data")
