"""The tables that every recipe has."""

import pytest
from pydantic import BaseModel, ValidationError

from loops_cookbook.config.shared import ComputeTable, ModelTable, OutputTable, SamplingTable
from loops_cookbook.problems import problems_in


def told(model: type[BaseModel], table: dict[str, object]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(table)
    return [str(problem) for problem in problems_in(caught.value, model)]


@pytest.mark.parametrize("scope", ["local", "serverless", "dedicated", "deployment", "tinker"])
def test_a_scope_that_exists_is_taken(scope: str) -> None:
    assert ComputeTable.model_validate({"scope": scope}).scope == scope


def test_any_other_scope_is_refused_with_those_that_exist() -> None:
    assert told(ComputeTable, {"scope": "mars"}) == [
        "scope: there is no scope 'mars'; it is one of local, remote, serverless, dedicated "
        "(also called deployment), tinker, or module:factory for a service of your own"
    ]


def test_what_a_text_has_to_be_is_told_in_words() -> None:
    """`use a string that matches ^https?://[^\\s/]+\\S*$` was told."""
    assert told(ComputeTable, {"scope": "remote", "trainer_url": "gpu-host:8000"}) == [
        "trainer_url: found 'gpu-host:8000'; write a URL such as http://gpu-host:8000"
    ]
    assert told(OutputTable, {"wandb_project": "a/b"}) == [
        "wandb_project: found 'a/b'; use 1 to 128 characters, none of them / \\ # ? % or : and the "
        "first no space"
    ]


def test_a_service_of_ones_own_is_named_as_module_and_factory() -> None:
    table = ComputeTable.model_validate({"scope": "own:create", "options": {"a": 1}})
    assert (table.scope, table.options) == ("own:create", {"a": 1})


def test_a_model_has_a_name_and_usual_settings() -> None:
    model = ModelTable.model_validate({"name": "a/b"})
    assert (model.max_seq_len, model.lora_rank, model.lora_alpha, model.seed) == (1024, 32, 32, 0)
    assert told(ModelTable, {}) == ["name: missing; add it"]


def test_lora_alpha_without_an_adapter_would_be_ignored_and_is_refused() -> None:
    assert ModelTable(name="m", lora_rank=0).lora_alpha == 32
    (said,) = told(ModelTable, {"name": "m", "lora_rank": 0, "lora_alpha": 16})
    assert said.startswith("lora_alpha: set, but lora_rank = 0")


def test_greedy_training_attempts_would_be_alike_and_are_refused() -> None:
    (said,) = told(SamplingTable, {"temperature": 0})
    assert said.startswith("temperature: found 0, which draws every attempt of a group alike")


def test_stop_strings_are_a_list_of_strings_that_say_something() -> None:
    assert SamplingTable.model_validate({"stop": ["a", "b"]}).stop == ("a", "b")
    assert told(SamplingTable, {"stop": "a"}) == ["stop: found 'a'; use a list"]
    assert told(SamplingTable, {"stop": ["a", 1]}) == ["stop[1]: found 1; use a string"]
    assert len(told(SamplingTable, {"stop": [""]})) == 1


@pytest.mark.parametrize("top_p", [0, -0.1, 1.1])
def test_top_p_is_a_probability_above_0(top_p: float) -> None:
    assert len(told(SamplingTable, {"top_p": top_p})) == 1


def test_trace_is_one_of_three() -> None:
    assert OutputTable().trace == "full"
    assert told(OutputTable, {"trace": "some"}) == [
        "trace: found 'some'; use 'full', 'samples' or 'off'"
    ]
