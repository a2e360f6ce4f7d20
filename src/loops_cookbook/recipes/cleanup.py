"""Releases what a run that is over did not: what its ledger holds, and what bears its label.

A run whose folder is locked is alive, and is left alone; so is a copy of its folder. Whether a run
on another machine is alive cannot be seen from a copy, also once the copy is gone on with: there,
what that run has at a service is released only where a person names the folder. Done again, it
finds nothing to do. Labels are looked for where the run had sandboxes, by its ledger, and on this
machine. What hosted Loops has of a run ends by itself; how is told.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from loops_cookbook.config.load import load_config
from loops_cookbook.errors import (
    MissingExtra,
    RunFolderError,
    RunIsAlive,
    SandboxError,
    SandboxUnavailable,
    UsageError,
)
from loops_cookbook.problems import shown
from loops_cookbook.recipes.sandboxes import KINDS
from loops_cookbook.rundir.layout import Claim, RunFolder, locked, origin_of, run_root
from loops_cookbook.rundir.read import open_run
from loops_cookbook.sandboxes import bubblewrap, plain
from loops_cookbook.sandboxes.base import Backend, Entry
from loops_cookbook.sandboxes.ledger import (
    Ledger,
    OpenEntry,
    Owner,
    kinds_in,
    open_entries,
)

RELEASE_SECONDS = 60.0
"""How long the release of one sandbox, or the search for more, may take."""
HERE = frozenset({bubblewrap.KIND, plain.KIND})
"""Backends that are asked for a run's label whatever its ledger says: it costs nothing."""
_MARKS = ("sandboxes.jsonl", "run.json")
"""Files of which a run's folder has one at least."""
NOBODY_TO_ASK = (SandboxError, SandboxUnavailable, MissingExtra)


@dataclass(slots=True)
class Cleaned:
    """What became of one run's sandboxes."""

    folder: Path
    held: list[str] = field(default_factory=list[str])
    """Found, and not touched: a dry run."""
    released: list[str] = field(default_factory=list[str])
    """Ended by this."""
    gone: list[str] = field(default_factory=list[str])
    """In the ledger, and not there any more."""
    left: list[str] = field(default_factory=list[str])
    """Sentences on what could not be released."""
    unasked: list[str] = field(default_factory=list[str])
    """Sentences on who could not be asked for more, where the ledger holds nothing of theirs."""
    hosted: str = ""
    """What hosted Loops has of it."""
    alive: str = ""
    """Why the run was left alone."""

    @property
    def lines(self) -> list[str]:
        """What a person is told."""
        told = [f"left alone: {self.alive}"] if self.alive else []
        told += [
            f"{what} {', '.join(names)}"
            for what, names in (
                ("would release", self.held),
                ("released", self.released),
                ("gone already:", self.gone),
            )
            if names
        ]
        told += [f"not released: {sentence}" for sentence in self.left]
        told += [f"not looked for more: {sentence}" for sentence in self.unasked]
        told += [self.hosted] if self.hosted else []
        return [f"{shown(self.folder)}: {line}" for line in told]


def run_folders(targets: Sequence[str], cwd: Path) -> list[Path]:
    """The runs that a person means: run folders, and those of configs.

    Args:
        targets: run folders and configs; nothing: every run under `runs`.
        cwd: the working directory.

    Raises:
        UsageError: a target is neither.
    """
    folders = [folder for target in targets for folder in _folders_of(target, cwd)]
    if not targets:
        folders = [*_runs_below(cwd / "runs", "**")]
    return list(dict.fromkeys(folders))


def config_directories(targets: Sequence[str]) -> list[Path]:
    """The folders of the configs among some targets."""
    return [load_config(target, []).directory for target in targets if not Path(target).is_dir()]


async def clean(root: Path, *, dry_run: bool = False, is_named: bool = False) -> Cleaned:
    """Release what one run left, and close it in the ledger.

    Args:
        root: its folder.
        dry_run: whether to say what would be released, and release nothing.
        is_named: whether a person named this very folder, and so knows that its run is over.

    Raises:
        RunFolderError: the ledger is damaged.
    """
    folder, cleaned = RunFolder(root), Cleaned(root)
    try:
        with locked(folder) as origin:
            if folder.sandboxes.exists():
                is_unknown = _is_of_another_machine(origin) and not is_named
                cleaning = _Cleaning(folder, cleaned, may_live_elsewhere=is_unknown)
                await cleaning.carry_out(dry_run=dry_run)
            cleaned.hosted = _hosted(folder)
    except RunIsAlive as error:
        cleaned.alive = str(error)
    return cleaned


async def clean_up_before(folder: RunFolder) -> Cleaned:
    """Release what a run left that goes on; for the process that holds its folder.

    Raises:
        RunFolderError: the ledger is damaged.
    """
    cleaned = Cleaned(folder.root)
    if folder.sandboxes.exists():
        is_unknown = _is_of_another_machine(origin_of(folder))
        cleaning = _Cleaning(folder, cleaned, may_live_elsewhere=is_unknown)
        await cleaning.carry_out(dry_run=False)
    return cleaned


def _is_of_another_machine(origin: Claim | None) -> bool:
    return origin is not None and not origin.is_of_this_machine


