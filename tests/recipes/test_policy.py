"""What a config says of its policy is looked at alike in every recipe."""

from collections.abc import Callable

import pytest

from loops_cookbook.config.environment import Environment
from loops_cookbook.config.load import AnyConfig, LoadedConfig, load_config
from loops_cookbook.errors import ConfigError, ModelError
from loops_cookbook.recipes.policy import plan_policy

pytestmark = pytest.mark.usefixtures("sft_project")

NOTHING = Environment({}, (), ())


@pytest.fixture
def loaded() -> Callable[..., LoadedConfig[AnyConfig]]:
    return lambda *overrides: load_config("train.toml", overrides)


def test_a_bundled_model_is_trained_here_and_its_limit_is_known(loaded) -> None:
    policy = plan_policy(loaded(), NOTHING, {}, None)
    assert (policy.scope.is_local, policy.model_limit) == (True, 64)
    assert policy.detection.stops == ("<end>",)


@pytest.mark.parametrize(
    ("overrides", "scope", "error", "said"),
    [
        (('model.name="a/b"',), "local", ModelError, "'a/b' is a hub id"),
        (("model.max_seq_len=65",), None, ConfigError, "model.max_seq_len: found 65, but"),
        (
            ('model.name="a/b"', "model.lora_rank=0"),
            None,
            ConfigError,
            "model.lora_rank: found 0: every weight, which only the embedded engine trains",
        ),
        (
            (
                "model.lora_rank=0",
                'model.init="random"',
                'compute={scope="remote", trainer_url="http://gpu"}',
            ),
            None,
            ConfigError,
            "model.init: found 'random': only the embedded engine starts from it",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_by_its_key(
    loaded, overrides, scope, error, said
) -> None:
    with pytest.raises(error) as caught:
        plan_policy(loaded(*overrides), NOTHING, {}, scope)
    assert said in str(caught.value)


@pytest.mark.parametrize("named", ["train.toml", "train.toml/runs"])
def test_a_file_where_the_folder_of_the_runs_is_to_be_is_refused(loaded, named) -> None:
    """`loops check` passed it, and the run that came after refused."""
    with pytest.raises(ConfigError, match=r"^output.output_dir: train.toml is a file, where"):
        plan_policy(loaded(f'output.output_dir="{named}"'), NOTHING, {}, None)
