"""The plan of a config, whatever its recipe.

What carries a plan out, and whoever only needs its model and its scope, takes an `AnyPlan`.
"""

from collections.abc import Mapping
from typing import TypeAlias

from loops_cookbook.config.environment import Environment
from loops_cookbook.config.load import AnyConfig, LoadedConfig
from loops_cookbook.config.rl import RLConfig
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.recipes.plan import Plan, plan_run
from loops_cookbook.recipes.sft_plan import SFTPlan, plan_sft

AnyPlan: TypeAlias = Plan | SFTPlan


def plan_config(
    loaded: LoadedConfig[AnyConfig],
    environment: Environment,
    values: Mapping[str, str],
    scope: str | None,
) -> AnyPlan:
    """Look at everything that a config names.

    Args:
        loaded: the config.
        environment: which `.env` files there are.
        values: the environment, those files included.
        scope: what `--scope` said.

    Raises:
        UsageError: something in it cannot stand, in one line or one line a fault.
    """
    if (sft := loaded.of_recipe(SFTConfig)) is not None:
        return plan_sft(sft, environment, values, scope)
    rl = loaded.of_recipe(RLConfig)
    assert rl is not None, "there is no other recipe"
    return plan_run(rl, environment, values, scope)
