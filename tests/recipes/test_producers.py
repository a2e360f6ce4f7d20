"""Producers of a config: planned without a key, refused without one, opened with it."""

from pathlib import Path

import pytest

from loops_cookbook.config.producers import ProducerTable
from loops_cookbook.errors import ConfigError, EpisodeError
from loops_cookbook.recipes.check import check_report, warnings_of
from loops_cookbook.recipes.launch import require_service, with_judges
from loops_cookbook.recipes.producers import (
    open_judges,
    planned_judges,
    producer_warnings,
    require_keys,
    retries_of,
)
from loops_cookbook.runtimes.producers import Judge
from loops_cookbook.services.base import ChatRequest
from loops_cookbook.testing import ScriptedChat

pytestmark = pytest.mark.anyio

JUDGE = 'producers.judge={base_url="https://host/v1", model="j", api_key_env="JUDGE_KEY"}'
KEY = {"JUDGE_KEY": "sk-0123456789"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def table(**keys: object) -> ProducerTable:
    least = {"base_url": "https://host/v1", "model": "j", "api_key_env": "JUDGE_KEY"}
    return ProducerTable.model_validate({**least, **keys})


def test_the_report_names_each_producer_and_where_it_is_asked(make_plan) -> None:
    report = check_report(make_plan(JUDGE), KEY)
    (line,) = (line for line in report.lines if line.startswith("Producers: "))
    assert line == (
        "Producers: main (trainable), judge (j at https://host/v1); a call that names none uses "
        "main"
    )
    assert "sk-0123456789" not in str(report)


def test_a_missing_key_is_a_warning_of_check_and_a_refusal_of_run(make_plan) -> None:
    plan = make_plan(JUDGE)
    missing = (
        "producers.judge.api_key_env: JUDGE_KEY is neither in the environment nor in .env; set it "
        "there"
    )
    assert f"{missing}; `loops run` needs it" in warnings_of(plan, {})
    assert not any("JUDGE_KEY" in warning for warning in warnings_of(plan, KEY))
    with pytest.raises(ConfigError, match="JUDGE_KEY is neither") as caught:
        require_service(plan, {})
    assert str(caught.value) == missing


@pytest.mark.parametrize("key", ["two words", "umlaut-ä", "line\nbreak"])
def test_what_cannot_be_a_key_is_refused_and_not_shown(key: str) -> None:
    """Such a key ended in an error of the HTTP client, which showed it."""
    with pytest.raises(ConfigError, match="holds what cannot be a key") as caught:
        require_keys({"judge": table()}, {"JUDGE_KEY": key})
    assert key not in str(caught.value)


def test_white_space_around_a_key_is_no_part_of_it() -> None:
    require_keys({"judge": table()}, {"JUDGE_KEY": " sk-0123456789\n"})


@pytest.mark.parametrize(
    ("url", "is_warned"),
    [
        ("http://host/v1", True),
        ("https://host/v1", False),
        ("http://127.0.0.1:8000/v1", False),
        ("http://localhost:8000/v1", False),
    ],
)
def test_a_key_that_travels_in_the_open_is_a_warning(url: str, is_warned: bool) -> None:
    warnings = producer_warnings({"judge": table(base_url=url)}, KEY)
    assert [w.startswith("producers.judge.base_url: http sends the key") for w in warnings] == (
        [True] if is_warned else []
    )


async def test_a_planned_judge_cannot_be_called() -> None:
    judge = planned_judges({"judge": table()})["judge"]
    with pytest.raises(EpisodeError, match="'judge' was called before the run began"):
        await judge.chat.complete(ChatRequest(()))


async def test_judges_are_opened_with_a_key_of_their_own(make_plan) -> None:
    plan = make_plan(JUDGE)
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        async with open_judges(plan.config.producers, {}):
            pass
    async with with_judges(plan, KEY) as ready:
        assert ready.others["judge"].chat is not plan.others["judge"].chat
        assert "sk-0123456789" not in repr(ready.others)


def test_a_model_that_nobody_configured_is_refused_where_it_is_asked_for(
    make_plan, project: Path
) -> None:
    """Such a run sampled group after group, and could grade none of them."""
    code = (project / "spelling.py").read_text()
    asked = 'grading.models["judge"]'
    code = code.replace("return float(self.said", f"{asked}\n        return float(self.said")
    (project / "spelling.py").write_text(code)
    line = 1 + next(i for i, text in enumerate(code.splitlines()) if asked in text)
    with pytest.raises(EpisodeError) as caught:
        make_plan()
    assert str(caught.value) == (
        f"spelling.py:{line}: asks for the model 'judge', and the config has no "
        "[producers.judge]; add it"
    )
    with pytest.raises(EpisodeError, match="or did you mean judges"):
        make_plan(JUDGE.replace(".judge", ".judges"))
    assert make_plan(JUDGE).others.keys() == {"judge"}


def test_only_models_that_count_their_retries_have_any() -> None:
    class Counts(ScriptedChat):
        retries = 3

    others = {"busy": Judge("busy", Counts([])), "scripted": Judge("scripted", ScriptedChat([]))}
    assert retries_of(others) == {"busy": 3}
