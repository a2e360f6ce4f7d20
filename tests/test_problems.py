"""Problems: the place, what was found, what to do, in one line."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from loops_cookbook.problems import (
    MOST_SAID,
    MOST_SHOWN,
    BrokenRules,
    OtherNames,
    Problem,
    dotted,
    found,
    nearest,
    one_line,
    problems_in,
    said,
    shown,
)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Wheel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    size: Annotated[int, Field(ge=1, lt=100)] = 1
    label: Annotated[str, Field(min_length=2, pattern="^[a-z]+$")] = "ab"


class Cart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    wheels: list[Wheel] = []
    spare: Wheel | None = None
    named: dict[str, Wheel] = {}
    speed: Literal["slow", "fast"] = "slow"
    colour: Annotated[Colour, Field(strict=False)] = Colour.RED
    loaded: bool = False
    weight: float = 1.0
    owner: str = Field(default="", alias="class")

    @field_validator("weight")
    @classmethod
    def _not_thirteen(cls, weight: float) -> float:
        if weight == 13:
            raise ValueError("found 13;\nuse another")
        if weight == 14:
            raise KeyError("weight")
        return weight

    @model_validator(mode="after")
    def _rules(self) -> "Cart":
        if self.speed == "fast" and self.loaded:
            raise BrokenRules([Problem(("speed",), "too fast"), Problem(("loaded",), "too heavy")])
        return self


def told(value: object) -> list[str]:
    try:
        Cart.model_validate(value)
    except Exception as error:  # the very thing that is retold
        return [str(problem) for problem in problems_in(error, Cart)]
    return []


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"weight": "x"}, "weight: found 'x'; use a number"),
        ({"weight": True}, "weight: found true; use a number"),
        ({"loaded": 1}, "loaded: found 1; use true or false"),
        ({"speed": "idle"}, "speed: found 'idle'; use 'slow' or 'fast'"),
        ({"colour": "green"}, "colour: found 'green'; use 'red' or 'blue'"),
        ({"spare": {"size": 0}}, "spare.size: found 0; use 1 or more"),
        ({"spare": {"size": 100}}, "spare.size: found 100; use less than 100"),
        ({"spare": {"size": 1.5}}, "spare.size: found 1.5; use a whole number"),
        ({"wheels": [{}, {"size": "1"}]}, "wheels[1].size: found '1'; use a whole number"),
        ({"wheels": {}}, "wheels: found {}; use a list"),
        ({"spare": {"label": "a"}}, "spare.label: found 'a'; use a string of 2 or more characters"),
        ({"spare": {"label": "AB"}}, "spare.label: found 'AB'; use a string that matches ^[a-z]+$"),
        ({"weight": 13}, "weight: found 13; use another"),
        ({"weight": 14}, "Cart raised KeyError: 'weight'; let it raise ValueError on a bad value"),
        (
            {"spare": 3},
            "spare: found 3; use named values (a table in TOML, an object in JSON)",
        ),
    ],
)
def test_a_fault_is_told_as_what_was_found_and_what_to_use(value: object, line: str) -> None:
    assert told(value) == [line]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"wieght": 1}, "wieght: unknown key; did you mean weight?"),
        ({"clas": "x"}, "clas: unknown key; did you mean class?"),
        ({"owner": "x"}, "owner: unknown key; the keys here are wheels, spare, named, speed, "
                         "colour, loaded, weight, class"),
        ({"spare": {"siz": 1}}, "spare.siz: unknown key; did you mean size?"),
        ({"wheels": [{"siz": 1}]}, "wheels[0].siz: unknown key; did you mean size?"),
        ({"named": {"a b": {"siz": 1}}}, 'named."a b".siz: unknown key; did you mean size?'),
        ({"size": 1}, "size: unknown key; did you mean spare.size?"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_told_with_the_one_that_was_meant(value: object, line: str) -> None:
    assert told(value) == [line]


def test_an_unknown_key_is_told_with_the_one_that_another_name_means() -> None:
    others = OtherNames(
        {"mass": ("load", "weight"), "wheel": ("wheels",)}, {"motor": "a cart has none"}
    )
    with pytest.raises(ValidationError) as caught:
        Cart.model_validate({"mass": 1, "motor": 2})
    assert sorted(map(str, problems_in(caught.value, Cart, others))) == [
        "mass: unknown key; did you mean weight?",
        "motor: unknown key; a cart has none",
    ]


def test_every_fault_is_told() -> None:
    assert len(told({"weight": "x", "loaded": 1, "spare": {"size": 0, "label": 1}})) == 4


def test_broken_rules_are_placed_at_the_keys_they_name() -> None:
    assert told({"speed": "fast", "loaded": True}) == ["speed: too fast", "loaded: too heavy"]


def test_broken_rules_of_an_inner_model_are_placed_below_it() -> None:
    class Yard(BaseModel):
        carts: list[Cart]

    with pytest.raises(ValidationError) as caught:
        Yard.model_validate({"carts": [{"speed": "fast", "loaded": True}]})
    places = [problem.place for problem in problems_in(caught.value, Yard)]
    assert places == [("carts", 0, "speed"), ("carts", 0, "loaded")]


def test_a_missing_key_is_told() -> None:
    class Door(BaseModel):
        name: str

    with pytest.raises(ValidationError) as caught:
        Door.model_validate({})
    assert [str(problem) for problem in problems_in(caught.value, Door)] == [
        "name: missing; add it"
    ]


def test_a_place_is_written_as_toml_writes_it() -> None:
    assert dotted(("a", "b-c", 2, "d.e", "")) == 'a.b-c[2]."d.e".""'


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=30))
def test_what_was_found_is_short_and_in_one_line(value: object) -> None:
    assert len(found(value)) <= MOST_SHOWN
    assert len(found(value).splitlines()) <= 1


@given(st.text())
def test_one_line_has_no_line_break_and_keeps_every_word(text: str) -> None:
    assert len(one_line(text).splitlines()) <= 1
    assert one_line(text).split() == text.split()


def test_no_word_is_near_to_one_of_another_kind() -> None:
    assert nearest("temprature", ["temperature", "top_p"]) == "temperature"
    assert nearest("zzz", ["temperature", "top_p"]) is None


def test_a_path_is_shown_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "a" / "b.toml") == "a/b.toml"
    assert shown(Path("a", "b.toml")) == "a/b.toml"
    assert shown(Path("/elsewhere/b.toml")) == "/elsewhere/b.toml"


def test_an_int_of_too_many_digits_is_found_too() -> None:
    """Python refuses to write it, and that refusal was told in place of what was found."""
    assert found([10**5000]) == "a value of type list that is too long to be written"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("one\ntwo"), "one two"),
        (ValueError(), ""),
        (ValueError("\x1b[31mred\x1b[0m \x07[/b] \ud800"), "[31mred [0m [/b]"),
        (Mute(), "(its __str__ raised RuntimeError)"),
        (ValueError("x" * 3_000_000), "x" * MOST_SAID + "..."),
    ],
    ids=["lines", "nothing", "escapes", "mute", "long"],
)
def test_what_an_exception_says_is_one_plain_short_line(error: Exception, words: str) -> None:
    """An exception without a `__str__` that works ended the run, as a bug of this package; one of
    megabytes was in every row, and one with escapes moved the terminal."""
    assert said(error) == words
