"""`--set table.key=value`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loops_cookbook.config.overrides import Override, apply_overrides, parse_override
from loops_cookbook.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "place", "value"),
    [
        ("training.updates=3", ("training", "updates"), 3),
        (" model.name = 'a=b' ", ("model", "name"), "a=b"),
        ("recipe='rl'", ("recipe",), "rl"),
        ("sampling.stop=['a', 'b']", ("sampling", "stop"), ["a", "b"]),
        ("training.adam={beta1 = 0.5}", ("training", "adam"), {"beta1": 0.5}),
        ('evaluation.sets."a b".attempts=1', ("evaluation", "sets", "a b", "attempts"), 1),
        ("training.learning_rate=1e-3  # high", ("training", "learning_rate"), 1e-3),
    ],
)
def test_the_value_has_its_toml_type(text: str, place: tuple[str, ...], value: object) -> None:
    override = parse_override(text)
    assert (override.place, override.value, override.text) == (place, value, text)


def test_a_bare_word_is_refused_with_the_way_to_quote_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override("model.name=models/counting")
    assert str(caught.value) == (
        "--set model.name=models/counting: 'models/counting' is not a TOML value; a string stands "
        "in quotes: --set 'model.name=\"models/counting\"'"
    )


@pytest.mark.parametrize(
    "text", ["", "=", "=3", "training.updates", "a b=3", "a.=3", "a=", "a=1\nb=2", "a\nb=2"]
)
def test_what_is_not_one_assignment_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override(text)
    assert str(caught.value).startswith("--set ")
    assert len(str(caught.value).splitlines()) == 1


def test_an_override_goes_before_the_file_and_leaves_the_rest() -> None:
    document: dict[str, object] = {"training": {"updates": 3, "seed": 1}, "recipe": "rl"}
    after = apply_overrides(document, [parse_override("training.updates=9")])
    assert after == {"training": {"updates": 9, "seed": 1}, "recipe": "rl"}
    assert document["training"] == {"updates": 3, "seed": 1}


def test_of_two_overrides_the_later_counts() -> None:
    overrides = [parse_override("a.b=1"), parse_override("a.b=2")]
    assert apply_overrides({}, overrides) == {"a": {"b": 2}}


def test_a_table_that_is_not_there_is_made() -> None:
    assert apply_overrides({"a": 1}, [parse_override("a.b.c=1")]) == {"a": {"b": {"c": 1}}}


def test_an_override_covers_its_key_and_all_below() -> None:
    override = Override("a.b={}", ("a", "b"), {})
    assert override.covers(("a", "b"))
    assert override.covers(("a", "b", "c", 0))
    assert not override.covers(("a",))
    assert not override.covers(("a", "c"))


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        override = parse_override(text)
    except ConfigError:
        return
    assert override.place


def test_of_updates_and_epochs_the_one_that_is_set_takes_the_others_place() -> None:
    """A file with `updates` could not be run by epochs: both stood, and a key cannot be unset."""
    document: dict[str, object] = {"training": {"updates": 60, "seed": 1}}
    changed = apply_overrides(document, [parse_override("training.epochs=1")])
    assert changed == {"training": {"epochs": 1, "seed": 1}}
    back = apply_overrides(changed, [parse_override("training.updates=5")])
    assert back == {"training": {"updates": 5, "seed": 1}}
    assert apply_overrides({}, [parse_override("training.epochs=1")]) == {"training": {"epochs": 1}}


def test_updates_and_epochs_are_not_both_set() -> None:
    """The later one counted, and the run was another than the command said, without a word."""
    both = [parse_override("training.updates=2"), parse_override("training.epochs=1")]
    with pytest.raises(ConfigError, match=r"epochs=1: .* either it or --set training.updates=2; k"):
        apply_overrides({}, both)
