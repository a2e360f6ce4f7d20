"""What each engine does with a config: the one table, which check and a page of the docs read.

An option has a verdict for each engine. `taken`: it has its effect. `ignored`: it has none; check
warns. `refused`: check refuses it. `unknown`: only the user can say. Of a service at an address
that is not Thinking Machines' own, check knows that it is SkyRL but not which backend it runs, so
what one of them would ignore is a warning that names it.

What was not seen at work stands on what the services' own documentation and code say; the notes of
the table say which.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from loops_cookbook.config.load import AnyConfig
from loops_cookbook.config.rl import RLConfig
from loops_cookbook.errors import ConfigError, MissingExtra
from loops_cookbook.problems import found
from loops_cookbook.recipes.engines import ENGINES, ROUTES, Engine
from loops_cookbook.recipes.scope import TINKER_URL, TINKER_URL_VARIABLE, Chosen

Verdict: TypeAlias = Literal["taken", "ignored", "refused", "unknown"]


def _row(  # one verdict an engine, in the order of ENGINES
    embedded: Verdict,
    remote: Verdict,
    hosted: Verdict,
    thinking_machines: Verdict,
    skyrl_jax: Verdict,
    skyrl_ray: Verdict,
    own: Verdict = "unknown",
) -> Mapping[Engine, Verdict]:
    told = (embedded, remote, hosted, thinking_machines, skyrl_jax, skyrl_ray, own)
    return MappingProxyType(dict(zip(ENGINES, told, strict=True)))


_EVERYWHERE = _row("taken", "taken", "taken", "taken", "taken", "taken")
_LOOPS_ONLY = _row("taken", "taken", "taken", "refused", "refused", "refused")

LOSSES: Mapping[str, Mapping[Engine, Verdict]] = MappingProxyType(
    {
        "cispo": _EVERYWHERE,
        "ppo": _EVERYWHERE,
        "importance_sampling": _EVERYWHERE,
        "dro": _LOOPS_ONLY,
        "dppo": _LOOPS_ONLY,
    }
)
"""Each loss, by engine."""


@dataclass(frozen=True, slots=True)
class Option:
    """A key of the config, and what each engine does with it."""

    key: str
    engines: Mapping[Engine, Verdict]
    asked: Callable[[Any], bool]
    """Whether a config asks for something that would be missed."""
    instead: str
    """What happens where it is ignored, and what to do."""
    shown: str = ""
    """In the table; empty: the key."""

    @property
    def table(self) -> str:
        """The table that it is in."""
        return self.key.partition(".")[0]

    @property
    def name(self) -> str:
        """Its name there."""
        return self.key.partition(".")[2]


def _is_set(table: str, key: str) -> Callable[[Any], bool]:
    return lambda config: key in getattr(config, table).model_fields_set


_EMBEDDED_ONLY = _row("taken", "refused", "refused", "refused", "refused", "refused", "refused")

OPTIONS = (
    Option(
        "model.init",
        _EMBEDDED_ONLY,
        lambda config: config.model.init == "random",
        "only the embedded engine starts from it (scope local); remove it",
        '`model.init = "random"`',
    ),
    Option(
        "compute.deterministic",
        _EMBEDDED_ONLY,
        lambda config: config.compute.deterministic,
        "only the embedded engine does it (scope local); remove it",
    ),
    Option(
        "model.lora_rank",
        _row("taken", "taken", "refused", "refused", "refused", "refused"),
        lambda config: config.model.lora_rank == 0,
        "every weight, which only the embedded engine trains; use 1 or more",
        "`model.lora_rank = 0`",
    ),
    Option(
        "model.lora_alpha",
        _row("taken", "ignored", "ignored", "ignored", "ignored", "ignored"),
        _is_set("model", "lora_alpha"),
        "the service sets its own and is not told of this one; remove it",
    ),
    Option(
        "model.seed",
        _row("taken", "ignored", "taken", "taken", "taken", "ignored"),
        _is_set("model", "seed"),
        "the service sets its own and is not told of this one; remove it",
    ),
    Option(
        "training.grad_clip",
        _row("taken", "taken", "taken", "taken", "ignored", "ignored"),
        lambda config: config.training.grad_clip != 0,
        "the service clips as it was started, or not at all, and `grad_clipped` is not to be "
        "trusted; set it to 0",
    ),
    Option(
        "training.weight_decay",
        _row("taken", "taken", "taken", "taken", "taken", "ignored"),
        lambda config: config.training.weight_decay != 0,
        "the service decays weights as it was started; set it there, and remove it here",
    ),
    Option(
        "training.adam",
        _row("taken", "taken", "taken", "taken", "taken", "ignored"),
        _is_set("training", "adam"),
        "the service's optimizer has the settings that it was started with; set them there, and "
        "remove them here",
    ),
    Option(
        "training.loss_aggregation",
        _row("taken", "taken", "taken", "taken", "ignored", "taken"),
        lambda _: True,
        "the mean over each sequence's positions, prompt included, and then over sequences, is "
        "taken of whatever is sent; compare a run with others of this service only",
    ),
    Option(
        "training.loss_options",
        _row("taken", "taken", "taken", "taken", "taken", "ignored"),
        lambda config: config.training.loss == "cispo",
        "the bounds of cispo's ratio are those that the service was started with; set them there, "
        'or use loss = "ppo" or "importance_sampling"',
        "`training.loss_options` of cispo",
    ),
    Option(
        "sampling.stop",
        _row("taken", "taken", "taken", "refused", "refused", "refused"),
        lambda config: bool(config.sampling.stop),
        "a Tinker service ends a reply at strings or at token ids, not at both, and the renderer "
        "needs its ids; remove it",
    ),
    Option(
        "sampling.temperature",
        _row("taken", "taken", "ignored", "ignored", "ignored", "ignored"),
        lambda _: False,  # check has a warning of its own, which also knows of top_p and top_k
        "the loss is that of temperature 1",
        "`sampling.temperature` in the loss",
    ),
)
"""What differs between engines; every other key is the command's own, or taken by all."""


