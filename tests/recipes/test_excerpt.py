"""A row as check shows it."""

from loops_cookbook.recipes.demonstrations import Demonstration, demonstrate
from loops_cookbook.recipes.excerpt import MOST_SHOWN, excerpt
from loops_cookbook.recipes.rows import Row
from loops_cookbook.tasks import Task
from loops_cookbook.testing import PlainRenderer


def shown(question: str, *answers: str) -> list[str]:
    said = [{"role": "user", "content": question}]
    said += [{"role": "assistant", "content": answer} for answer in answers]
    row = Task(0, "r", Row.model_validate({"messages": said}), "rows.jsonl:1")
    made = demonstrate(row, PlainRenderer(), train_on="all", max_seq_len=10_000)
    assert isinstance(made, Demonstration)
    return excerpt(made, PlainRenderer())


def test_each_trained_stretch_stands_between_marks() -> None:
    assert shown("a\nb", "yes") == [
        "Row rows.jsonl:1, what is trained between « and »:",
        "  | <|user|>a",
        "  | b<|end|><|assistant|>«yes<|end|>»",
    ]


def test_the_middle_of_a_long_stretch_is_left_out_and_counted() -> None:
    (_, line) = shown("x" * (MOST_SHOWN + 100), "yes")
    assert "[... 128 characters ...]" in line
    assert line.endswith("«yes<|end|>»")
