"""What a run tells its trainer of the loss."""

from collections.abc import Callable

import pytest

from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.rules import loss_spec
from loops_cookbook.testing import ScriptedService


class Knowing(ScriptedService):
    """Its trainer takes the sampling temperature, as the embedded one does."""

    temperature_in_loss = True


@pytest.mark.parametrize(
    ("service", "temperature", "sent"),
    [(Knowing, 0.6, 0.6), (Knowing, 1.0, None), (ScriptedService, 0.6, None)],
)
def test_the_temperature_is_sent_to_a_trainer_that_takes_it_where_it_is_not_1(
    make_plan: Callable[..., Plan],
    service: type[ScriptedService],
    temperature: float,
    sent: float | None,
) -> None:
    """Only a whole run on the engine told whether a trainer scored under what was sampled."""
    plan = make_plan(f"sampling.temperature={temperature}")
    assert loss_spec(plan, service([])).config.get("temperature") == sent
