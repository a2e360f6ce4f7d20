"""No call of one life has the name of a call of another, and all of them are known later."""

import re

import pytest

from loops_cookbook.recipes.memory import Memory
from loops_cookbook.rundir.past import Past


def key(life: int) -> str:
    return Memory[Past](life=life).key("update-3")


def test_a_call_has_another_name_in_each_life() -> None:
    """After a checkpoint was loaded the same call is made again, and a trainer that knows its name
    would take it for done."""
    assert key(0) == "update-3"
    assert len({key(life) for life in range(12)}) == 12


@pytest.mark.parametrize("life", [0, 1, 5])
def test_the_names_of_the_lives_before_are_known_and_the_present_one_is_none_of_them(
    life: int,
) -> None:
    known = Memory[Past](life=life).past_keys("update-3")
    assert known == tuple(key(earlier) for earlier in range(life))
    assert key(life) not in known


def test_a_name_has_only_what_every_service_takes() -> None:
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", key(life)) for life in (0, 1, 12))
