"""Every name that is led on leads to a key that there is, and is no key itself."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from loops_cookbook.config.elsewhere import KEYS, SENTENCES
from loops_cookbook.config.rl import RLConfig
from loops_cookbook.config.sft import SFTConfig


def paths(model: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        path = f"{above}{field.alias or name}"
        yield path
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from paths(field.annotation, f"{path}.")


@pytest.mark.parametrize("name", sorted(KEYS))
def test_a_name_means_keys_that_there_are(name: str) -> None:
    assert set(KEYS[name]) <= {*paths(RLConfig), *paths(SFTConfig)}


def test_most_names_mean_a_key_of_each_recipe() -> None:
    rl = set(paths(RLConfig))
    assert all(rl & set(keys) for keys in KEYS.values())
    sft = set(paths(SFTConfig))
    assert KEYS["batch_size"] == ("training.groups_per_update", "training.batch_size")
    assert "training.batch_size" in sft


def test_no_name_means_two_things() -> None:
    assert not KEYS.keys() & SENTENCES.keys()
