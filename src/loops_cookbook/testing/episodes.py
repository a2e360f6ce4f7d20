"""Try an Episode in a unit test: the real road of an attempt or a group, with a scripted model.

The Episode goes through its own runtime and the scheduler's own code, so it is set up, cut, graded
and closed as in a run. Only the model is a script, and its chat format `PlainRenderer`. In a group
each attempt has a script of its own, and they take their turns one after another.
"""

import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, TypeVar, cast

from pydantic import BaseModel, Field, ValidationError

from loops_cookbook.attempts import Attempt, Call, Fate, Rejection, Scalar
from loops_cookbook.config.base import Count, Seconds, StrictModel
from loops_cookbook.config.sandbox import SandboxTable
from loops_cookbook.episodes.episode import Episode, declared
from loops_cookbook.episodes.runtime import create_runtime
from loops_cookbook.errors import EpisodeError
from loops_cookbook.learning.advantages import judge
from loops_cookbook.problems import NotItself, found, itself, problems_in
from loops_cookbook.recipes.sandboxes import sandboxes_of
from loops_cookbook.rollouts.attempt import GroupStart
from loops_cookbook.rollouts.group import run_group
from loops_cookbook.rollouts.keeper import open_keeper
from loops_cookbook.rollouts.limits import Limits
from loops_cookbook.rollouts.trial import AttemptContext, AttemptRules, SamplingTerms
from loops_cookbook.runtimes.base import (
    Capabilities,
    Clocks,
    Graded,
    Lease,
    Place,
    Runtime,
    RuntimeContext,
)
from loops_cookbook.runtimes.producers import MAIN, Judge, Policy, Producer, Producers
from loops_cookbook.sandboxes.source import SandboxSource
from loops_cookbook.services.base import Chat, SampleParams
from loops_cookbook.tasks import Task
from loops_cookbook.testing.given import require
from loops_cookbook.testing.judges import ChatScript, ScriptedChat
from loops_cookbook.testing.scripted import Script, ScriptedSampler
from loops_cookbook.testing.tokenizer import PlainRenderer

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a config would say about an attempt. Tokens are bytes: one for each ASCII letter."""

    max_tokens: int = 1024
    """Per reply."""
    max_attempt_tokens: int | None = None
    max_seq_len: int = 16_384
    rollout_seconds: float | None = None
    """When the agent is cut; None: as the Episode has it."""
    setup_seconds: float = 60.0
    grading_seconds: float = 60.0
    release_seconds: float = 30.0
    sandbox: Mapping[str, object] = field(default_factory=dict[str, object])
    """The table `[sandbox]`; sandboxes are real ones, on this machine."""
    max_rollout_retries: int = 0
    """Each try goes on with the script where the one before left it."""
    models: Mapping[str, ChatScript | Chat] = field(default_factory=dict[str, "ChatScript | Chat"])
    """Other models that the Episode calls, such as a judge, by name: what each answers, or a
    `ScriptedChat` to look at afterwards."""

    def __post_init__(self) -> None:
        require("Terms", _TermsGiven, {name: getattr(self, name) for name in _TERMS})


class _TermsGiven(StrictModel):
    """What each may be; the sandbox and the models are looked at when they are made."""

    max_tokens: Count
    max_attempt_tokens: Count | None
    max_seq_len: Annotated[int, Field(ge=2)]
    rollout_seconds: Seconds | None
    setup_seconds: Seconds
    grading_seconds: Seconds
    release_seconds: Seconds
    max_rollout_retries: Annotated[int, Field(ge=0)]


_TERMS = tuple(_TermsGiven.model_fields)


@dataclass(frozen=True, slots=True)
class Tried:
    """What an attempt came to."""

    reward: float | None
    fate: Fate | None
    """Why there is no reward; None where there is one."""
    detail: str
    """One line on the fate: what happened and where."""
    metadata: Mapping[str, Scalar]
    timed_out: bool
    replies_used: int
    """Replies of the policy's script that were asked for."""
    transcript: tuple[Call, ...] = field(repr=False)
    """Every model call, in the order of their ends."""
    prompts: tuple[str, ...] = field(repr=False)
    """The prompts that the policy got, as text, such as `<|user|>2 + 2?<|end|><|assistant|>`."""
    attempt: Attempt = field(repr=False)
    """All that the scheduler would hand on, exact tokens included."""


