"""The whole of a config with `recipe = "sft"`: every key, every default, every rule between keys.

Nothing here reads a file or imports a heavy library. What depends on the data, such as a batch
that holds more rows than there are, is told when the data was read.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias, cast

from pydantic import Field, model_validator

from loops_cookbook.config.base import Count, StrictModel, Text
from loops_cookbook.config.shared import AdamTable, ComputeTable, ModelTable, OutputTable
from loops_cookbook.learning.schedules import ScheduleKind
from loops_cookbook.problems import Problem

TrainOn: TypeAlias = Literal["all", "last"]
"""Which assistant messages of a row are trained on, where they do not say so themselves."""


class DataTable(StrictModel):
    """The conversations that are trained on, and those that are held out."""

    train: Text
    """The rows to train on, beside the config: one JSON object with `messages` a line."""

    held_out: Text | None = None
    """Rows of the same form that nothing is trained on; their loss is measured. Unset: none."""

    train_on: TrainOn = "all"
    """Which assistant messages of a row are trained on: `all`, or the `last`. A message with a
    `train` of its own goes by that."""

    unusable_rows: Literal["stop", "skip"] = "stop"
    """What becomes of rows that do not fit `max_seq_len`, train nothing or cannot be written in the
    model's format: `stop` refuses the config and lists them; `skip` lists them and leaves them
    out."""


class SFTTrainingTable(StrictModel):
    """How far and how fast. An update is one optimizer step on one batch."""

    epochs: Count = 1
    """Times that the run goes through the rows."""

    batch_size: Count | None = 32
    """Rows of a batch. 32 unless `batch_tokens` is set; only one of the two may be. The last batch
    of an epoch may be smaller."""

    batch_tokens: Count | None = None
    """Tokens that a batch has at most, those that are only read included."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Suits LoRA on models of 1B parameters and more."""

    schedule: ScheduleKind = "linear"
    """How the learning rate falls over the run's updates: not at all, or to 0."""

    warmup: Annotated[int, Field(ge=0)] = 0
    """Updates over which the learning rate rises from 0."""

    checkpoint_every: Annotated[int, Field(ge=0)] = 10
    """Updates between two checkpoints. There is one after the last update besides, and one where
    the held-out loss is the lowest so far. 0: only those two."""

    keep: Annotated[int, Field(ge=0)] = 2
    """Checkpoints that stay: so many of the newest, the last at least, and the best besides."""

    shuffle: bool = True
    """Whether each epoch takes the rows in an order of its own."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Of the order of rows."""

    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient. 0: no limit."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of the optimizer (AdamW)."""

    adam: AdamTable = AdamTable()

    @model_validator(mode="before")
    @classmethod
    def _tokens_replace_rows(cls, table: object) -> object:
        if not isinstance(table, dict):
            return table
        given = cast(dict[str, object], table)
        return {"batch_size": None, **given} if "batch_tokens" in given else given

    def broken_rules(self) -> Iterator[Problem]:
        """A batch's size is said once."""
        if self.batch_size is not None and self.batch_tokens is not None:
            yield Problem(("batch_tokens",), "set beside batch_size; keep one of the two")


class HeldOutTable(StrictModel):
    """When the held-out rows are looked at, and how."""

    every: Annotated[int, Field(ge=0)] = 10
    """Updates between two looks; there is one before the first update and one after the last
    besides. 0: only those two."""

    samples: Annotated[int, Field(ge=0)] = 0
    """Trained messages of the held-out rows in whose place the policy is asked for a reply of its
    own, greedily: one with the same content and tool calls scores 1, any other 0. They are drawn
    from the whole file, the same ones each time."""


class SFTConfig(StrictModel):
    """A config with `recipe = "sft"`."""

    recipe: Literal["sft"]
    """`sft`: supervised fine-tuning on conversations."""

    compute: ComputeTable = ComputeTable()
    model: ModelTable
    data: DataTable
    training: SFTTrainingTable = SFTTrainingTable()
    evaluation: HeldOutTable = HeldOutTable()
    output: OutputTable = OutputTable()

    def broken_rules(self) -> Iterator[Problem]:
        """There are held-out rows to look at."""
        given = self.evaluation.model_fields_set
        if self.data.held_out is None and given:
            yield Problem(
                ("evaluation", min(given)), "set, but there are no held-out rows; add data.held_out"
            )
