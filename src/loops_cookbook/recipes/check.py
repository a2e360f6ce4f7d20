"""What `loops check` says of a plan: the report's lines, and the warnings after them.

A `CheckReport` is a value; the command prints it and tests compare it. The lines, their order
and their wording are fixed; a line that cannot be true yet (the model's, where nothing
confirmed it) is left out and a warning says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from loops_cookbook.episodes.mentions import tools_declared
from loops_cookbook.episodes.near_misses import near_misses
from loops_cookbook.recipes.capabilities import (
    client_warning,
    engines_of,
    ignored,
    installed_client,
)
from loops_cookbook.recipes.confirm import UNASKED, Confirmation
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.plans import AnyPlan
from loops_cookbook.recipes.producers import producer_warnings
from loops_cookbook.recipes.proportion import proportion_warnings
from loops_cookbook.recipes.sandboxes import sandbox_warnings, sandboxes_line
from loops_cookbook.recipes.scope import (
    KEY_VARIABLE,
    TINKER_KEY_VARIABLE,
    TINKER_URL,
    TINKER_URL_VARIABLE,
    WAYS_OUT,
)
from loops_cookbook.recipes.start import start_of
from loops_cookbook.renderers.detect import Detection
from loops_cookbook.renderers.images import images_line
from loops_cookbook.runtimes.producers import producers_summary
from loops_cookbook.services.extras import LOCAL, is_installed, namesake
from loops_cookbook.tasks import Task

LAST_LINE = "Configuration and runtime checked; no sandbox or Loops trainer launched."


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The report, line for line."""

    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    renderer: Detection
    excerpt: tuple[str, ...] = ()
    """Data to look at, shown after the lines."""

    def to_json(self) -> dict[str, object]:
        """The report for machines: each `Name: value` line as a key."""
        named = [line.strip().partition(": ") for line in self.lines]
        fields = {name: value for name, colon, value in named if colon}
        told = self.renderer
        is_known = told.renderer is not None
        return {
            "report": fields,
            "stops": list(told.stops),
            "turns_extend": told.why_not_extended is None if is_known else None,
            "why_not_extended": told.why_not_extended,
            "tool_results_extend": told.extends_results if is_known else None,
            "tools": told.why_no_tools is None if is_known else None,
            "why_no_tools": told.why_no_tools,
            "lines": list(self.lines),
            "excerpt": list(self.excerpt),
            "warnings": list(self.warnings),
        }


def check_report(
    plan: Plan, values: Mapping[str, str], confirmation: Confirmation = UNASKED
) -> CheckReport:
    """Report a plan; launches nothing and needs no network.

    Args:
        plan: what is reported.
        values: the environment.
        confirmation: what hosted Loops says of the model, where it trains.

    Raises:
        SandboxUnavailable, MissingExtra: what makes the config's sandboxes is not here.
    """
    config, training = plan.config, plan.config.training
    sandboxes = sandboxes_line(config.sandbox)
    lines = [
        *head_lines(plan),
        *model_lines(plan, values, confirmation),
        *start_lines(plan),
        f"Runtime: {config.runtime}; tasks: {len(plan.tasks)}",
        _capabilities_line(plan),
        f"Renderer: {plan.detection.line}",
        f"Images: {images_told(plan)}",
        _mode_line(plan),
        f"Loss: {training.loss}",
        f"Loss aggregation: {training.loss_aggregation}",
        _clock_line(plan),
        f"Concurrency: {config.sampling_slots} sampling "
        f"(+{config.concurrency.start_ahead} started ahead); {config.grading_slots} grading",
        f"Producers: {producers_summary(plan.others)}",
        *([sandboxes] if sandboxes else []),
        LAST_LINE,
    ]
    return CheckReport(tuple(lines), warnings_of(plan, values, confirmation), plan.detection)


def head_lines(plan: AnyPlan) -> list[str]:
    """Where the config, what it names and its runs lie."""
    loaded = plan.loaded
    return [
        f"Config: {loaded.path}",
        f"  paths, modules: beside {loaded.directory}",
        f"  .env: {plan.environment.summary}",
        f"  runs: {loaded.output_dir}",
    ]