@dataclass(frozen=True, slots=True)
class TriedGroup:
    """What a group came to."""

    attempts: tuple[Tried, ...]
    """One for each script, in order."""
    unusable: str | None
    """Why the group would not be trained on: `no_variance` or `too_few`; None where it would."""

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """The attempts' rewards, in order."""
        return tuple(tried.reward for tried in self.attempts)


async def attempt(
    episode_class: type[Episode[Any, Any]],
    task: BaseModel | Mapping[str, object],
    *,
    replies: Script,
    options: BaseModel | Mapping[str, object] | None = None,
    terms: Terms | None = None,
) -> Tried:
    """Make one attempt at a task, with a model that answers from a script.

    Args:
        episode_class: the Episode; with `grade_group` it is graded as a group of one.
        task: the task's value, or a mapping that its model validates.
        replies: what the policy answers, call by call; see `Script`.
        options: the options, or a mapping that their model validates.
        terms: what a config would set, and what other models answer.

    Raises:
        EpisodeError: the class, the task, the options or the terms cannot be used.
    """
    group = await attempt_group(
        episode_class, task, replies=[replies], options=options, terms=terms
    )
    return group.attempts[0]


async def attempt_group(
    episode_class: type[Episode[Any, Any]],
    task: BaseModel | Mapping[str, object],
    *,
    replies: Sequence[Script],
    options: BaseModel | Mapping[str, object] | None = None,
    terms: Terms | None = None,
) -> TriedGroup:
    """Make a group of attempts at one task, and grade it as a run would.

    Args:
        episode_class: the Episode.
        task: the task's value, or a mapping that its model validates.
        replies: a script for each attempt, `[["yes"], ["no"]]`: what the policy answers in it.
        options: the options, or a mapping that their model validates.
        terms: what a config would set, and what other models answer.

    Raises:
        EpisodeError: the class, the task, the options, the terms or a script cannot be used.
    """
    terms = _terms(terms)
    _require_scripts(replies)
    says = declared(episode_class)
    value = _validated(says.task_model, task, "the task")
    given = _options(says.options_model, options)
    name = getattr(value, "name", None)
    made: Task[BaseModel] = Task(0, name if isinstance(name, str) else "test", value, "test")
    samplers = [ScriptedSampler(script) for script in replies]
    others = _others(terms)

    def runtime_of(sampler: ScriptedSampler, sandboxes: SandboxSource | None) -> Runtime:
        return create_runtime(
            RuntimeContext(
                tasks=(made,),
                options=None,
                episode_class=episode_class,
                episode_options=given,
                producers=Producers(Policy(MAIN, sampler, PlainRenderer()), others),
                max_seq_len=terms.max_seq_len,
                rollout_seconds=terms.rollout_seconds,
                release_seconds=terms.release_seconds,
                sandboxes=sandboxes,
            )
        )

    table = _validated(SandboxTable, terms.sandbox, "the sandbox")
    async with sandboxes_of(table, f"test-{secrets.token_hex(4)}") as sandboxes:
        runtimes = [runtime_of(sampler, sandboxes) for sampler in samplers]
        return await _tried(_OneEach(runtimes), samplers, made, terms)


class _OneEach:
    """A runtime of its own for each attempt of a group, as one; implements `Runtime`."""

    def __init__(self, runtimes: Sequence[Runtime]) -> None:
        self._runtimes = runtimes
        self._open = AsyncExitStack()

    @property
    def capabilities(self) -> Capabilities:
        """Those that all share."""
        return self._runtimes[0].capabilities

    async def __aenter__(self) -> Self:
        for runtime in self._runtimes:
            await self._open.enter_async_context(runtime)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._open.aclose()

    def open(self, task: Task[BaseModel], place: Place) -> AbstractAsyncContextManager[Lease]:
        """A lease of the attempt's own runtime."""
        return self._runtimes[place.attempt].open(task, place)

    async def grade_group(self, task: Task[BaseModel], attempts: Sequence[Graded]) -> object:
        """What the group grader says; any of the runtimes can ask it."""
        return await self._runtimes[0].grade_group(task, attempts)


