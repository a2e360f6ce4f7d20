"""The whole of a config with `recipe = "rl"`: every key, every default, every rule between keys.

Nothing here reads a file or imports a heavy library; a value that stands is one that a run can
start from, as far as the config alone can tell.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Literal, cast

from pydantic import Field, field_validator, model_validator

from loops_cookbook.config.base import Count, Seconds, StrictModel, Text
from loops_cookbook.config.producers import ProducerTable
from loops_cookbook.config.sandbox import SandboxTable
from loops_cookbook.config.shared import (
    AdamTable,
    ComputeTable,
    ModelTable,
    OutputTable,
    SamplingTable,
)
from loops_cookbook.learning.advantages import AdvantageKind
from loops_cookbook.learning.datums import Aggregation
from loops_cookbook.learning.losses import PULLING_LOSSES, resolve_options
from loops_cookbook.learning.schedules import ScheduleKind
from loops_cookbook.problems import Problem

DEFAULT_RUNTIME = "loops_cookbook.episodes:create_runtime"
"""The runtime that runs Episodes."""

MOST_SLOTS = 1024
"""The most model calls (and gradings) at once, unless `[concurrency]` says otherwise."""

_SET_NAME = re.compile(r"[A-Za-z0-9_-]+\Z")
_MAIN = "main"
"""The policy's own name among the producers."""


class EpisodeTable(StrictModel):
    """The tasks, and the Episode that is run on them."""

    class_: Text | None = Field(default=None, alias="class")
    """The Episode class as `module:Class`, its module beside the config. The default runtime needs
    it."""

    tasks: Text
    """The tasks file, beside the config: one JSON object a line."""

    options: dict[str, object] | None = None
    """Options of the Episode, validated by its options model."""


class TrainingTable(StrictModel):
    """What is trained on, how far and how fast. An update is one optimizer step on one batch."""

    updates: Count | None = 50
    """Updates that the run makes. 50 unless `epochs` is set; only one of the two may be."""

    epochs: Count | None = None
    """Times that the run goes through the tasks. Unset: as often as `updates` needs."""

    groups_per_update: Count = 1
    """Usable groups that make a batch."""

    group_size: int = 16
    """Attempts at a task that make a group, 2 or more."""

    learning_rate: Annotated[float, Field(gt=0)] = 4e-5
    """Suits LoRA on models of 1B parameters and more."""

    schedule: ScheduleKind = "constant"
    """How the learning rate falls over the run's updates: not at all, or to 0."""

    warmup: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises from 0."""

    loss: Literal["cispo", "ppo", "importance_sampling", "dro", "dppo"] = "cispo"
    """The policy's loss. `dro` and `dppo` also pull the policy back to the one that sampled, and
    need `loss_aggregation = "sum"`."""

    loss_options: dict[str, object] = Field(default_factory=dict[str, object])
    """Options of the loss. `cispo` and `ppo`: `clip_low_threshold` (0.8) and `clip_high_threshold`
    (1.2), both bounds of the ratio itself. `dro`: `beta` (0.05), the strength of the pull. `dppo`:
    `dppo_mask_high` (0.2) and `dppo_mask_low` (0.2), how far a token's probability may have risen
    or fallen before its advantage no longer counts; `adv_tau` (1.0), which scales advantages;
    `kl_tau` (0.001), the strength of the pull."""

    loss_aggregation: Aggregation = "sum"
    """How the losses of a batch's tokens become one: `sum`; `token_mean`, divided by the number of
    trained tokens; `attempt_mean`, each attempt's divided by its own, then by the number of
    attempts."""

    advantage: AdvantageKind = "mean"
    """`mean`: reward minus the group's mean; `mean_std`: that divided by the group's sample
    standard deviation; `rloo`: reward minus the mean of the group's other rewards."""

    mode: Literal["sync", "async"] = "sync"
    """`sync`: every batch was sampled by the very policy that it trains, and sampling waits while
    the trainer works. `async`: sampling goes on, by the newest policy that is there."""

    max_staleness: Annotated[int, Field(ge=0)] = 2
    """With `mode = "async"`: updates that may lie between a group's start and its training."""

    max_rollout_retries: Annotated[int, Field(ge=0)] = 2
    """Tries again, for an attempt whose `setup` or `run` raised."""

    max_consecutive_unusable_groups: Annotated[int, Field(ge=0)] = 20
    """Rejected groups in a row that stop the run; of its first groups 3, where every attempt of
    them failed at the same line. 0: never."""

    checkpoint_every: Annotated[int, Field(ge=0)] = 10
    """Updates between two checkpoints. There is one after the last update besides, and one where an
    evaluation is the best so far. 0: only those two."""

    keep: Annotated[int, Field(ge=0)] = 2
    """Checkpoints that stay: so many of the newest, the last at least, and the best besides."""

    shuffle: bool = True
    """Whether each epoch draws the tasks in an order of its own."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Of the order of tasks and of every model call."""

    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient. 0: no limit."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of the optimizer (AdamW)."""

    adam: AdamTable = AdamTable()

    @model_validator(mode="before")
    @classmethod
    def _epochs_replace_updates(cls, table: object) -> object:
        if not isinstance(table, dict):
            return table
        given = cast(dict[str, object], table)
        return {"updates": None, **given} if "epochs" in given else given

    @field_validator("group_size")
    @classmethod
    def _a_group(cls, size: int) -> int:
        if size < 2:
            raise ValueError(
                f"found {size}; use 2 or more: an attempt is judged against the others of its group"
            )
        return size

    @property
    def staleness_bound(self) -> int:
        """Updates that may lie between a group's start and its training: none in sync mode."""
        return self.max_staleness if self.mode == "async" else 0

    def broken_rules(self) -> Iterator[Problem]:
        """The run's length is said once, warmup ends within it, the loss can be what is asked."""
        if self.updates is not None and self.epochs is not None:
            yield Problem(("epochs",), "set beside updates; keep one of the two")
        elif self.updates is not None and self.warmup > self.updates:
            yield Problem(
                ("warmup",),
                f"found {self.warmup}, more than the run's {self.updates} updates; use fewer",
            )
        if self.loss in PULLING_LOSSES and self.loss_aggregation != "sum":
            yield Problem(
                ("loss_aggregation",),
                f"found {self.loss_aggregation!r}; use 'sum' with {self.loss}: the others divide "
                "advantages, and its pull to the sampling policy would outweigh what is left",
            )
        try:
            resolve_options(self.loss, self.loss_options)
        except ValueError as error:
            yield Problem(("loss_options",), str(error))