def model_lines(plan: AnyPlan, values: Mapping[str, str], confirmation: Confirmation) -> list[str]:
    """The model and who trains it, where that was confirmed."""
    length = f"max_seq_len {plan.config.model.max_seq_len}"
    if plan.scope.is_own:
        return [f"Service: {plan.scope.factory}; model {plan.model.name}; {length}"]
    if plan.scope.is_remote:
        url = plan.config.compute.trainer_url
        return [f"Remote: {url}; model {plan.model.name}; {length}"]
    if plan.scope.is_tinker:
        url = values.get(TINKER_URL_VARIABLE) or TINKER_URL
        return [f"Tinker: {url}; model {plan.model.name}; {length}"]
    if plan.scope.is_hosted:
        if not confirmation.is_confirmed:
            return []
        limit = "" if confirmation.limit is None else f" (enabled up to {confirmation.limit})"
        return [f"Loops model: {plan.model.name}; {length}{limit}"]
    limit = f" (up to {plan.model_limit})" if plan.model_limit else ""
    weights = "; random weights" if plan.config.model.init == "random" else ""
    return [f"Local model: {plan.model.name}; {length}{limit}{weights}"]


def start_lines(plan: AnyPlan) -> list[str]:
    """The checkpoint that training starts from, where the config names one.

    Raises:
        UsageError: it is not there, or does not fit.
    """
    start = start_of(plan)
    if start is None:
        return []
    of = f" (update {start.located.row.update})" if start.located is not None else ""
    return [f"Starts from: {start.name}{of}"]


def images_told(plan: AnyPlan) -> str:
    """What becomes of images in messages."""
    engine = "the embedded engine" if plan.scope.is_local else None
    return images_line(plan.model.name, plan.model.directory, engine=engine)


def _capabilities_line(plan: Plan) -> str:
    says = plan.capabilities
    retries = f"grading retries {says.grading_retries} ({says.grading_retries_from})"
    return (
        f"Capabilities: model access {says.model_access} ({says.model_access_from}); "
        f"runtime-acquired phases {', '.join(says.acquires) or 'none'}; {retries}; "
        f"group grading {'true' if says.grades_groups else 'false'}"
    )


def _mode_line(plan: Plan) -> str:
    training = plan.config.training
    bound = f", max_staleness {training.max_staleness}" if training.mode == "async" else ""
    batch = f"{training.groups_per_update} × {training.group_size}"
    return f"Mode: {training.mode}{bound}; batch: {batch}"


def _clock_line(plan: Plan) -> str:
    how = "derived by the runtime"
    if plan.config.clocks.rollout_seconds is not None:
        how = "set in [clocks]"
    return f"Rollout clock: {plan.clocks.rollout_seconds:g}s ({how})"


def warnings_of(
    plan: Plan, values: Mapping[str, str], confirmation: Confirmation = UNASKED
) -> tuple[str, ...]:
    """What to know before a run, one line each, with what to do."""
    return (
        *engine_warnings(plan, values, confirmation),
        *producer_warnings(plan.config.producers, values),
        *plan.detection.warnings,
        *proportion_warnings(plan),
        *_tool_warnings(plan),
        *_episode_warnings(plan),
        *_mode_warnings(plan),
        *_bias_warnings(plan),
        *_set_warnings(plan),
        *sandbox_warnings(plan.config.sandbox, values),
        *plan.environment.warnings(),
    )


def evaluation_warnings(
    plan: Plan, values: Mapping[str, str], confirmation: Confirmation = UNASKED
) -> tuple[str, ...]:
    """What to know before an evaluation alone: all but what is of training."""
    return (
        *engine_warnings(plan, values, confirmation),
        *producer_warnings(plan.config.producers, values),
        *plan.detection.warnings,
        *_tool_warnings(plan),
        *_episode_warnings(plan),
        *_set_warnings(plan),
        *sandbox_warnings(plan.config.sandbox, values),
        *plan.environment.warnings(),
    )


def engine_warnings(
    plan: AnyPlan, values: Mapping[str, str], confirmation: Confirmation
) -> list[str]:
    """What a run needs that is not here, and what its service is not told."""
    if plan.scope.is_local and not is_installed(LOCAL):
        return [
            "the embedded engine needs the extra 'local', which is not installed; `loops run` "
            'needs it: run `uv add "loops-cookbook[local]"`'
        ]
    engines = engines_of(plan.scope, values)
    found = list(ignored(plan.config, engines))
    if plan.scope.is_hosted:
        return [*_unconfirmed(plan, values, confirmation), *found]
    if plan.scope.is_remote:
        return [*_keyless(plan, values), *found]
    if plan.scope.is_tinker:
        client = client_warning(engines, installed_client(), namesake("tinker"))
        return [*_without_tinker_key(values), *([client] if client else []), *found]
    return found


def _without_tinker_key(values: Mapping[str, str]) -> list[str]:
    if values.get(TINKER_KEY_VARIABLE):
        return []
    return [
        f"{TINKER_KEY_VARIABLE}: neither the environment nor .env has it; `loops run` needs it, so "
        "set it (SkyRL takes any that begins with tml-)"
    ]