async def _tried(
    runtime: Runtime, samplers: Sequence[ScriptedSampler], task: Task[BaseModel], terms: Terms
) -> TriedGroup:
    clocks = Clocks(
        rollout_seconds=terms.rollout_seconds or runtime.capabilities.rollout_seconds,
        setup_seconds=terms.setup_seconds,
        grading_seconds=terms.grading_seconds,
        release_seconds=terms.release_seconds,
    )
    async with runtime, open_keeper() as keeper:
        context = AttemptContext(
            runtime=runtime,
            # One at a time: a judge's script is then used in the order of the attempts.
            limits=Limits(sampling=1, grading=1),
            keeper=keeper,
            rules=AttemptRules(clocks, terms.max_seq_len, terms.max_rollout_retries),
            terms=SamplingTerms(
                SampleParams(max_tokens=terms.max_tokens),
                max_attempt_tokens=terms.max_attempt_tokens,
            ),
        )
        group = await run_group(context, GroupStart(serial=0, task=task), size=len(samplers))
    verdict = judge(group)
    return TriedGroup(
        attempts=tuple(map(_as_tried, group.attempts, samplers)),
        unusable=verdict.reason if isinstance(verdict, Rejection) else None,
    )


def _as_tried(ended: Attempt, sampler: ScriptedSampler) -> Tried:
    return Tried(
        reward=ended.reward,
        fate=ended.discarded.fate if ended.discarded else None,
        detail=ended.discarded.detail if ended.discarded else "",
        metadata=ended.metadata,
        timed_out=ended.flags.timed_out,
        replies_used=len(sampler.calls),
        transcript=ended.calls,
        prompts=tuple(call.prompt for call in sampler.calls),
        attempt=ended,
    )


def _others(terms: Terms) -> dict[str, Producer]:
    models = cast(object, terms.models)
    if not isinstance(models, Mapping) or MAIN in models:
        raise EpisodeError(
            f"Terms(): models is {found(terms.models)}: give the models beside the policy by name, "
            'such as {"judge": ["yes"]}'
        )
    return {name: Judge(name, _chat(name, answers)) for name, answers in terms.models.items()}


def _chat(name: str, answers: ChatScript | Chat) -> Chat:
    if callable(answers) or isinstance(answers, Sequence):
        return ScriptedChat(answers)
    if not callable(getattr(answers, "complete", None)):
        raise EpisodeError(
            f"Terms(): models[{name!r}] is {found(answers)}: give a list with a step for each "
            "call, a function, or a ScriptedChat"
        )
    return answers


def _require_scripts(given: object) -> None:
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise EpisodeError(
            f"attempt_group() was given the replies {found(cast(object, given))}: give a script "
            'for each attempt, such as [["yes"], ["no"]]'
        )


def _terms(given: object) -> Terms:
    if given is None or isinstance(given, Terms):
        return given or Terms()
    raise EpisodeError(
        f"attempt() was given the terms {found(given)}: give them as Terms(grading_seconds=5)"
    )


def _options(model: type[BaseModel] | None, given: object) -> BaseModel | None:
    if model is not None:
        return _validated(model, given or {}, "options")
    if given is not None:
        raise EpisodeError(
            f"attempt() was given the options {found(given)}, and the Episode takes none: name "
            "their model in its bases, Episode[MyTask, MyOptions], or leave them out"
        )
    return None


def _validated(model: type[ModelT], given: object, what: str) -> ModelT:
    if isinstance(given, model):
        return given
    try:
        return itself(model.model_validate(given), model)
    except (ValidationError, NotItself) as error:
        problems = "; ".join(map(str, problems_in(error, model)))
        raise EpisodeError(
            f"{what} given to attempt() is no {model.__name__}: {problems}"
        ) from error
