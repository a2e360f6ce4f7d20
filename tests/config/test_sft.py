"""The whole of an SFT config: defaults, and the rules between keys."""

import pytest
from pydantic import ValidationError

from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.problems import problems_in


def loaded(**tables: dict[str, object]) -> SFTConfig:
    least: dict[str, object] = {"model": {"name": "m"}, "data": {"train": "train.jsonl"}}
    return SFTConfig.model_validate({"recipe": "sft", **least, **tables})


def told(**tables: dict[str, object]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        loaded(**tables)
    return [str(problem) for problem in problems_in(caught.value, SFTConfig)]


def test_the_least_config_has_the_documented_defaults() -> None:
    config = loaded()
    assert (config.data.train_on, config.data.unusable_rows) == ("all", "stop")
    assert (config.training.epochs, config.training.batch_size) == (1, 32)
    assert (config.training.learning_rate, config.training.schedule) == (1e-4, "linear")
    assert config.evaluation.samples == 0


def test_tokens_take_the_place_of_the_default_rows_of_a_batch() -> None:
    training = loaded(training={"batch_tokens": 512}).training
    assert (training.batch_size, training.batch_tokens) == (None, 512)


def test_a_batch_in_rows_and_in_tokens_is_refused() -> None:
    assert told(training={"batch_size": 4, "batch_tokens": 512}) == [
        "training.batch_tokens: set beside batch_size; keep one of the two"
    ]


@pytest.mark.parametrize(
    ("key", "value"), [("epochs", 0), ("batch_size", 0), ("learning_rate", 0.0), ("warmup", -1)]
)
def test_a_run_of_nothing_is_refused_by_name(key: str, value: float) -> None:
    """A run of no steps, or of steps without a size, once began and ended without a word."""
    (said,) = told(training={key: value})
    assert said.startswith(f"training.{key}: found {value}; use ")


def test_evaluation_needs_held_out_rows() -> None:
    assert told(evaluation={"every": 5}) == [
        "evaluation.every: set, but there are no held-out rows; add data.held_out"
    ]


def test_an_adapter_on_random_weights_is_refused() -> None:
    (said,) = told(model={"name": "m", "init": "random"})
    assert said.startswith("model.init: found 'random' with lora_rank = 32, an adapter beside")
    assert said.endswith("set lora_rank = 0")
