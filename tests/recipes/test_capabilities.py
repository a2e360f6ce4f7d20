"""The table of engines, and what is refused and warned of by it."""

import pytest

from loops_cookbook.config.rl import TrainingTable
from loops_cookbook.errors import ConfigError, UsageError
from loops_cookbook.learning.losses import LOSSES as ALL_LOSSES
from loops_cookbook.recipes.capabilities import (
    LOSSES,
    OPTIONS,
    client_warning,
    engines_of,
    engines_page,
    ignored,
    installed_client,
)
from loops_cookbook.recipes.check import check_report, warnings_of
from loops_cookbook.recipes.engines import ENGINES, ROUTES
from loops_cookbook.recipes.launch import require_service
from loops_cookbook.recipes.scope import choose_scope
from loops_cookbook.services.tinker_policy import LOSSES as SENT

SKYRL = {"TINKER_BASE_URL": "http://ray-head:8000", "TINKER_API_KEY": "tml-dummy"}
TINKER = {"TINKER_API_KEY": "tml-secret"}


@pytest.mark.parametrize(
    ("scope", "values", "engines"),
    [
        ("local", {}, ("embedded",)),
        ("remote", {}, ("remote",)),
        ("dedicated", {}, ("hosted",)),
        (None, {}, ("hosted",)),
        ("mine:create", {}, ("own",)),
        ("tinker", TINKER, ("thinking_machines",)),
        ("tinker", SKYRL, ("skyrl_jax", "skyrl_ray")),
    ],
)
def test_the_engine_follows_from_scope_and_address(
    scope: str | None, values: dict[str, str], engines: tuple[str, ...]
) -> None:
    chosen = choose_scope(flag=None, configured=scope, environment={}, model_is_here=False)
    assert engines_of(chosen, values) == engines


def test_every_loss_of_a_policy_has_a_row() -> None:
    assert set(LOSSES) == {name for name, loss in ALL_LOSSES.items() if loss.kind == "policy"}


def test_the_losses_that_are_sent_over_tinker_are_those_of_the_table() -> None:
    for engine in ("thinking_machines", "skyrl_jax", "skyrl_ray"):
        assert {name for name, row in LOSSES.items() if row[engine] == "taken"} == set(SENT)


def test_every_option_is_a_key_of_the_config(make_plan) -> None:
    config = make_plan().config
    for option in OPTIONS:
        assert option.name in type(getattr(config, option.table)).model_fields


def test_every_row_has_a_cell_for_every_engine() -> None:
    rows = [*LOSSES.values(), *(option.engines for option in OPTIONS), *ROUTES.values()]
    assert all(tuple(row) == tuple(ENGINES) for row in rows)


def test_the_page_has_every_row() -> None:
    page = engines_page()
    for name in (*LOSSES, *(option.key for option in OPTIONS), *ROUTES):
        assert name in page
    widths = {line.count("|") for line in page.splitlines() if line.startswith("|")}
    assert widths == {len(ENGINES) + 2}


@pytest.mark.parametrize(("values", "who"), [(TINKER, "Thinking Machines"), (SKYRL, "SkyRL")])
@pytest.mark.parametrize("loss", ["dro", "dppo"])
def test_a_loss_that_the_service_does_not_have_is_refused_with_those_it_has(
    make_plan, loss: str, values: dict[str, str], who: str
) -> None:
    told = f"training.loss: found '{loss}', which {who} does not have; use one of cispo, ppo"
    with pytest.raises(ConfigError, match=told):
        make_plan(f"training.loss='{loss}'", values=values, scope="tinker")


def test_hosted_loops_has_every_loss(make_plan) -> None:
    for loss in LOSSES:
        assert make_plan(f"training.loss='{loss}'", scope="dedicated").scope.is_hosted


OF_THE_EMBEDDED_ENGINE = {"model.init": "'random'", "compute.deterministic": "true"}


@pytest.mark.parametrize("scope", ["tinker", "dedicated", "remote", "own_engine:service"])
@pytest.mark.parametrize("key", OF_THE_EMBEDDED_ENGINE)
def test_what_only_the_embedded_engine_does_is_refused_in_the_table_s_words(
    make_plan, key: str, scope: str
) -> None:
    """Another rule refused it first, in words of its own, so the row was never reached."""
    value = OF_THE_EMBEDDED_ENGINE[key]
    (option,) = [option for option in OPTIONS if option.key == key]
    with pytest.raises(ConfigError) as caught:
        make_plan(
            f"{key}={value}",
            "model.lora_rank=0",  # which random weights need
            'compute.trainer_url="http://gpu"',
            values=TINKER,
            scope=scope,
        )
    assert str(caught.value) == f"{key}: found {value}: {option.instead}"