class ConcurrencyTable(StrictModel):
    """How much goes on at once."""

    sampling: Count | None = None
    """Attempts that sample at once. Unset: all that one update needs (in async mode
    `max_staleness` + 1 of them), at most 1024."""

    grading: Count | None = None
    """Attempts that are graded at once. Unset: as many as sample by default."""

    start_ahead: Annotated[int, Field(ge=0)] = 2
    """Attempts that are set up while all sampling slots are taken."""


class ClocksTable(StrictModel):
    """Seconds that each phase of a try may take."""

    rollout_seconds: Seconds | None = None
    """When the agent is cut and graded on what it left. Unset: derived by the runtime (an Episode's
    `rollout_seconds` plus 10)."""

    setup_seconds: Seconds = 60
    """For `setup`; a try that outlasts it is tried again."""

    grading_seconds: Seconds = 60
    """For one try of `grade`."""

    release_seconds: Seconds = 30
    """For `close` and the release of what the try holds."""


class EvaluationSet(StrictModel):
    """Held-out tasks; nothing is trained on them."""

    tasks: Text
    """The tasks file, beside the config."""

    attempts: Count = 4
    """Attempts at each task."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    """0 is greedy. Unset: that of `[sampling]`."""

    max_tokens: Count | None = None
    """Tokens of one reply. Unset: those of `[sampling]`."""

    solved_at: float = 1.0
    """The reward from which an attempt counts as solved."""


class EvaluationTable(StrictModel):
    """When the held-out sets are evaluated."""

    every: Annotated[int, Field(ge=0)] = 10
    """Updates between two evaluations; there is one before the first update and one after the last
    besides. 0: only those two."""

    sets: dict[str, EvaluationSet] = Field(default_factory=dict[str, EvaluationSet])
    """The sets by name."""

    def broken_rules(self) -> Iterator[Problem]:
        """There is something to evaluate, under names that metrics and files can carry."""
        if "every" in self.model_fields_set and not self.sets:
            yield Problem(("every",), "set, but there is no set; add [evaluation.sets.<name>]")
        for name in self.sets:
            if not _SET_NAME.match(name) or name == "train":
                yield Problem(
                    ("sets", name),
                    "a set's name has letters, digits, - and _, and is not train; rename it",
                )


class RLConfig(StrictModel):
    """A config with `recipe = "rl"`."""

    recipe: Literal["rl"]
    """`rl`: reinforcement learning on what an agent does."""

    runtime: Text = DEFAULT_RUNTIME
    """What runs the attempts, as `module:factory`. The default runs Episodes."""

    runtime_options: dict[str, object] | None = None
    """Options of a custom runtime, validated by the model that its factory names."""

    compute: ComputeTable = ComputeTable()
    model: ModelTable
    episode: EpisodeTable
    training: TrainingTable = TrainingTable()
    sampling: SamplingTable = SamplingTable()
    concurrency: ConcurrencyTable = ConcurrencyTable()
    clocks: ClocksTable = ClocksTable()
    evaluation: EvaluationTable = EvaluationTable()

    producers: dict[str, ProducerTable] = Field(default_factory=dict[str, ProducerTable])
    """Models beside the policy, by name."""

    sandbox: SandboxTable = SandboxTable()
    output: OutputTable = OutputTable()

    @property
    def sampling_slots(self) -> int:
        """Attempts that sample at once."""
        return self.concurrency.sampling or self._slots_needed

    @property
    def grading_slots(self) -> int:
        """Attempts that are graded at once."""
        return self.concurrency.grading or self._slots_needed

    @property
    def _slots_needed(self) -> int:
        """As many as there may be attempts whose groups are live."""
        training = self.training
        groups = (training.staleness_bound + 1) * training.groups_per_update
        return min(groups * training.group_size, MOST_SLOTS)

    def broken_rules(self) -> Iterator[Problem]:
        """The rules between tables."""
        if self.runtime == DEFAULT_RUNTIME and self.episode.class_ is None:
            yield Problem(
                ("episode", "class"),
                'missing; name the Episode to run, such as "episode:MyEpisode"',
            )
        for name in self.producers:
            if not _SET_NAME.match(name) or name == _MAIN:
                yield Problem(
                    ("producers", name),
                    "a producer's name has letters, digits, - and _, and is not main, which is the "
                    "policy; rename it",
                )
        for place, tokens in self._reply_limits():
            if tokens >= self.model.max_seq_len:
                yield Problem(
                    place,
                    f"found {tokens}, which leaves no room for a prompt in model.max_seq_len "
                    f"({self.model.max_seq_len}); use less",
                )

    def _reply_limits(self) -> Iterator[tuple[tuple[str, ...], int]]:
        yield ("sampling", "max_tokens"), self.sampling.max_tokens
        for name, held_out in self.evaluation.sets.items():
            if held_out.max_tokens is not None:
                yield ("evaluation", "sets", name, "max_tokens"), held_out.max_tokens
