"""Everything a config names, looked at once, before anything is launched.

`plan_run` finds the Episode, reads every task, resolves the model, the scope and the renderer,
and refuses what cannot stand. `loops check` reports a `Plan`; `loops run` carries the same one
out, so what check accepts is what runs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from anyio import CapacityLimiter
from pydantic import BaseModel, ConfigDict

from loops_cookbook.config.environment import Environment
from loops_cookbook.config.imports import import_callable, import_class
from loops_cookbook.config.load import LoadedConfig
from loops_cookbook.config.locate import ModelSource, resolve_model
from loops_cookbook.config.rl import EvaluationSet, RLConfig
from loops_cookbook.episodes.episode import Episode, declared
from loops_cookbook.episodes.mentions import models_named
from loops_cookbook.errors import ConfigError, EpisodeError, ModelError
from loops_cookbook.problems import nearest
from loops_cookbook.recipes.own_service import OwnService
from loops_cookbook.recipes.producers import planned_judges
from loops_cookbook.recipes.scope import CONFIGURED, Chosen, choose_scope
from loops_cookbook.renderers.base import Renderer
from loops_cookbook.renderers.detect import Detection, detect
from loops_cookbook.runtimes.base import Capabilities, Clocks, Runtime, RuntimeContext
from loops_cookbook.runtimes.producers import MAIN, Policy, Producer, Producers
from loops_cookbook.sandboxes.source import SandboxSource
from loops_cookbook.services.base import SampleParams, Sampler
from loops_cookbook.services.checked import CheckedSampler
from loops_cookbook.tasks import Task, load_tasks

RuntimeFactory = Callable[[RuntimeContext], Runtime]
Tasks = Sequence[Task[BaseModel]]


_WEIGHTS = ("*.safetensors", "*.bin")


class AnyTask(BaseModel):
    """What a tasks file must hold for a runtime that names no task model: JSON objects."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True, slots=True)
class PlannedSet:
    """An evaluation set, ready to be run."""

    name: str
    tasks: Tasks
    attempts: int
    params: SampleParams
    solved_at: float


@dataclass(frozen=True, slots=True)
class UserCode:
    """What the config names of the user's own: a runtime, and an Episode where it is one."""

    create_runtime: RuntimeFactory
    runtime_options: BaseModel | None
    episode_class: type[Episode[Any, Any]] | None
    episode_options: BaseModel | None
    task_model: type[BaseModel]


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that can start, as far as it can be known without launching anything."""

    loaded: LoadedConfig
    environment: Environment
    scope: Chosen
    model: ModelSource
    model_limit: int | None
    """The longest sequence that a local model takes; None where only its service can say."""
    vocabulary: int | None
    """One more than the highest token id of a local model; None likewise."""
    code: UserCode
    tasks: Tasks
    sets: tuple[PlannedSet, ...]
    detection: Detection
    capabilities: Capabilities
    others: Mapping[str, Producer]
    """Models beside the policy; to be replaced by ones that can be called."""
    own_service: OwnService | None = None
    sandboxes: SandboxSource | None = None
    """Opens sandboxes, once the run has begun and if its config has any."""

    @property
    def config(self) -> RLConfig:
        """The validated config."""
        return self.loaded.config

    @property
    def params(self) -> SampleParams:
        """How training attempts sample."""
        return sample_params(self.config)

    @property
    def clocks(self) -> Clocks:
        """The clocks of a try, the rollout clock as the config or the runtime has it."""
        clocks = self.config.clocks
        rollout = clocks.rollout_seconds or self.capabilities.rollout_seconds
        return Clocks(
            rollout_seconds=rollout,
            setup_seconds=clocks.setup_seconds,
            grading_seconds=clocks.grading_seconds,
            release_seconds=clocks.release_seconds,
        )

    def runtime(
        self, sampler: Sampler, renderer: Renderer, limiter: CapacityLimiter | None = None
    ) -> Runtime:
        """The runtime over a policy that is really served."""
        checked = CheckedSampler(sampler, vocabulary=self.vocabulary)
        producers = Producers(Policy(MAIN, checked, renderer, limiter), self.others)
        context = _context(self.config, self.tasks, self.code, producers)
        return self.code.create_runtime(replace(context, sandboxes=self.sandboxes))


def plan_run(
    loaded: LoadedConfig, environment: Environment, values: Mapping[str, str], scope: str | None
) -> Plan:
    """Look at everything that a config names.

    Args:
        loaded: the config.
        environment: which `.env` files there are.
        values: the environment, those files included.
        scope: what `--scope` said.

    Raises:
        UsageError: something in it cannot stand, in one line or one line a fault.
    """
    config = loaded.config
    model = resolve_model(
        config.model.name, loaded.directory, working_directory=loaded.working_directory
    )
    chosen = choose_scope(
        flag=scope,
        configured=config.compute.scope,
        environment=values,
        model_is_here=model.directory is not None,
    )
    says = _model_config(config, model, chosen)
    limit = _model_limit(config, model, says)
    code = _user_code(loaded)
    tasks = load_tasks(loaded.beside(config.episode.tasks), code.task_model)
    sets = tuple(
        _planned(name, held_out, loaded, code.task_model)
        for name, held_out in config.evaluation.sets.items()
    )
    detection = detect(
        model.name,
        model.directory,
        forced=config.model.renderer,
        tokenizer=_tokenizer(config, loaded),
        thinking_retention=config.model.thinking_retention,
    )
    others = planned_judges(config.producers)
    producers = Producers(cast(Policy, _NotLaunched()), others)
    capabilities = code.create_runtime(_context(config, tasks, code, producers)).capabilities
    return Plan(
        loaded=loaded,
        environment=environment,
        scope=chosen,
        model=model,
        model_limit=limit,
        vocabulary=_whole_number(says, "vocab_size"),
        code=code,
        tasks=tasks,
        sets=sets,
        detection=detection,
        capabilities=capabilities,
        others=others,
        own_service=_own_service(loaded, chosen),
    )


def sample_params(config: RLConfig, held_out: EvaluationSet | None = None) -> SampleParams:
    """The sampling settings of training, or of an evaluation set where it differs."""
    sampling = config.sampling
    temperature, max_tokens = sampling.temperature, sampling.max_tokens
    if held_out is not None:
        temperature = temperature if held_out.temperature is None else held_out.temperature
        max_tokens = held_out.max_tokens or max_tokens
    return SampleParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=sampling.stop,
    )


class _NotLaunched:
    """Stands for the policy while nothing is launched; any use of it is a runtime's fault."""

    def __getattr__(self, name: str) -> object:
        raise EpisodeError(
            f"runtime: the factory used the policy's {name!r} before the run began; "
            "do that when the runtime is entered"
        )


