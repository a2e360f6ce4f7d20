"""What hosted Loops says of a model, before anything is launched."""

import httpx
import pytest
from tests.services.hosted import KEY, MODEL, Hosted, status, unreachable

from loops_cookbook.errors import ModelError, UsageError
from loops_cookbook.recipes.check import check_report
from loops_cookbook.recipes.confirm import confirm

VALUES = {"BASETEN_API_KEY": KEY, "LOOPS_BASE_URL": "https://control"}


def named(name: str) -> str:
    return f"model.name={name!r}"


def test_a_confirmed_model_has_its_line_and_its_limit(make_plan) -> None:
    plan = make_plan(named(MODEL), values=VALUES)
    report = check_report(plan, VALUES, confirm(plan, VALUES, httpx.MockTransport(Hosted())))
    assert report.lines[4] == f"Loops model: {MODEL}; max_seq_len 64 (enabled up to 4096)"
    assert not any("not confirmed" in warning for warning in report.warnings)


def test_a_limit_that_is_not_told_is_not_invented(make_plan) -> None:
    plan = make_plan(named(MODEL), values=VALUES)
    network = httpx.MockTransport(Hosted(limit=None))
    report = check_report(plan, VALUES, confirm(plan, VALUES, network))
    assert report.lines[4] == f"Loops model: {MODEL}; max_seq_len 64"


@pytest.mark.parametrize("fault", [unreachable, status(503), status(429)])
def test_a_service_that_cannot_be_asked_leaves_the_model_unconfirmed(make_plan, fault) -> None:
    plan = make_plan(named(MODEL), values=VALUES)
    network = httpx.MockTransport(Hosted(faults=[("/capabilities", fault)]))
    report = check_report(plan, VALUES, confirm(plan, VALUES, network))
    assert report.lines[4].startswith("Runtime: ")
    assert "was not confirmed: Loops could not be asked" in report.warnings[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (named("other/model"), f"does not serve 'other/model' .* it has {MODEL}"),
        ("model.max_seq_len=8192", "found 8192, .* up to 4096"),
    ],
)
def test_a_model_that_is_not_served_so_is_refused(make_plan, override: str, words: str) -> None:
    plan = make_plan(named(MODEL), override, values=VALUES)
    with pytest.raises(ModelError, match=words):
        confirm(plan, VALUES, httpx.MockTransport(Hosted()))


def test_a_wrong_key_is_refused_and_not_shown(make_plan) -> None:
    values = {**VALUES, "BASETEN_API_KEY": "not-the-key"}
    plan = make_plan(named(MODEL), values=values)
    with pytest.raises(UsageError, match=r"BASETEN_API_KEY: .* answered 401") as told:
        confirm(plan, values, httpx.MockTransport(Hosted()))
    assert "not-the-key" not in str(told.value)


def test_nobody_is_asked_without_a_key_or_where_loops_does_not_train(make_plan) -> None:
    hosted = Hosted()
    network = httpx.MockTransport(hosted)
    assert not confirm(make_plan(named(MODEL)), {}, network).is_confirmed
    plan = make_plan("model.name='models/counting'", values=VALUES)
    assert not confirm(plan, VALUES, network).is_confirmed
    assert not hosted.requests


def test_what_hosted_loops_is_not_told_of_is_a_warning(make_plan) -> None:
    plan = make_plan(named(MODEL), "model.lora_alpha=64.0", values=VALUES)
    report = check_report(plan, VALUES, confirm(plan, VALUES, httpx.MockTransport(Hosted())))
    assert any(warning.startswith("model.lora_alpha: ") for warning in report.warnings)
