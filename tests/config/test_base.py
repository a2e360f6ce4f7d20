"""What every table of a config is."""

from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from loops_cookbook.config.base import Count, Seconds, StrictModel, Text
from loops_cookbook.problems import Problem, problems_in


class Shelf(StrictModel):
    """Holds books."""

    books: Count = 1
    """How many."""
    wait: Seconds = 1
    """How long."""
    label: Text = "x"
    """What it says."""

    def broken_rules(self) -> Iterator[Problem]:
        if self.books > 10 and self.label == "small":
            yield Problem(("books",), "too many")
            yield Problem(("label",), "too small")


@pytest.mark.parametrize(
    "table",
    [
        {"books": 0},
        {"books": 1.0},
        {"books": "1"},
        {"books": True},
        {"wait": 0},
        {"wait": float("nan")},
        {"wait": float("inf")},
        {"label": ""},
        {"label": 1},
        {"pages": 1},
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Shelf.model_validate(table)


def test_a_whole_number_is_a_number_too() -> None:
    assert Shelf.model_validate({"wait": 3}).wait == 3.0


def test_a_table_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Shelf().books = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_every_broken_rule_is_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        Shelf(books=11, label="small")
    told = [str(problem) for problem in problems_in(caught.value, Shelf)]
    assert told == ["books: too many", "label: too small"]


def test_the_string_below_a_field_is_its_documentation() -> None:
    assert Shelf.model_fields["books"].description == "How many."