class _Cleaning:
    """One run's cleaning, while its folder is locked.

    Args:
        folder: the run's.
        cleaned: where it is told what became of each sandbox.
        may_live_elsewhere: whether its run may go on, on the machine that it was copied from.
    """

    def __init__(
        self, folder: RunFolder, cleaned: Cleaned, *, may_live_elsewhere: bool = False
    ) -> None:
        self._folder = folder
        self._cleaned = cleaned
        self._may_live_elsewhere = may_live_elsewhere
        self._backends = {kind: make() for kind, make in KINDS.items()}

    async def carry_out(self, *, dry_run: bool) -> None:
        recorded = open_entries(self._folder.sandboxes)
        labelled = await self._labelled({opened.entry.name for opened in recorded})
        if dry_run:
            for opened in recorded:
                if elsewhere := self._elsewhere(opened):
                    self._cleaned.left.append(f"{opened.entry.name}: {elsewhere}")
                else:
                    self._cleaned.held.append(opened.entry.name)
            self._cleaned.held += [entry.name for entry in labelled]
            return
        with Ledger(self._folder.sandboxes) as ledger:
            for opened in recorded:
                if await self._has_gone(opened.entry, self._elsewhere(opened)):
                    ledger.released(opened.entry)
            for entry in labelled:
                await self._has_gone(entry, "")

    async def _labelled(self, known: set[str]) -> list[Entry]:
        """What bears the run's label and is in no open row."""
        if self._may_live_elsewhere:
            return []
        kinds = HERE | kinds_in(self._folder.sandboxes)
        entries: list[Entry] = []
        for kind in sorted(kinds & self._backends.keys()):
            try:
                with anyio.fail_after(RELEASE_SECONDS):
                    entries += await _found(self._backends[kind], self._folder.root.name)
            except (*NOBODY_TO_ASK, TimeoutError) as error:
                self._cleaned.unasked.append(str(error) or f"{kind} does not answer")
        return [entry for entry in entries if entry.name not in known]

    async def _has_gone(self, entry: Entry, elsewhere: str) -> bool:
        """Release a sandbox; whether it is confirmed to be gone."""
        backend = self._backends.get(entry.backend)
        if backend is None:
            elsewhere = f"this version of loops-cookbook knows no backend {entry.backend!r}"
        if backend is None or elsewhere:
            self._cleaned.left.append(f"{entry.name}: {elsewhere}")
            return False
        try:
            with anyio.fail_after(RELEASE_SECONDS, shield=True):
                was_there = await backend.remove(entry)
        except (SandboxUnavailable, MissingExtra) as error:
            self._cleaned.left.append(f"{entry.name}: {error}")
            return False
        except SandboxError as error:
            self._cleaned.left.append(str(error))
            return False
        except TimeoutError:
            self._cleaned.left.append(f"{entry.name} is still there after {RELEASE_SECONDS:g} s")
            return False
        (self._cleaned.released if was_there else self._cleaned.gone).append(entry.name)
        return True

    def _elsewhere(self, opened: OpenEntry) -> str:
        """Why a sandbox of another machine is not released from this one."""
        here, there = Owner.this_process().host, opened.owner.host
        backend = self._backends.get(opened.entry.backend)
        if there == here:
            return ""
        if backend is None or not backend.is_remote(opened.entry):
            return f"it is on {there}, and this is {here}: run `loops cleanup` there"
        if self._may_live_elsewhere:
            return (
                f"its run was copied from {there}, and may go on there: run `loops cleanup` there, "
                f"or, where that run is over, `loops cleanup {shown(self._folder.root)}`"
            )
        return ""


async def _found(backend: Backend, run: str) -> list[Entry]:
    names = await backend.find(run)
    return [Entry(name, run, backend.kind, backend.place(name)) for name in names]


def _hosted(folder: RunFolder) -> str:
    """What hosted Loops has of a run, and how that ends."""
    try:
        service = open_run(folder.root).run.service
    except RunFolderError:  # it was killed before it had one
        return ""
    if "run_id" not in service or "mode" not in service:
        return ""
    deployment = f", deployment {service['deployment_id']}" if "deployment_id" in service else ""
    return (
        f"hosted run {service['run_id']} ({service['mode']}{deployment}): nothing to release; the "
        "service takes its trainer and sampler back when they have been idle, and nothing asks "
        "after them any more"
    )


def _folders_of(target: str, cwd: Path) -> Iterator[Path]:
    named = cwd / target
    if named.is_dir():
        if not _is_marked(named):
            raise UsageError(f"{target} {_no_run(named)}")
        yield run_root(named)
        return
    if named.suffix != ".toml" and _is_marked(named.parent):
        raise UsageError(f"{target}: is a file of a run; name its folder, {shown(named.parent)}")
    run, at, _ = target.rpartition("@")
    if at and _is_marked(cwd / run):
        raise UsageError(f"{target}: sandboxes are of a whole run, not of an update; name {run}")
    if not named.exists() and named.suffix != ".toml":
        raise UsageError(f"{target}: no such folder; name the folder of a run, or a config")
    loaded = load_config(target, [])
    yield from _runs_below(cwd / loaded.output_dir, "*")


def _no_run(folder: Path) -> str:
    """What a folder is that is no run's, and what to name instead."""
    below = _runs_below(folder, "*") or _runs_below(folder, "*/*")
    if not below:
        return "is not a run's folder (it has no run.json): name the folder of a run, or a config"
    newest = shlex.quote(shown(max(below, key=lambda run: run.name).parent))
    return (
        f"holds runs and is none: name them, as in `loops cleanup {newest}/*`; without any name "
        "every run under ./runs is meant"
    )


def _is_marked(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in _MARKS)


def _runs_below(folder: Path, depth: str) -> list[Path]:
    """The folders that have a ledger, or say what run they are of."""
    files = [path for mark in _MARKS for path in folder.glob(f"{depth}/{mark}") if path.is_file()]
    return sorted({run_root(path.parent) for path in files})