_INTRODUCTION = """\
# Engines

What each engine does with a config. `loops check` reads this table: it refuses what is refused,
and warns of what would be ignored. Keys that are not here are taken by all.

Any `TINKER_BASE_URL` that is not Thinking Machines' own is taken for SkyRL. Its backend is not
known beforehand, so a warning says which of the two it is about. The embedded engine, `loops serve`
and SkyRL 0.3.0 on JAX were seen at work. Hosted Loops, Thinking Machines and SkyRL on Ray stand on
their documentation and their code.
"""

_OLDEST, _NEWEST = (0, 24), (0, 25)
"""Releases of the SDK that SkyRL's servers know. Later ones, 0.38 for one, read the result of a
sample in a form that these servers do not write."""


def engines_of(chosen: Chosen, values: Mapping[str, str]) -> tuple[Engine, ...]:
    """The engine that trains; several where it may be any of them."""
    if not chosen.is_tinker:
        if chosen.is_hosted:
            return ("hosted",)
        scopes: Mapping[str, Engine] = {"local": "embedded", "remote": "remote"}
        return (scopes.get(chosen.scope or "", "own"),)
    host = urlsplit(values.get(TINKER_URL_VARIABLE) or TINKER_URL).hostname or ""
    if host.endswith(("thinkingmachines.dev", "thinkingmachines.ai")):
        return ("thinking_machines",)
    return ("skyrl_jax", "skyrl_ray")


def require_capable(config: AnyConfig, engines: tuple[Engine, ...]) -> None:
    """Refuse a config that asks for what no such engine does.

    Raises:
        ConfigError: the first key of that kind.
    """
    if isinstance(config, RLConfig) and _all(LOSSES[config.training.loss], engines, "refused"):
        takes = [name for name, row in LOSSES.items() if not _all(row, engines, "refused")]
        raise ConfigError(
            f"training.loss: found {config.training.loss!r}, which {_names(engines)} does not "
            f"have; use one of {', '.join(takes)}"
        )
    for option in _options(config):
        if _all(option.engines, engines, "refused") and option.asked(config):
            value = getattr(getattr(config, option.table), option.name)
            raise ConfigError(f"{option.key}: found {found(value)}: {option.instead}")


def ignored(config: AnyConfig, engines: tuple[Engine, ...]) -> Iterator[str]:
    """A warning for each key that would have no effect."""
    for option in _options(config):
        deaf: list[Engine] = [engine for engine in engines if option.engines[engine] == "ignored"]
        if deaf and option.asked(config):
            who = "" if len(deaf) == len(engines) else f"ignored by {_names(deaf)}: "
            yield f"{option.key}: {who}{option.instead}"


def _options(config: AnyConfig) -> Iterator[Option]:
    """Those that a config of this recipe has."""
    for option in OPTIONS:
        if hasattr(getattr(config, option.table, None), option.name):
            yield option


def client_warning(
    engines: tuple[Engine, ...], installed: str | None, other: str | None = None
) -> str | None:
    """Why the Tinker SDK that is installed does not fit, if it does not.

    Args:
        engines: who trains.
        installed: the SDK's version; None: it is not there.
        other: a package whose module has the SDK's name, where one is there.
    """
    if not {"thinking_machines", "skyrl_jax"} & set(engines):
        return None
    if other is not None or installed is None:
        told = MissingExtra('scope "tinker"', "tinker", found=other)
        return f"{told}; `loops run` needs it"
    release = tuple(int(part) for part in installed.split(".")[:2] if part.isdecimal())
    if "skyrl_jax" in engines and not _OLDEST <= release <= _NEWEST:
        return (
            f"tinker {installed} is installed, and SkyRL's server knows others: install "
            "tinker==0.24.1 for SkyRL 0.3.0, or tinker==0.25.* for SkyRL 0.4.0"
        )
    return None


def installed_client() -> str | None:
    """The version of the Tinker SDK; None where there is none. Imports nothing."""
    try:
        return version("tinker")
    except PackageNotFoundError:
        return None


def engines_page() -> str:
    """`docs/reference/engines.md`."""
    losses = {f"`{name}`": row for name, row in LOSSES.items()}
    options = {option.shown or f"`{option.key}`": option.engines for option in OPTIONS}
    return "\n".join(
        [
            _INTRODUCTION,
            "## Losses",
            "",
            *_table(losses),
            "",
            "## Options",
            "",
            *_table(options),
            "",
            "## Routes and clients",
            "",
            *_table(ROUTES),
            "",
            "Where an option is ignored or refused:",
            "",
            *(f"* {o.shown or f'`{o.key}`'}: {o.instead}." for o in OPTIONS),
            "",
        ]
    )


def _table(
    rows: Mapping[str, Mapping[Engine, Verdict]] | Mapping[str, Mapping[Engine, str]],
) -> list[str]:
    head = f"| | {' | '.join(ENGINES.values())} |"
    lines = [f"| {name} | {' | '.join(row.values())} |" for name, row in rows.items()]
    return [head, f"|{' --- |' * (len(ENGINES) + 1)}", *lines]


def _all(row: Mapping[Engine, Verdict], engines: tuple[Engine, ...], verdict: Verdict) -> bool:
    return all(row[engine] == verdict for engine in engines)


def _names(engines: Iterable[Engine]) -> str:
    names = [ENGINES[engine] for engine in engines]
    return names[0] if len(names) == 1 else "SkyRL"  # whose backends are all that is ever several
