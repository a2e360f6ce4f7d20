"""A slip of the hand is told before the hours that it costs; what may be meant is not."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from loops_cookbook.recipes.check import warnings_of
from loops_cookbook.recipes.proportion import proportion_warnings
from loops_cookbook.recipes.sft_check import sft_warnings


def named(warnings: Sequence[str]) -> set[str]:
    return {warning.partition(" ")[0] for warning in warnings}


SETTINGS = pytest.mark.parametrize(
    ("setting", "is_told"),
    [
        ("training.learning_rate=2", True),
        ("training.learning_rate=0.1", True),
        ("training.learning_rate=0.02", False),
        ("model.lora_rank=97", True),
        ("model.lora_rank=96", False),
        ("model.lora_rank=0", False),
    ],
)
SMALL = 'model.name="models/counting"'
"""Its layers are 96 wide."""


@SETTINGS
def test_a_rank_that_no_layer_has_and_a_rate_that_no_weight_bears_are_told(
    make_plan, setting: str, is_told: bool
) -> None:
    """`loops check` passed a rank of 100,000 and a learning rate of 2 without a word."""
    told = named(warnings_of(make_plan(SMALL, setting), {}))
    assert (setting.partition("=")[0] in told) == is_told


@SETTINGS
def test_in_supervised_fine_tuning_they_are_told_too(
    make_sft_plan, setting: str, is_told: bool
) -> None:
    told = named(sft_warnings(make_sft_plan(SMALL, setting), {}))
    assert (setting.partition("=")[0] in told) == is_told


def test_of_a_model_that_is_not_here_no_rank_is_too_high(make_plan) -> None:
    plan = make_plan("model.lora_rank=4096")
    assert plan.model.directory is None
    assert proportion_warnings(plan) == []


OWN = """
class Own:
    def __init__(self, context): ...
"""


def test_the_optimizer_of_a_service_of_ones_own_is_not_known(make_plan, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    plan = make_plan("training.learning_rate=2", 'compute.scope="own:Own"')
    assert proportion_warnings(plan) == []
