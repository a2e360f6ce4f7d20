"""Everything an SFT config names, looked at once, before anything is launched.

`plan_sft` finds the policy, reads every row and turns it into tokens. `loops check` reports an
`SFTPlan`; `loops run` carries the same one out. Where the tokenizer is out of reach, as it may be
on a machine without a network, the rows are read and nothing more is known of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loops_cookbook.config.environment import Environment
from loops_cookbook.config.load import LoadedConfig
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.errors import ConfigError, TaskFileError
from loops_cookbook.learning.overlap import Shared, shared
from loops_cookbook.recipes.demonstrations import Demonstration, Unusable, demonstrate
from loops_cookbook.recipes.policy import PlannedPolicy, plan_policy
from loops_cookbook.recipes.rows import Row
from loops_cookbook.recipes.sft_batches import BatchPlan, batches
from loops_cookbook.renderers.detect import Detection
from loops_cookbook.tasks import PROBLEMS_SHOWN, load_tasks

HELD_OUT = "held_out"
"""The name of the held-out rows in metrics and records."""
TRAIN_KEY, HELD_OUT_KEY = "data.train", "data.held_out"


@dataclass(frozen=True, slots=True, eq=False)
class DataSet:
    """The rows of one file."""

    key: str
    """In the config, such as `data.train`."""
    lines: int
    """Rows in the file."""
    rows: tuple[Demonstration, ...] = ()
    """Those that can be used."""
    unusable: tuple[Unusable, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTPlan(PlannedPolicy[SFTConfig]):
    """A run that can start, as far as it can be known without launching anything."""

    train: DataSet
    held_out: DataSet | None
    batches: tuple[BatchPlan, ...]
    shared: tuple[Shared, ...]
    """Held-out rows that are trained on too, or nearly."""


def plan_sft(
    loaded: LoadedConfig[SFTConfig],
    environment: Environment,
    values: Mapping[str, str],
    scope: str | None,
    *,
    for_training: bool = True,
) -> SFTPlan:
    """Look at everything that a config names.

    Args:
        loaded: the config.
        environment: which `.env` files there are.
        values: the environment, those files included.
        scope: what `--scope` said.
        for_training: whether the rows to train on are looked at too.

    Raises:
        UsageError: something in it cannot stand, in one line or one line a fault.
    """
    data = loaded.config.data
    policy = plan_policy(loaded, environment, values, scope)
    train = DataSet(TRAIN_KEY, 0)
    if for_training:
        path = loaded.beside(data.train)
        train = _data_set(TRAIN_KEY, path, loaded.config, policy.detection)
    held_out = None
    if data.held_out is not None:
        path = loaded.beside(data.held_out)
        held_out = _data_set(HELD_OUT_KEY, path, loaded.config, policy.detection)
    _require_usable([train, *([held_out] if held_out else [])], loaded.config)
    sizes = [row.tokens for row in train.rows]
    if policy.detection.renderer is not None and for_training:
        _require_batch(train, loaded.config)
    return SFTPlan(
        **policy.named(),
        train=train,
        held_out=held_out,
        batches=tuple(batches(sizes, loaded.config.training)),
        shared=tuple(_shared(train, held_out)),
    )


def _data_set(key: str, path: Path, config: SFTConfig, detection: Detection) -> DataSet:
    rows = load_tasks(path, Row, kind="data")
    renderer = detection.renderer
    if renderer is None:
        return DataSet(key, len(rows))
    made = [
        demonstrate(
            row,
            renderer,
            train_on=config.data.train_on,
            max_seq_len=config.model.max_seq_len,
            keep_asked=key == HELD_OUT_KEY,
        )
        for row in rows
    ]
    return DataSet(
        key,
        len(rows),
        tuple(each for each in made if isinstance(each, Demonstration)),
        tuple(each for each in made if isinstance(each, Unusable)),
    )


def _require_usable(sets: Sequence[DataSet], config: SFTConfig) -> None:
    """Refuse rows that cannot be used, unless told to skip them; and a file of nothing else."""
    faults = [fault for each in sets for fault in each.unusable]
    if faults and config.data.unusable_rows == "stop":
        told = [str(fault) for fault in faults[:PROBLEMS_SHOWN]]
        if rest := len(faults) - len(told):
            told.append(f"... and {rest} more like these")
        count = f"{len(faults)} rows" if len(faults) > 1 else "1 row"
        raise TaskFileError(
            "\n".join(
                [
                    *told,
                    f"{count} cannot be used: mend the data, or leave them out with "
                    'data.unusable_rows = "skip"',
                ]
            )
        )
    for each in sets:
        if each.unusable and not each.rows:
            raise TaskFileError(
                f"{each.key}: none of its {each.lines} rows can be used, the first since "
                f"{each.unusable[0]}; mend the data"
            )


def _require_batch(train: DataSet, config: SFTConfig) -> None:
    training, rows = config.training, train.rows
    if training.batch_size is not None and training.batch_size > len(rows):
        raise ConfigError(
            f"training.batch_size: found {training.batch_size}, more than the rows of "
            f"{config.data.train} that can be used; use {len(rows)} or less"
        )
    longest = max(rows, key=lambda row: row.tokens)
    if training.batch_tokens is not None and longest.tokens > training.batch_tokens:
        raise ConfigError(
            f"training.batch_tokens: found {training.batch_tokens}, and {longest.source} alone has "
            f"{longest.tokens}; use {longest.tokens} or more"
        )


def _shared(train: DataSet, held_out: DataSet | None) -> list[Shared]:
    if held_out is None:
        return []
    return shared([row.text for row in held_out.rows], [row.text for row in train.rows])
