"""The policy as a config names it: where its model lies, who trains it, how it is spoken to.

Every recipe finds its policy here, before anything is launched; what cannot stand is refused. What
was found is the head of its plan.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, cast

from loops_cookbook.config.environment import Environment
from loops_cookbook.config.imports import import_callable
from loops_cookbook.config.load import AnyConfig, ConfigT, LoadedConfig
from loops_cookbook.config.locate import ModelSource, resolve_model
from loops_cookbook.config.shared import ModelTable
from loops_cookbook.errors import ConfigError, ModelError
from loops_cookbook.journal import file_above
from loops_cookbook.problems import shown
from loops_cookbook.recipes.capabilities import engines_of, require_capable
from loops_cookbook.recipes.own_service import OwnService
from loops_cookbook.recipes.scope import CONFIGURED, Chosen, choose_scope
from loops_cookbook.renderers.detect import Detection, detect

_WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPolicy(Generic[ConfigT]):
    """What every plan has: a config, the model that it names, who trains it, and its renderer."""

    loaded: LoadedConfig[ConfigT]
    environment: Environment
    scope: Chosen
    model: ModelSource
    model_limit: int | None
    """The longest sequence that a local model takes; None where only its service can say."""
    vocabulary: int | None
    """One more than the highest token id of a local model; None likewise."""
    detection: Detection
    own_service: OwnService | None
    """The user's own, where the scope names one."""

    @property
    def config(self) -> ConfigT:
        """The validated config."""
        return self.loaded.config

    def named(self) -> Mapping[str, Any]:
        """All of it by name, for a plan that goes on from here."""
        return {each.name: getattr(self, each.name) for each in fields(PlannedPolicy)}


def plan_policy(
    loaded: LoadedConfig[ConfigT],
    environment: Environment,
    values: Mapping[str, str],
    scope: str | None,
) -> PlannedPolicy[ConfigT]:
    """Look at what a config says of its policy.

    Args:
        loaded: the config.
        environment: which `.env` files there are.
        values: the environment, those files included.
        scope: what `--scope` said.

    Raises:
        UsageError: there is no such model, renderer or scope, or they do not fit one another.
    """
    table = loaded.config.model
    model = resolve_model(table.name, loaded.directory, working_directory=loaded.working_directory)
    chosen = choose_scope(
        flag=scope,
        configured=loaded.config.compute.scope,
        environment=values,
        model_is_here=model.directory is not None,
    )
    _require_address(loaded.config, chosen)
    _require_folder(loaded)
    require_capable(loaded.config, engines_of(chosen, values))
    says = _model_config(loaded.config, model, chosen)
    return PlannedPolicy(
        loaded=loaded,
        environment=environment,
        scope=chosen,
        model=model,
        model_limit=_model_limit(table, model, says),
        vocabulary=_whole_number(says, "vocab_size"),
        detection=detect(
            model.name,
            model.directory,
            forced=table.renderer,
            tokenizer=_tokenizer(table, loaded),
            thinking_retention=table.thinking_retention,
        ),
        own_service=_own_service(loaded, chosen),
    )


def _require_address(config: AnyConfig, scope: Chosen) -> None:
    if scope.is_remote and config.compute.trainer_url is None:
        raise ConfigError(
            f"{scope.source}: scope 'remote' needs the address of a server; add [compute] "
            'trainer_url, such as "http://gpu-host:8000"'
        )


def _require_folder(loaded: LoadedConfig[AnyConfig]) -> None:
    if (file := file_above(loaded.output_dir / "a run")) is not None:
        raise ConfigError(
            f"output.output_dir: {shown(file)} is a file, where the folder of the runs is to be; "
            "name another place"
        )


def _model_config(config: AnyConfig, model: ModelSource, scope: Chosen) -> Mapping[str, object]:
    """What a local model says of itself; nothing of one that a service has."""
    if not scope.is_local:
        return {}
    if model.directory is None:
        raise ModelError(
            f"model.name: the embedded engine needs a folder, and {model.name!r} is a hub id; "
            "download it and name its folder, or name a bundled model such as models/counting"
        )
    has_weights = any(any(model.directory.glob(pattern)) for pattern in _WEIGHTS)
    if config.model.init == "pretrained" and not has_weights:
        raise ModelError(
            f"model.name: {model.directory} holds a config.json and no weights "
            f'({", ".join(_WEIGHTS)}); name a folder that has both, or set model.init = "random"'
        )
    path = model.directory / "config.json"
    try:
        raw = cast(object, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as a model's config: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: is not a model's config: it must hold a JSON object")
    says = cast(dict[str, object], raw)
    inner = says.get("text_config")  # where a model that also sees has the same keys
    return {**cast(dict[str, object], inner), **says} if isinstance(inner, dict) else says


def _model_limit(table: ModelTable, model: ModelSource, says: Mapping[str, object]) -> int | None:
    """The longest sequence of a local model, checked against the config's."""
    limit, wanted = _whole_number(says, "max_position_embeddings"), table.max_seq_len
    if limit is not None and wanted > limit:
        raise ConfigError(
            f"model.max_seq_len: found {wanted}, but {model.name} takes sequences up to {limit}; "
            f"use {limit} or less"
        )
    return limit


def _whole_number(says: Mapping[str, object], key: str) -> int | None:
    value = says.get(key)
    return value if isinstance(value, int) else None


def _tokenizer(table: ModelTable, loaded: LoadedConfig[AnyConfig]) -> str | None:
    """Another tokenizer: a folder beside the config where it is one, else a hub id."""
    if table.tokenizer is None:
        return None
    beside = loaded.beside(table.tokenizer)
    return str(beside) if beside.is_dir() else table.tokenizer


def _own_service(loaded: LoadedConfig[AnyConfig], chosen: Chosen) -> OwnService | None:
    place, table = ("compute", "options"), loaded.config.compute.options
    if chosen.factory is None:
        if table is not None:
            raise ConfigError(
                "compute.options: set, but only a service of your own takes options; name one in "
                'compute.scope, as "module:factory", or remove them'
            )
        return None
    key = "compute.scope" if chosen.source == CONFIGURED else chosen.source
    factory = import_callable(chosen.factory, loaded.directory, key=key)
    schema = getattr(factory, "options_model", None)
    return OwnService(chosen.factory, factory, loaded.options(schema, table, place=place))