def _model_config(config: RLConfig, model: ModelSource, scope: Chosen) -> Mapping[str, object]:
    """What a local model says of itself; nothing of one that a service has."""
    if scope.is_own and not config.compute.deterministic:
        return {}
    if not scope.is_local:
        _require_engine(config, scope)
        return {}
    if model.directory is None:
        raise ModelError(
            f"model.name: the embedded engine needs a folder, and {model.name!r} is a hub id; "
            "download it and name its folder, or name a bundled model such as models/counting"
        )
    if not any(any(model.directory.glob(pattern)) for pattern in _WEIGHTS):
        raise ModelError(
            f"model.name: {model.directory} holds a config.json and no weights "
            f"({', '.join(_WEIGHTS)}); name a folder that has both"
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


def _model_limit(config: RLConfig, model: ModelSource, says: Mapping[str, object]) -> int | None:
    """The longest sequence of a local model, checked against the config's."""
    limit, wanted = _whole_number(says, "max_position_embeddings"), config.model.max_seq_len
    if limit is not None and wanted > limit:
        raise ConfigError(
            f"model.max_seq_len: found {wanted}, but {model.name} takes sequences up to {limit}; "
            f"use {limit} or less"
        )
    return limit


def _whole_number(says: Mapping[str, object], key: str) -> int | None:
    value = says.get(key)
    return value if isinstance(value, int) else None


def _require_engine(config: RLConfig, scope: Chosen) -> None:
    """Refuse what the embedded engine alone can do; a server may be one."""
    if config.model.lora_rank == 0 and not scope.is_remote:
        raise ConfigError(
            "model.lora_rank: found 0 (every weight), which only the embedded engine trains; "
            "use 1 or more"
        )
    if config.compute.deterministic:
        raise ConfigError(
            "compute.deterministic: found true, which only the embedded engine does (scope "
            "local); remove it"
        )


def _user_code(loaded: LoadedConfig) -> UserCode:
    config = loaded.config
    factory = import_callable(config.runtime, loaded.directory, key="runtime")
    options = loaded.options(
        getattr(factory, "options_model", None), config.runtime_options, place=("runtime_options",)
    )
    if config.episode.class_ is None:
        loaded.options(None, config.episode.options, place=("episode", "options"))
        task_model = getattr(factory, "task_model", AnyTask)
        return UserCode(factory, options, None, None, task_model)
    episode_class = import_class(
        config.episode.class_, loaded.directory, key="episode.class", base=Episode
    )
    says = declared(episode_class)
    _require_producers(episode_class, config)
    episode_options = loaded.options(
        says.options_model, config.episode.options, place=("episode", "options")
    )
    return UserCode(factory, options, episode_class, episode_options, says.task_model)


def _require_producers(episode_class: type[Episode[Any, Any]], config: RLConfig) -> None:
    known = (MAIN, *config.producers)
    for name, place in models_named(episode_class).items():
        if name not in known:
            near = nearest(name, known)
            guess = f", or did you mean {near}?" if near else ""
            raise EpisodeError(
                f"{place}: asks for the model {name!r}, and the config has no "
                f"[producers.{name}]; add it{guess}"
            )


def _own_service(loaded: LoadedConfig, chosen: Chosen) -> OwnService | None:
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


def _planned(
    name: str, held_out: EvaluationSet, loaded: LoadedConfig, task_model: type[BaseModel]
) -> PlannedSet:
    return PlannedSet(
        name=name,
        tasks=load_tasks(loaded.beside(held_out.tasks), task_model),
        attempts=held_out.attempts,
        params=sample_params(loaded.config, held_out),
        solved_at=held_out.solved_at,
    )


def _tokenizer(config: RLConfig, loaded: LoadedConfig) -> str | None:
    """Another tokenizer: a folder beside the config where it is one, else a hub id."""
    named = config.model.tokenizer
    if named is None:
        return None
    beside = loaded.beside(named)
    return str(beside) if beside.is_dir() else named


def _context(
    config: RLConfig, tasks: Tasks, code: UserCode, producers: Producers
) -> RuntimeContext:
    return RuntimeContext(
        tasks=tasks,
        options=code.runtime_options,
        episode_class=code.episode_class,
        episode_options=code.episode_options,
        producers=producers,
        max_seq_len=config.model.max_seq_len,
        rollout_seconds=config.clocks.rollout_seconds,
        release_seconds=config.clocks.release_seconds,
    )