@pytest.mark.parametrize("scope", ["tinker", "dedicated"])
def test_every_weight_is_not_trained_by_a_service(make_plan, scope: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora_rank: found 0.*every weight"):
        make_plan("model.lora_rank=0", scope=scope)


def test_strings_that_end_a_reply_are_refused_where_ids_are_needed_too(make_plan) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.stop: found \('END',\): a Tinker service"):
        make_plan("sampling.stop=['END']", values=TINKER, scope="tinker")
    assert make_plan("sampling.stop=['END']", scope="dedicated").params.stop == ("END",)


def keys_warned(make_plan, *settings: str, values: dict[str, str]) -> dict[str, str]:
    plan = make_plan(*settings, values=values, scope="tinker")
    told = ignored(plan.config, engines_of(plan.scope, values))
    return dict(warning.split(": ", 1) for warning in told)


def test_thinking_machines_ignores_only_what_is_set_and_not_sent(make_plan) -> None:
    assert keys_warned(make_plan, values=TINKER) == {}
    warned = keys_warned(
        make_plan, "model.lora_alpha=16", "training.weight_decay=0.1", values=TINKER
    )
    assert list(warned) == ["model.lora_alpha"]


def test_what_both_of_skyrl_s_backends_ignore_is_said_as_it_is(make_plan) -> None:
    warned = keys_warned(make_plan, values=SKYRL)["training.grad_clip"]
    assert warned.startswith("the service clips as it was started")
    assert "training.grad_clip" not in keys_warned(make_plan, "training.grad_clip=0", values=SKYRL)


@pytest.mark.parametrize(
    "setting", ["training.weight_decay=0.1", "training.adam.beta1=0.8", "model.seed=4"]
)
def test_what_one_of_skyrl_s_backends_ignores_names_it(make_plan, setting: str) -> None:
    key = setting.split("=")[0].removesuffix(".beta1")
    warned = keys_warned(make_plan, setting, values=SKYRL)[key]
    assert warned.startswith("ignored by SkyRL, FSDP or Megatron on Ray: ")
    assert key not in keys_warned(make_plan, values=SKYRL)


def test_the_mean_that_skyrl_s_jax_backend_takes_is_always_told(make_plan) -> None:
    warned = keys_warned(make_plan, values=SKYRL)["training.loss_aggregation"]
    assert warned.startswith("ignored by SkyRL, JAX: the mean over each sequence's positions")


def test_a_run_on_rows_is_warned_of_the_keys_that_it_has(make_sft_plan) -> None:
    """Its optimizer's keys were not looked at."""
    settings = ("training.adam.beta1=0.8", "training.weight_decay=0.1")
    warned = keys_warned(make_sft_plan, *settings, values=SKYRL)
    assert set(warned) == {"training.grad_clip", "training.adam", "training.weight_decay"}
    assert keys_warned(make_sft_plan, *settings, values=TINKER) == {}


def test_a_key_that_a_hosted_service_is_not_told_of_is_a_warning(make_plan) -> None:
    plan = make_plan("model.lora_alpha=16", scope="dedicated")
    assert any(
        warning == "model.lora_alpha: the service sets its own and is not told of this one; "
        "remove it"
        for warning in warnings_of(plan, {})
    )


@pytest.mark.parametrize(
    ("engine", "installed", "why"),
    [
        ("embedded", None, None),
        ("hosted", None, None),
        ("thinking_machines", None, 'uv add "loops-cookbook[tinker]"'),
        ("thinking_machines", "0.38.0", None),
        ("skyrl_jax", "0.38.0", "tinker==0.24.1 for SkyRL 0.3.0"),
        ("skyrl_jax", "0.23.9", "tinker==0.24.1 for SkyRL 0.3.0"),
        ("skyrl_jax", "0.24.1", None),
        ("skyrl_jax", "0.25.3rc1", None),
    ],
)
def test_a_client_that_the_service_does_not_know_is_named(
    engine: str, installed: str | None, why: str | None
) -> None:
    told = client_warning((engine,), installed)  # pyright: ignore[reportArgumentType]
    assert told is None if why is None else why in (told or "")


def test_a_module_that_only_has_the_client_s_name_is_told_by_its_package() -> None:
    told = client_warning(("thinking_machines",), None, "baseten-loops-tinker 0.17.0")
    assert told is not None
    assert told.startswith(
        "scope \"tinker\" needs the extra 'tinker', in whose place baseten-loops-"
    )
    assert "in an environment without baseten-loops-tinker run `uv add" in told


def test_the_report_names_the_service_and_what_is_missing(make_plan) -> None:
    plan = make_plan(values=SKYRL, scope="tinker")
    report = check_report(plan, SKYRL)
    assert report.lines[4] == "Tinker: http://ray-head:8000; model a/policy; max_seq_len 64"
    assert not any(warning.startswith("TINKER_API_KEY") for warning in report.warnings)
    report = check_report(plan, {})
    assert "https://tinker.thinkingmachines.dev/" in report.lines[4]
    assert any(warning.startswith("TINKER_API_KEY: neither") for warning in report.warnings)
    assert "tml-dummy" not in str(report)


def test_a_temperature_other_than_1_is_a_warning_as_with_any_service(make_plan) -> None:
    plan = make_plan("sampling.temperature=0.6", values=TINKER, scope="tinker")
    assert any(w.startswith("sampling.temperature = 0.6") for w in warnings_of(plan, TINKER))


def test_what_a_training_table_has_is_either_in_the_table_or_the_command_s_own() -> None:
    """A new option of the trainer must be thought of for every engine."""
    own = {"updates", "epochs", "groups_per_update", "group_size", "schedule", "warmup", "mode"}
    own |= {"advantage", "max_staleness", "max_rollout_retries", "shuffle", "seed"}
    own |= {"max_consecutive_unusable_groups", "checkpoint_every", "keep"}
    everywhere = {"loss", "learning_rate"}
    told = {option.name for option in OPTIONS if option.table == "training"}
    assert set(TrainingTable.model_fields) == own | everywhere | told


def test_a_run_without_the_sdk_or_the_key_is_refused_before_anything_is_launched(
    make_plan,
) -> None:
    plan = make_plan(values={}, scope="tinker")
    is_missing = installed_client() is None
    for values, needs in (
        ({}, "TINKER_API_KEY: neither"),
        ({"TINKER_BASE_URL": "ray-head:8000"}, "TINKER_BASE_URL: 'ray-head:8000' is no address"),
    ):
        with pytest.raises(UsageError, match="the extra 'tinker'" if is_missing else needs):
            require_service(plan, values)
