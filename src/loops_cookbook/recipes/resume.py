"""Which run `--resume` goes on with, and whether its config is still the one that it began with.

What decides a run's results must be as it was, down to the content of its files; what only says how
it is watched, kept or reached may differ, and so may how far it goes.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from loops_cookbook.config.load import AnyConfig, LoadedConfig
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.errors import ConfigError, RunFolderError
from loops_cookbook.problems import found, shown
from loops_cookbook.records import RunRow
from loops_cookbook.rundir.read import RecordedRun, open_run

HARMLESS = (
    "clocks.release_seconds",
    "compute.api_key_env",
    "compute.sampler_url",
    "compute.trainer_url",
    "concurrency",
    "evaluation.every",
    "output",
    "training.checkpoint_every",
    "training.epochs",
    "training.keep",
    "training.updates",
)
"""Keys and tables that may differ when a run goes on."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that is not as it was."""

    key: str
    then: object
    now: object

    def __str__(self) -> str:
        return f"{self.key} (then {_shown(self.then)}, now {_shown(self.now)})"


def find_unfinished(loaded: LoadedConfig[AnyConfig]) -> RecordedRun:
    """The newest run of a config that did not come to its end.

    Raises:
        RunFolderError: there is none.
    """
    folders = sorted(loaded.output_dir.glob("*/run.json"), reverse=True)
    runs = [open_run(path.parent) for path in folders]
    recipe, path = loaded.config.recipe, str(loaded.path)
    of_config = [run for run in runs if (run.run.recipe, run.run.config_path) == (recipe, path)]
    for run in of_config:
        if run.run.status != "done":
            return run
    here, config = shown(loaded.output_dir), shown(loaded.path)
    if not of_config:
        raise RunFolderError(
            f"there is nothing to resume: {here} holds no run of {config}; run it without "
            "--resume, or name a run folder"
        )
    raise RunFolderError(
        f"there is nothing to resume: the runs of {config} in {here} are done; to go further with "
        f"the newest, raise training.updates (or epochs) and name it: "
        f"--resume {shown(of_config[0].folder.root)}"
    )


def require_same(loaded: LoadedConfig[AnyConfig], run: RunRow, root: Path) -> None:
    """Refuse a config that is not the one that a run began with.

    Raises:
        ConfigError: the keys that differ.
    """
    now = loaded.config.model_dump(mode="json", by_alias=True)
    differing = [str(each) for each in differences(run.config, now)]
    digests = file_digests(loaded)
    differing += [
        f"{key} (the file's content)"
        for key, digest in digests.items()
        if run.digests.get(key, digest) != digest
    ]
    if differing:
        raise ConfigError(
            f"{root} cannot be resumed with this config, which differs in {'; '.join(differing)}: "
            "put it back, or begin another run"
        )


def differences(then: Mapping[str, object], now: Mapping[str, object]) -> list[Difference]:
    """The keys of two configs that differ, those in `HARMLESS` left out."""
    before, after = dict(_flat(then)), dict(_flat(now))
    return [
        Difference(key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not _is_harmless(key)
    ]


def file_digests(loaded: LoadedConfig[AnyConfig]) -> dict[str, str]:
    """A hash of each file of tasks or rows that a config names, by its key."""
    config = loaded.config
    if isinstance(config, SFTConfig):
        named = {"data.train": config.data.train, "data.held_out": config.data.held_out}
    else:
        named = {"episode.tasks": config.episode.tasks}
        named |= {
            f"evaluation.sets.{name}.tasks": held_out.tasks
            for name, held_out in config.evaluation.sets.items()
        }
    return {
        key: hashlib.sha256(loaded.beside(name).read_bytes()).hexdigest()
        for key, name in named.items()
        if name is not None
    }


def _shown(value: object) -> str:
    """A value as the config has it, or that it has none."""
    return "unset" if value is None else found(value)


def _is_harmless(key: str) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in HARMLESS)


def _flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(cast("dict[str, object]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
