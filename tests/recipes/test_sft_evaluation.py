"""Which held-out messages are asked of the policy, and how a transcript tells what was expected."""

from loops_cookbook.recipes.demonstrations import Demonstration, demonstrate
from loops_cookbook.recipes.rows import Row
from loops_cookbook.recipes.sft_evaluation import drawn, expected
from loops_cookbook.tasks import Task
from loops_cookbook.testing import PlainRenderer


def rows(count: int) -> list[Demonstration]:
    """Rows of two answers each."""
    made: list[Demonstration] = []
    for number in range(count):
        said = [("user", "a?"), ("assistant", "one"), ("user", "b?"), ("assistant", "two")]
        messages = [{"role": role, "content": content} for role, content in said]
        task = Task(number, "r", Row.model_validate({"messages": messages}), f"rows.jsonl:{number}")
        row = demonstrate(task, PlainRenderer(), train_on="all", max_seq_len=99, keep_asked=True)
        assert isinstance(row, Demonstration)
        made.append(row)
    return made


def test_samples_are_drawn_from_every_place_of_the_rows_and_always_the_same() -> None:
    """Half of the messages of rows with a call and an answer were once the calls alone."""
    names = [name for name, _ in drawn(rows(20), 20)]
    assert names == [name for name, _ in drawn(rows(20), 20)]
    assert {name[-3:] for name in names} == {"[1]", "[3]"}
    assert len(set(names)) == 20


def test_there_are_no_more_samples_than_messages() -> None:
    assert len(drawn(rows(2), 100)) == 4
    assert drawn(rows(2), 0) == []


def test_what_was_expected_is_told_in_words() -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": '{"order": "#1"}'}}
    said = {"role": "assistant", "content": "wait", "tool_calls": [call]}
    assert expected(said) == 'wait look_up({"order": "#1"})'
