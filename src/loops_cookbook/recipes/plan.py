"""Everything a config names, looked at once, before anything is launched.

`plan_run` finds the Episode, reads every task, resolves the model, the scope and the renderer,
and refuses what cannot stand. `loops check` reports a `Plan`; `loops run` carries the same one
out, so what check accepts is what runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from anyio import CapacityLimiter
from pydantic import BaseModel, ConfigDict

from loops_cookbook.config.environment import Environment
from loops_cookbook.config.imports import import_callable, import_class
from loops_cookbook.config.load import LoadedConfig
from loops_cookbook.config.rl import EvaluationSet, RLConfig
from loops_cookbook.episodes.episode import Episode, declared
from loops_cookbook.episodes.mentions import models_named
from loops_cookbook.errors import EpisodeError
from loops_cookbook.problems import nearest
from loops_cookbook.recipes.own_runtime import declared_model, made_runtime
from loops_cookbook.recipes.policy import PlannedPolicy, plan_policy
from loops_cookbook.recipes.producers import planned_judges
from loops_cookbook.renderers.base import Renderer
from loops_cookbook.runtimes.base import Capabilities, Clocks, Runtime, RuntimeContext
from loops_cookbook.runtimes.producers import MAIN, Policy, Producer, Producers
from loops_cookbook.sandboxes.source import SandboxSource
from loops_cookbook.services.base import SampleParams, Sampler
from loops_cookbook.services.checked import CheckedSampler
from loops_cookbook.tasks import Task, load_tasks

RuntimeFactory = Callable[[RuntimeContext], Runtime]
Tasks = Sequence[Task[BaseModel]]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlannedPolicy[RLConfig]):
    """A run that can start, as far as it can be known without launching anything."""

    code: UserCode
    tasks: Tasks
    sets: tuple[PlannedSet, ...]
    capabilities: Capabilities
    others: Mapping[str, Producer]
    """Models beside the policy; to be replaced by ones that can be called."""
    sandboxes: SandboxSource | None = None
    """Opens sandboxes, once the run has begun and if its config has any."""

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
        context = replace(context, sandboxes=self.sandboxes)
        return made_runtime(self.code.create_runtime, context, self.config.runtime)


def plan_run(
    loaded: LoadedConfig[RLConfig],
    environment: Environment,
    values: Mapping[str, str],
    scope: str | None,
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
    policy = plan_policy(loaded, environment, values, scope)
    code = _user_code(loaded)
    tasks = load_tasks(loaded.beside(config.episode.tasks), code.task_model)
    sets = tuple(
        _planned(name, held_out, loaded, code.task_model)
        for name, held_out in config.evaluation.sets.items()
    )
    others = planned_judges(config.producers)
    producers = Producers(cast(Policy, _NotLaunched()), others)
    context = _context(config, tasks, code, producers)
    runtime = made_runtime(code.create_runtime, context, config.runtime)
    return Plan(
        **policy.named(),
        code=code,
        tasks=tasks,
        sets=sets,
        capabilities=runtime.capabilities,
        others=others,
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


def _user_code(loaded: LoadedConfig[RLConfig]) -> UserCode:
    config = loaded.config
    factory = import_callable(config.runtime, loaded.directory, key="runtime")
    options_model = declared_model(factory, "options_model", config.runtime)
    options = loaded.options(options_model, config.runtime_options, place=("runtime_options",))
    if config.episode.class_ is None:
        loaded.options(None, config.episode.options, place=("episode", "options"))
        task_model = declared_model(factory, "task_model", config.runtime) or AnyTask
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


def _planned(
    name: str, held_out: EvaluationSet, loaded: LoadedConfig[RLConfig], task_model: type[BaseModel]
) -> PlannedSet:
    return PlannedSet(
        name=name,
        tasks=load_tasks(loaded.beside(held_out.tasks), task_model),
        attempts=held_out.attempts,
        params=sample_params(loaded.config, held_out),
        solved_at=held_out.solved_at,
    )


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
