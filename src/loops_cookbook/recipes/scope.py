"""Who trains: one rule from the flag, the config, the environment and the model's kind.

`--scope` comes before `[compute] scope`, that before `BASETEN_LOOPS_SCOPE`; where none of them
speaks, a model that lies on this machine is trained by the embedded engine, key or no key, and
any other by hosted Loops. The rule only decides; whether that service can be had is asked later.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from loops_cookbook.errors import ConfigError

Scope: TypeAlias = Literal["local", "serverless", "dedicated"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

SCOPE_VARIABLE = "BASETEN_LOOPS_SCOPE"
KEY_VARIABLE = "BASETEN_API_KEY"

WAYS_OUT = (
    "name a model on this machine, such as models/counting or a folder with a Hugging Face model, "
    "to train it on the embedded engine"
)
"""What to do where hosted Loops cannot be had."""

_ALIASES = {"deployment": "dedicated"}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A scope and where it comes from."""

    scope: Scope | None
    """None: hosted, and which of its two modes is the service's to say."""
    source: str

    @property
    def is_local(self) -> bool:
        """Whether the embedded engine trains."""
        return self.scope == "local"


def choose_scope(
    *,
    flag: str | None,
    configured: str | None,
    environment: Mapping[str, str],
    model_is_here: bool,
) -> Chosen:
    """Decide who trains.

    Raises:
        ConfigError: a scope that does not exist, with where it was named.
    """
    named = (
        (flag, "--scope"),
        (configured, "[compute] scope"),
        (environment.get(SCOPE_VARIABLE), SCOPE_VARIABLE),
    )
    for value, source in named:
        if value:
            return Chosen(_known(value, source), source)
    if model_is_here:
        return Chosen("local", "automatic: the model is on this machine")
    return Chosen(None, "automatic: the model is not on this machine")


def _known(value: str, source: str) -> Scope:
    scope = _ALIASES.get(value, value)
    if scope not in SCOPES:
        known = ", ".join((*SCOPES, *_ALIASES))
        raise ConfigError(f"{source}: there is no scope {value!r}; it is one of {known}")
    return scope
