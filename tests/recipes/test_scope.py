import pytest

from loops_cookbook.errors import ConfigError
from loops_cookbook.recipes.scope import Chosen, choose_scope


def chosen(
    *,
    flag: str | None = None,
    configured: str | None = None,
    variable: str | None = None,
    here: bool = False,
) -> Chosen:
    environment = {"BASETEN_LOOPS_SCOPE": variable} if variable else {}
    return choose_scope(
        flag=flag, configured=configured, environment=environment, model_is_here=here
    )


def test_the_flag_goes_before_the_config_and_that_before_the_environment() -> None:
    assert chosen(flag="local", configured="dedicated", variable="serverless").scope == "local"
    assert chosen(configured="dedicated", variable="serverless").scope == "dedicated"
    assert chosen(variable="serverless").scope == "serverless"


def test_a_model_on_this_machine_is_trained_here() -> None:
    assert chosen(here=True).is_local


def test_any_other_model_is_trained_by_a_mode_of_hosted_loops_that_the_service_picks() -> None:
    assert chosen().scope is None
    assert not chosen().is_local


def test_deployment_is_another_name_of_dedicated() -> None:
    assert chosen(variable="deployment").scope == "dedicated"


@pytest.mark.parametrize("where", ["flag", "configured", "variable"])
def test_a_service_of_ones_own_is_named_by_its_factory(where: str) -> None:
    own = chosen(**{where: "own_service:create"}, here=True)
    assert (own.scope, own.factory, own.told) == ("own", own.told, "own_service:create")
    assert own.is_own
    assert not own.is_local


def test_a_run_is_told_of_its_scope() -> None:
    assert [chosen(here=True).told, chosen().told] == ["local", "hosted"]


def test_an_empty_value_says_nothing() -> None:
    assert chosen(flag="", configured="serverless").scope == "serverless"


@pytest.mark.parametrize(
    ("said", "where"), [({"flag": "lokal"}, "--scope"), ({"variable": "team"}, "BASETEN_LOOPS_")]
)
def test_a_scope_that_does_not_exist_is_refused_where_it_was_named(
    said: dict[str, str], where: str
) -> None:
    with pytest.raises(ConfigError, match=where):
        chosen(**said)
