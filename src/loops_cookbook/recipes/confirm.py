"""Whether hosted Loops serves a plan's model: asked where there is a key, and not waited for long.

A check must not need the network to pass, so a service that cannot be reached leaves the model
unconfirmed. A service that answers is taken at its word: no such model, a shorter window or a
wrong key is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from loops_cookbook.errors import ServiceRefused, ServiceUnavailable, UsageError
from loops_cookbook.recipes.plans import AnyPlan
from loops_cookbook.recipes.scope import KEY_VARIABLE, URL_VARIABLE

ANSWER_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What hosted Loops says of a model."""

    limit: int | None = None
    """The longest sequence that the workspace may train; None: it does not say."""
    why_not: str = ""
    """Why nobody could tell; empty: it is confirmed."""

    @property
    def is_confirmed(self) -> bool:
        """Whether it is served."""
        return not self.why_not


UNASKED = Confirmation(why_not="nobody was asked whether Loops serves it")


def confirm(plan: AnyPlan, values: Mapping[str, str], network: Any = None) -> Confirmation:
    """Ask hosted Loops for the model of a plan that it would train.

    Args:
        plan: what is to be run.
        values: the environment, which holds the key.
        network: an httpx transport that carries the request; None for sockets.

    Raises:
        ModelError: it has no such model, or takes shorter sequences only.
        UsageError: it refused the key.
    """
    if not plan.scope.is_hosted or not values.get(KEY_VARIABLE):
        return UNASKED
    try:
        return anyio.run(_ask, plan, values, network)
    except ServiceUnavailable as error:
        return Confirmation(why_not=f"Loops could not be asked ({error})")
    except ServiceRefused as error:
        raise UsageError(
            f"{KEY_VARIABLE}: {error}: see that it is a key of the workspace"
        ) from error


async def _ask(plan: AnyPlan, values: Mapping[str, str], network: Any) -> Confirmation:
    # An HTTP client takes as long to import as all else that check needs.
    from loops_cookbook.services.control import HOSTED_URL, ControlPlane
    from loops_cookbook.services.transport import Patience, open_transport

    url = values.get(URL_VARIABLE) or HOSTED_URL
    wanted = plan.config.model.max_seq_len
    with anyio.move_on_after(ANSWER_SECONDS):
        async with open_transport(
            url, api_key=values[KEY_VARIABLE], patience=Patience(seconds=0), network=network
        ) as transport:
            found = await ControlPlane(transport).require_model(plan.model.name, wanted)
            return Confirmation(limit=found.max_context_length)
    raise ServiceUnavailable(f"{url} did not answer within {ANSWER_SECONDS:.0f} s")
