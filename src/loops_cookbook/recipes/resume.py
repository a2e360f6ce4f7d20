"""Which run `--resume` goes on with, and whether its config is still the one that it began with.

The newest run is meant under which anything was done, so a folder that cannot be read is passed
over only where it is surely of an older one: else a person has to say which run is meant.

What decides a run's results must be as it was, down to the content of its files; what only says how
it is watched, kept or reached may differ, and so may how far it goes. Code that was changed is told
of.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from loops_cookbook.config.imports import imported_files
from loops_cookbook.config.load import AnyConfig, LoadedConfig
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.errors import ConfigError, RunFolderError
from loops_cookbook.problems import found, shown
from loops_cookbook.records import RunRow
from loops_cookbook.rundir.layout import RunFolder, run_root
from loops_cookbook.rundir.read import RecordedRun, open_run
from loops_cookbook.rundir.updates import UpdateStore

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

_MOST_NAMED = 5

_SKEW_SECONDS = 300.0
"""By which the clock of a disk on the network may differ from this machine's."""


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

    One under which nothing was done, such as of a server that was never reached, is it only where
    there is no other.

    Raises:
        RunFolderError: there is none, or it cannot be told which it is.
    """
    runs, unread = _runs_in(loaded.output_dir)
    recipe, path = loaded.config.recipe, str(loaded.path)
    of_config = [run for run in runs if (run.run.recipe, run.run.config_path) == (recipe, path)]
    of_config.sort(key=lambda run: (run.run.started_at, run.folder.root.name), reverse=True)
    open_ones = [run for run in of_config if run.run.status != "done"]
    unfinished = next((run for run in open_ones if has_work(run.folder)), None)
    unfinished = unfinished or next(iter(open_ones), None)
    # A record is not written before its run starts, so an older file is that of an older run.
    since = unfinished.run.started_at - _SKEW_SECONDS if unfinished else 0.0
    config = shown(loaded.path)
    for folder, error in unread.items():
        if folder.run.stat().st_mtime >= since:
            raise RunFolderError(_in_doubt(config, error, unfinished)) from error
    if unfinished is not None:
        return unfinished
    here = shown(loaded.output_dir)
    if not of_config:
        raise RunFolderError(
            f"there is nothing to resume: {here} holds no run of {config}; run it without "
            "--resume, or name a run folder"
        )
    raise RunFolderError(
        f"there is nothing to resume: the runs of {config} in {here} are done; to go further with "
        f"the newest, raise {length_key(recipe)} and name it: "
        f"--resume {shown(of_config[0].folder.root)}"
    )


def has_work(folder: RunFolder) -> bool:
    """Whether anything was done under a run: a group started, an update, an evaluation."""
    rows = (folder.starts, folder.steps, folder.rollouts, folder.evaluations)
    has_rows = any(path.is_file() and path.stat().st_size > 0 for path in rows)
    return has_rows or bool(UpdateStore(folder.updates).kept())


def length_key(recipe: str) -> str:
    """What a config of a recipe says of how far a run goes."""
    return "training.epochs" if recipe == "sft" else "training.updates (or epochs)"


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
    return {key: _digest(loaded.beside(name)) for key, name in named.items() if name is not None}


def code_digests(loaded: LoadedConfig[AnyConfig]) -> dict[str, str]:
    """A hash of each module beside a config that was imported, by its path from there."""
    return {
        file.relative_to(loaded.directory).as_posix(): _digest(file)
        for file in sorted(imported_files(loaded.directory))
    }


def changed_code(then: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The modules that are not as they were, for people; None where all are, or it is not known.

    It is no reason to refuse: a run is often stopped to mend its code.
    """
    if not then:
        return None
    changed = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    if not changed:
        return None
    more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
    return (
        f"changed since this run was last at work: {', '.join(changed[:_MOST_NAMED])}{more}; "
        "it goes on with your code as it is now"
    )


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _runs_in(output_dir: Path) -> tuple[list[RecordedRun], dict[RunFolder, RunFolderError]]:
    """The runs in a folder, and why those that cannot be read cannot."""
    runs: list[RecordedRun] = []
    unread: dict[RunFolder, RunFolderError] = {}
    for root in sorted({run_root(path.parent) for path in output_dir.glob("*/run.json")}):
        try:
            runs.append(open_run(root))
        except RunFolderError as error:
            unread[RunFolder(root)] = error
    return runs, unread


def _in_doubt(config: str, error: RunFolderError, other: RecordedRun | None) -> str:
    """Why it cannot be told which run is meant, and what to do."""
    what = "name the run to go on with (--resume RUN_DIR), or begin another without --resume"
    if other is not None:
        root = shown(other.folder.root)
        what = f"name the run to go on with; the newest that can be read is --resume {root}"
    return f"it cannot be told which run of {config} is the newest: {error}; {what}"


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
