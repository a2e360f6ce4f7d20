"""A table of `[producers]`: an address to call, the name of a key's variable, and no key."""

import pytest
from pydantic import ValidationError

from loops_cookbook.config.producers import ProducerTable
from loops_cookbook.config.rl import RLConfig
from loops_cookbook.problems import problems_in

LEAST = {"base_url": "https://host/v1", "model": "j"}


def told(**keys: object) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        ProducerTable.model_validate({**LEAST, **keys})
    return [str(problem) for problem in problems_in(caught.value, ProducerTable)]


def test_the_least_table_has_the_documented_defaults() -> None:
    table = ProducerTable.model_validate(LEAST)
    assert (table.api_key_env, table.max_concurrency) == (None, 16)
    assert (table.temperature, table.max_tokens, table.extra_body) == (0.0, None, {})


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("host/v1", "write a URL such as https://host/v1"),
        ("ftp://host", "write a URL such as"),
        ("https://", "write a URL such as"),
        ("http://[host", "is no URL"),
        ("http://host:port", "is no URL"),
        ("https://host/v1/chat/completions", "leave out /chat/completions"),
        ("https://host/v1?key=1", "holds a query"),
        ("https://me:s3cret@host/v1", "holds a user or a password"),
    ],
)
def test_an_address_that_cannot_be_called_is_refused(url: str, words: str) -> None:
    (said,) = told(base_url=url)
    assert said.startswith("base_url: ")
    assert words in said
    assert "s3cret" not in said


def test_a_key_in_the_place_of_its_variable_is_refused_and_not_repeated() -> None:
    (said,) = told(api_key_env="sk-s3cret")
    assert said.startswith("api_key_env: is no name of a variable; keep the key itself out")
    assert "s3cret" not in said


@pytest.mark.parametrize("key", ["messages", "model", "stream", "n"])
def test_extra_keys_cannot_change_what_a_call_is(key: str) -> None:
    assert told(extra_body={key: 1}) == [f"extra_body.{key}: is set by each call; remove it"]


@pytest.mark.parametrize("most", [0, 1025])
def test_the_limit_is_one_that_the_client_can_keep(most: int) -> None:
    assert len(told(max_concurrency=most)) == 1


def test_main_is_the_policys_own_name() -> None:
    document = {
        "recipe": "rl",
        "model": {"name": "m"},
        "episode": {"class": "e:E", "tasks": "t.jsonl"},
        "producers": {"main": LEAST, "a judge": LEAST, "judge": LEAST},
    }
    with pytest.raises(ValidationError) as caught:
        RLConfig.model_validate(document)
    places = [problem.where for problem in problems_in(caught.value, RLConfig)]
    assert places == ["producers.main", 'producers."a judge"']
