"""Who trains: one rule from the flag, the config, the environment and the model's kind.

`--scope` comes before `[compute] scope`, that before `BASETEN_LOOPS_SCOPE`; where none of them
speaks, a model that lies on this machine is trained by the embedded engine, key or no key, and
any other by hosted Loops. A scope with a colon names a service of the user's own, `module:factory`.
The rule only decides; whether that service can be had is asked later.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from loops_cookbook.config.shared import SCOPES, TOLD_SCOPES
from loops_cookbook.errors import ConfigError

Scope: TypeAlias = Literal["local", "remote", "serverless", "dedicated", "tinker", "own"]

SCOPE_VARIABLE = "BASETEN_LOOPS_SCOPE"
KEY_VARIABLE = "BASETEN_API_KEY"
URL_VARIABLE = "LOOPS_BASE_URL"
"""Another control plane than that of hosted Loops."""
TEAM_VARIABLE = "LOOPS_TEAM"
TINKER_KEY_VARIABLE = "TINKER_API_KEY"
TINKER_URL_VARIABLE = "TINKER_BASE_URL"
"""Another service than that of Thinking Machines."""
TINKER_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
"""That of Thinking Machines, as its SDK has it."""
CONFIGURED = "[compute] scope"
"""The source of a scope that the config names."""

WAYS_OUT = (
    "name a model on this machine, such as models/counting or a folder with a Hugging Face model "
    "(`hf download` with --local-dir makes one), to train it on the embedded engine, or set "
    "[compute] scope to a service that you have"
)
"""What to do where hosted Loops cannot be had."""

_ALIASES = {"deployment": "dedicated"}


@dataclass(frozen=True, slots=True)
class Chosen:
    """A scope and where it comes from."""

    scope: Scope | None
    """None: hosted, and which of its two modes is the service's to say."""
    source: str
    factory: str | None = None
    """`module:factory` of the user's own service."""

    @property
    def is_local(self) -> bool:
        """Whether the embedded engine trains."""
        return self.scope == "local"

    @property
    def is_remote(self) -> bool:
        """Whether servers at the config's addresses train."""
        return self.scope == "remote"

    @property
    def is_hosted(self) -> bool:
        """Whether hosted Loops trains."""
        return self.scope in (None, "serverless", "dedicated")

    @property
    def is_tinker(self) -> bool:
        """Whether a service with the Tinker API trains."""
        return self.scope == "tinker"

    @property
    def is_own(self) -> bool:
        """Whether a service of the user's own trains."""
        return self.scope == "own"

    @property
    def told(self) -> str:
        """As `run.json` has it."""
        return self.factory or self.scope or "hosted"


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
        (configured, CONFIGURED),
        (environment.get(SCOPE_VARIABLE), SCOPE_VARIABLE),
    )
    for value, source in named:
        if value:
            if ":" in value:
                return Chosen("own", source, value)
            return Chosen(_known(value, source), source)
    if model_is_here:
        return Chosen("local", "automatic: the model is on this machine")
    return Chosen(None, "automatic: the model is not on this machine")


def _known(value: str, source: str) -> Scope:
    if value not in SCOPES:
        raise ConfigError(
            f"{source}: there is no scope {value!r}; it is one of {TOLD_SCOPES}, or "
            "module:factory for a service of your own"
        )
    return cast(Scope, _ALIASES.get(value, value))