def _keyless(plan: AnyPlan, values: Mapping[str, str]) -> list[str]:
    variable = plan.config.compute.api_key_env
    if variable is None or values.get(variable):
        return []
    return [f"compute.api_key_env: neither the environment nor .env has {variable}; set it"]


def _unconfirmed(plan: AnyPlan, values: Mapping[str, str], confirmation: Confirmation) -> list[str]:
    if confirmation.is_confirmed:
        return []
    needs = ""
    if not values.get(KEY_VARIABLE):
        needs = f"; `loops run` needs {KEY_VARIABLE} in the environment or .env; or {WAYS_OUT}"
    return [
        f"{plan.model.name} at max_seq_len {plan.config.model.max_seq_len} was not confirmed: "
        f"{confirmation.why_not}{needs}"
    ]


def _tool_warnings(plan: Plan) -> list[str]:
    """An agent with tools before a model that cannot be given any: every attempt would fail."""
    why, agent = plan.detection.why_no_tools, plan.code.episode_class
    place = tools_declared(agent) if why and agent else None
    if place is None:
        return []
    return [
        f"{place}: gives the model tools, and {plan.model.name} cannot be given any ({why}), so "
        "every attempt would fail; take another model, or describe the tools in a message and read "
        "the calls from reply.content"
    ]


def _episode_warnings(plan: Plan) -> tuple[str, ...]:
    """What an Episode defines that nobody will call."""
    agent = plan.code.episode_class
    return near_misses(agent) if agent else ()


def _mode_warnings(plan: Plan) -> list[str]:
    training = plan.config.training
    if training.mode == "async" or "max_staleness" not in training.model_fields_set:
        return []
    return [
        "training.max_staleness: has no effect in sync mode, where nothing is stale; set "
        'training.mode = "async", or remove it'
    ]


def _bias_warnings(plan: Plan) -> list[str]:
    """Sampling that the trainer's ratio does not know of."""
    sampling = plan.config.sampling
    found: list[str] = []
    if sampling.top_p < 1:
        found.append(f"sampling.top_p = {sampling.top_p:g}")
    if sampling.top_k > 0:
        found.append(f"sampling.top_k = {sampling.top_k}")
    if sampling.temperature != 1 and not plan.scope.is_local:
        found.append(f"sampling.temperature = {sampling.temperature:g}")
    return [
        f"{key}: tokens are drawn from another distribution than the trainer scores them under, "
        "which biases the ratio of every update; remove it, or know that you want it"
        for key in found
    ]


def _set_warnings(plan: Plan) -> list[str]:
    return [*_greedy_warnings(plan), *_relative_warnings(plan), *_task_warnings(plan)]


def _relative_warnings(plan: Plan) -> list[str]:
    """Scores that say who of a group is best, and not how good that is."""
    if not plan.capabilities.grades_groups or not plan.sets:
        return []
    names = ", ".join(held_out.name for held_out in plan.sets)
    return [
        f"evaluation.sets ({names}): grade_group gives an attempt its reward among the attempts at "
        "the same task, so a mean of them does not say how good a policy is, nor which of two is "
        "better; compare what run() returns, or grade these sets by grade()"
    ]


def _greedy_warnings(plan: Plan) -> list[str]:
    """Sets whose attempts at a task would all be the same."""
    return [
        f"evaluation.sets.{held_out.name}: temperature 0 draws the same reply to the same prompt, "
        f"so its {held_out.attempts} attempts at a task (attempts) tell no more than one; set "
        "attempts = 1, or a temperature above 0"
        for held_out in plan.sets
        if held_out.params.temperature == 0 and held_out.attempts > 1
    ]


def _task_warnings(plan: Plan) -> list[str]:
    """Tasks that are both trained on and held out."""
    trained = {*map(_as_json, plan.tasks)} - {None}
    warnings: list[str] = []
    for held_out in plan.sets:
        shared = sum(_as_json(task) in trained for task in held_out.tasks)
        if shared:
            warnings.append(
                f"evaluation.sets.{held_out.name}: {shared} of its {len(held_out.tasks)} tasks are "
                "also trained on, so it does not show what holds on new tasks; use other ones"
            )
    return warnings


def _as_json(task: Task[BaseModel]) -> str | None:
    """A task, to be compared; None for one that JSON cannot hold."""
    try:
        return task.value.model_dump_json()
    except Exception:  # a serializer of the user's model may raise anything
        return None
