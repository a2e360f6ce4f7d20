"""A runtime over an agent of one's own: it gives the agent a way to ask, and keeps the tokens.

A runtime lives as long as the run, a lease as long as one try. `recorded` is what is trained: a
`Turn` for each call, its prompt's ids exactly as they were sent.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from counter import Messages, count
from pydantic import BaseModel, ConfigDict

from loops_cookbook.runtimes import (
    Capabilities,
    Graded,
    Place,
    Recorded,
    RuntimeContext,
    Slot,
)
from loops_cookbook.tasks import Task
from loops_cookbook.tokens import Ids, Trajectory, Turn


class CountTask(BaseModel):
    """One line of the dataset."""

    model_config = ConfigDict(extra="forbid")

    name: str
    instruction: str
    answer: str


class Options(BaseModel):
    """The table [runtime_options]."""

    model_config = ConfigDict(extra="forbid")

    turns: int = 3
    wrong: float = 0.0  # the reward of a wrong answer


class CounterLease:
    """One try."""

    def __init__(self, context: RuntimeContext, task: Task[Any], place: Place) -> None:
        self._policy = context.producers.main
        self._window = context.max_seq_len
        self._options: Any = context.options
        self._task: CountTask = task.value
        self._place = place
        self._turns: list[Turn] = []
        self._answer = ""
        self._turns_taken = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Give back what the try holds: here nothing."""

    async def setup(self) -> None:
        """Prepare: here nothing."""

    async def run(self, slot: Slot) -> None:
        async with slot:  # waits for room to sample, then starts the rollout clock
            self._answer, self._turns_taken = await count(
                self._task.instruction, self._ask, turns=self._options.turns
            )

    async def grade(self, *, timed_out: bool) -> float:
        return 1.0 if self._answer == self._task.answer else self._options.wrong

    def recorded(self) -> Recorded:
        return Recorded(
            trajectory=Trajectory(tuple(self._turns)),
            metadata={"turns": self._turns_taken, "is_number": self._answer.isdecimal()},
        )

    async def _ask(self, messages: Messages) -> str:
        policy, place = self._policy, self._place
        prompt_ids = await policy.off_load(lambda: self._prompt(messages))
        room = min(place.params.max_tokens, self._window - len(prompt_ids))
        if room < 1:
            return ""  # the window is full: the agent makes do with nothing
        (sampled,) = await policy.sampler.sample(
            prompt_ids,
            replace(
                place.params,
                max_tokens=room,
                stop_token_ids=policy.renderer.stop_token_ids,
                seed=place.call_seed(len(self._turns)),
            ),
            min_policy_version=place.policy_version,
            affinity_key=place.affinity_key,
        )
        self._turns.append(Turn(prompt_ids, sampled))
        parsed = await policy.off_load(lambda: policy.renderer.parse(sampled.ids))
        return parsed.content or ""

    def _prompt(self, messages: Messages) -> Ids:
        """The recorded tokens and what is new; rendered anew where there are none, or none fit."""
        renderer = self._policy.renderer
        if self._turns:
            last = self._turns[-1]
            ids = renderer.extend(last.prompt_ids, last.sampled.ids, messages[-1:])
            if ids is not None:
                return ids
        return renderer.render(messages)


class CounterRuntime:
    """Opens a lease for each try."""

    options_model = Options
    task_model = CountTask
    capabilities = Capabilities(acquires=("sampling",), grading_retries=0, rollout_seconds=30)

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close what the runtime holds for the run: here nothing."""

    def open(self, task: Task[Any], place: Place) -> CounterLease:
        return CounterLease(self._context, task, place)

    async def grade_group(self, task: Task[Any], attempts: Sequence[Graded]) -> object:
        raise NotImplementedError("capabilities say that attempts are graded one by one")


create = CounterRuntime
