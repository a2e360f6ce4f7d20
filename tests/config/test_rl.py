"""The whole of an RL config: defaults, and the rules between keys."""

from typing import get_args

import pytest
from pydantic import ValidationError

from loops_cookbook.config.rl import RLConfig, TrainingTable
from loops_cookbook.learning.losses import LOSSES, PULLING_LOSSES
from loops_cookbook.problems import problems_in

Document = dict[str, dict[str, object]]


def document(**tables: dict[str, object]) -> dict[str, object]:
    """The least config, with some tables added or put over its own."""
    least: Document = {"model": {"name": "m"}, "episode": {"class": "e:E", "tasks": "t.jsonl"}}
    return {"recipe": "rl", **least, **tables}


def loaded(**tables: dict[str, object]) -> RLConfig:
    return RLConfig.model_validate(document(**tables))


def told(**tables: dict[str, object]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        loaded(**tables)
    return [str(problem) for problem in problems_in(caught.value, RLConfig)]


def test_the_least_config_has_the_documented_defaults() -> None:
    config = loaded()
    training = config.training
    assert (training.updates, training.epochs) == (50, None)
    assert (training.groups_per_update, training.group_size) == (1, 16)
    assert (training.loss, training.loss_aggregation, training.advantage) == (
        "cispo",
        "sum",
        "mean",
    )
    assert (training.learning_rate, training.adam.eps) == (4e-5, 1e-12)
    assert (config.sampling.temperature, config.sampling.max_tokens) == (1.0, 256)
    assert (config.output.trace, config.output.progress_every_seconds) == ("full", 30)
    assert config.evaluation.sets == {}


def test_epochs_take_the_place_of_the_default_updates() -> None:
    assert loaded(training={"epochs": 2}).training.updates is None
    assert loaded(training={"updates": 3}).training.epochs is None


def test_updates_and_epochs_together_are_refused() -> None:
    assert told(training={"updates": 5, "epochs": 1}) == [
        "training.epochs: set beside updates; keep one of the two"
    ]


@pytest.mark.parametrize("size", [1, 0, -3])
def test_a_group_of_one_is_refused_with_the_reason(size: int) -> None:
    (said,) = told(training={"group_size": size})
    assert said == (
        f"training.group_size: found {size}; use 2 or more: an attempt is judged against the "
        "others of its group"
    )


def test_the_warmup_ends_within_the_run() -> None:
    assert loaded(training={"updates": 5, "warmup": 5}).training.warmup == 5
    assert len(told(training={"updates": 5, "warmup": 6})) == 1
    assert loaded(training={"epochs": 1, "warmup": 60}).training.warmup == 60


def test_every_policy_loss_can_be_asked_for() -> None:
    losses = get_args(TrainingTable.model_fields["loss"].annotation)
    assert set(losses) == {name for name, loss in LOSSES.items() if loss.kind == "policy"}


def test_the_options_of_a_loss_are_those_it_has() -> None:
    options = {"clip_high_threshold": 1.5}
    assert loaded(training={"loss_options": options}).training.loss_options == options
    refused: list[dict[str, object]] = [
        {"loss_options": {"clip": 1.5}},
        {"loss_options": {"clip_low_threshold": "x"}},
        {"loss": "importance_sampling", "loss_options": options},
    ]
    for training in refused:
        (said,) = told(training=training)
        assert said.startswith("training.loss_options: ")


def test_losses_with_a_pull_take_sums_only() -> None:
    for loss in PULLING_LOSSES:
        assert loaded(training={"loss": loss}).training.loss == loss
        (said,) = told(training={"loss": loss, "loss_aggregation": "token_mean"})
        assert said == (
            f"training.loss_aggregation: found 'token_mean'; use 'sum' with {loss}: the others "
            "divide advantages, and its pull to the sampling policy would outweigh what is left"
        )
    assert loaded(training={"loss": "ppo", "loss_aggregation": "token_mean"})


def test_a_mode_that_does_not_exist_is_refused_with_those_that_do() -> None:
    assert told(training={"mode": "later"}) == [
        "training.mode: found 'later'; use 'sync' or 'async'"
    ]


def test_only_in_async_mode_is_anything_stale() -> None:
    assert loaded().training.staleness_bound == 0
    assert loaded(training={"mode": "async"}).training.staleness_bound == 2
    bounded = loaded(training={"mode": "async", "max_staleness": 0})
    assert bounded.training.staleness_bound == 0


def test_a_reply_leaves_room_for_a_prompt() -> None:
    assert told(sampling={"max_tokens": 1024}) == [
        "sampling.max_tokens: found 1024, which leaves no room for a prompt in model.max_seq_len "
        "(1024); use less"
    ]
    held_out: dict[str, object] = {"tasks": "h.jsonl", "max_tokens": 2000}
    (said,) = told(evaluation={"sets": {"held_out": held_out}})
    assert said.startswith("evaluation.sets.held_out.max_tokens: found 2000")


def test_the_slots_are_what_one_update_needs_unless_they_are_set() -> None:
    config = loaded(training={"groups_per_update": 3, "group_size": 4})
    assert (config.sampling_slots, config.grading_slots) == (12, 12)
    few = {"groups_per_update": 3, "group_size": 4, "mode": "async", "max_staleness": 1}
    config = loaded(training=few)
    assert (config.sampling_slots, config.grading_slots) == (24, 24)
    config = loaded(training={"groups_per_update": 100}, concurrency={"grading": 7})
    assert (config.sampling_slots, config.grading_slots) == (1024, 7)


def test_the_default_runtime_needs_an_episode_class() -> None:
    (said,) = told(episode={"tasks": "t.jsonl"})
    assert said.startswith("episode.class: missing; name the Episode to run")


def test_another_runtime_may_do_without_an_episode_class() -> None:
    config = RLConfig.model_validate(
        document(episode={"tasks": "t.jsonl"}) | {"runtime": "mine:create"}
    )
    assert config.episode.class_ is None


def test_when_to_evaluate_needs_something_to_evaluate() -> None:
    assert told(evaluation={"every": 5}) == [
        "evaluation.every: set, but there is no set; add [evaluation.sets.<name>]"
    ]


@pytest.mark.parametrize("name", ["train", "a b", "a/b", ""])
def test_a_set_has_a_name_that_metrics_can_carry(name: str) -> None:
    (said,) = told(evaluation={"sets": {name: {"tasks": "h.jsonl"}}})
    assert "rename it" in said


def test_a_set_may_be_greedy() -> None:
    held_out: dict[str, object] = {"tasks": "h.jsonl", "temperature": 0}
    assert loaded(evaluation={"sets": {"h": held_out}}).evaluation.sets["h"].temperature == 0


def test_a_recipe_that_does_not_exist_is_refused_with_the_one_that_does() -> None:
    with pytest.raises(ValidationError) as caught:
        RLConfig.model_validate(document() | {"recipe": "sft"})
    assert [str(problem) for problem in problems_in(caught.value, RLConfig)] == [
        "recipe: found 'sft'; use 'rl'"
    ]
