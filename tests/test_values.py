"""What a `value` is: a dataclass that only its types keep as it is."""

from dataclasses import field, replace

import pytest

from loops_cookbook.values import value


@value
class Point:
    x: int
    y: int = 0
    names: tuple[str, ...] = field(default_factory=tuple[str, ...])


@value(eq=False)
class Place:
    of: list[int]


@value(kw_only=True)
class Named(Point):
    z: int


def test_a_value_is_equal_and_hashed_by_its_fields() -> None:
    assert Point(1) == replace(Point(2), x=1)
    assert {Point(1): "here"}[Point(1, 0)] == "here"
    assert Point(1) != Point(1, 1)


def test_a_value_without_eq_is_one_by_itself() -> None:
    place = Place([1])
    assert {place: "here"}[place] == "here"
    assert place != Place([1])


def test_a_value_takes_its_fields_by_name_where_it_says_so() -> None:
    assert Named(1, z=3).z == 3
    with pytest.raises(TypeError):
        Named(1, 0, (), 3)  # pyright: ignore[reportCallIssue]


def test_a_value_has_no_fields_but_its_own() -> None:
    assert not hasattr(Point(1), "__dict__")
