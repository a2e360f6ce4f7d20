"""`--resume`, with a run folder or without one, and what the run that it means knows of before."""

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import typer

from loops_cookbook.cli.settable import SettableCommand
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.errors import RunFolderError, UsageError
from loops_cookbook.problems import shown
from loops_cookbook.recipes.memory import Memory
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.plans import AnyPlan
from loops_cookbook.recipes.resume import find_unfinished, has_work, length_key, require_same
from loops_cookbook.recipes.rules import planned_updates
from loops_cookbook.recipes.sft_plan import SFTPlan
from loops_cookbook.records import RunRow
from loops_cookbook.report.words import count
from loops_cookbook.rundir.layout import run_root
from loops_cookbook.rundir.past import Past, SFTPast, read_past, read_sft_past
from loops_cookbook.rundir.read import RecordedRun, open_run

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
PastT = TypeVar("PastT", Past, SFTPast)

PROGRAM = "loops"
UV_RUN = "UV_RUN_RECURSION_DEPTH"
"""What `uv run` sets for whatever it starts; `UV` has `uvx` set too."""
_CONFIG = ".toml"
"""How a config ends, and the folder of a run does not."""
_NEWEST = ""
"""What `--resume` means without a folder."""

ResumeOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="[RUN_DIR]",
        help="Go on with the newest unfinished run of this config, or with RUN_DIR.",
        show_default=False,
    ),
]


class ResumableCommand(SettableCommand):
    """A command whose `--resume` may stand without a folder, wherever none comes after it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give a `--resume` without a value the one that means the newest run."""
        return super().parse_args(ctx, with_resume_value(args))


def with_resume_value(args: Sequence[str]) -> list[str]:
    """The arguments, with a value for every `--resume`."""
    given: list[str] = []
    for place, arg in enumerate(args):
        after = args[place + 1] if place + 1 < len(args) else "-"
        given.append(arg)
        if arg == "--resume" and (after.startswith("-") or after.endswith(_CONFIG)):
            given.append(_NEWEST)
    return given


def program_of(argv0: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """What starts this command again, as a person typed it as far as a process can know.

    Args:
        argv0: what the process was started as.
        environment: of the process.
    """
    if UV_RUN in environment:
        return ("uv", "run", PROGRAM)
    found = shutil.which(PROGRAM, path=environment.get("PATH", "")) or ""
    if os.path.basename(argv0) != PROGRAM or os.path.realpath(found) == os.path.realpath(argv0):
        return (PROGRAM,)
    return (os.path.abspath(argv0),)


def resume_command(
    config: str,
    set_: Sequence[str],
    scope: str | None,
    env_file: Path | None,
    root: Path,
    *,
    program: Sequence[str] = (PROGRAM,),
) -> str:
    """What goes on with a run that was begun so, ready for a shell in the same folder."""
    words = [*program, "run", config]
    for setting in set_:
        words += ["--set", setting]
    words += [] if scope is None else ["--scope", scope]
    words += [] if env_file is None else ["--env-file", str(env_file)]
    return shlex.join([*words, "--resume", str(root)])


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run that goes on."""

    run: RecordedRun

    def read_again(self) -> "Resumed":
        """The run as it is once its folder is held: another process may have gone on with it."""
        return Resumed(open_run(self.run.folder.root))

    @property
    def life(self) -> int:
        """How often it was gone on with, this time included."""
        return len(self.run.run.resumed_at) + 1

    def past(self, plan: Plan) -> Past:
        """Where a run of the RL recipe stood; read it once the folder is held.

        Raises:
            RunFolderError: it is at its end, or what is needed is damaged.
        """
        past = read_past(self.run, group_size=plan.config.training.group_size)
        epochs = plan.config.training.epochs
        has_tasks = (
            epochs is None or bool(past.again) or past.next_serial < len(plan.tasks) * epochs
        )
        self._require_more(past.update, planned_updates(plan) if has_tasks else past.update)
        return past

    def sft_past(self, plan: SFTPlan) -> SFTPast:
        """Where a run of the SFT recipe stood; read it once the folder is held.

        Raises:
            RunFolderError: it is at its end, or what is needed is damaged.
        """
        past = read_sft_past(self.run)
        self._require_more(past.recorded, len(plan.batches))
        return past

    def remember(self, memory: Memory[PastT], past: PastT) -> Memory[PastT]:
        """The memory of the run as it goes on.

        Args:
            memory: as that of a new run.
            past: where it stood.
        """
        then = self.run.run
        beginning = then.service.get("beginning") if then.status == "running" else None
        told = beginning if isinstance(beginning, str) else None
        return replace(memory, past=past, life=self.life, beginning=told)

    def row(self, row: RunRow, *, at: float, update: int) -> RunRow:
        """The row of the run as it goes on."""
        then = self.run.run
        return replace(
            row,
            started_at=then.started_at,
            started_from=then.started_from,
            counts=then.counts,
            resumed_at=(*then.resumed_at, at),
            resumed_from=update,
        )

    def _require_more(self, update: int, planned: int) -> None:
        if self.run.run.status == "done" and update >= planned:
            raise RunFolderError(
                f"there is nothing to resume: {self.run.folder.root} came to its end after update "
                f"{update}; raise {length_key(self.run.run.recipe)} to go on"
            )


def find_resumed(plan: AnyPlan, resume: str) -> Resumed:
    """The run that `--resume` means.

    Raises:
        RunFolderError: there is none.
        ConfigError: its config was another.
    """
    if resume == _NEWEST:
        run = find_unfinished(plan.loaded)
    else:
        run = open_run(run_root(Path(os.path.abspath(Path(resume).expanduser()))))
    try:
        _require_same_recipe(plan, run)
        require_same(plan.loaded, run.run, run.folder.root)
        _require_same_scope(plan, run)
    except UsageError as error:
        if has_work(run.folder):
            raise
        raise RunFolderError(
            f"there is nothing to resume in {shown(run.folder.root)}: nothing was done in it "
            f"(scope {run.run.scope!r}, {run.run.status}); run the config without --resume, or "
            "name another run: --resume RUN_DIR"
        ) from error
    _require_name(run)
    return Resumed(run)


def _require_same_recipe(plan: AnyPlan, run: RecordedRun) -> None:
    recipe = "sft" if isinstance(plan.config, SFTConfig) else "rl"
    if run.run.recipe == "eval":
        raise RunFolderError(
            f"{shown(run.folder.root)} is of `loops eval`, which is not gone on with: name a run "
            "of this config, or evaluate again"
        )
    if run.run.recipe != recipe:
        raise RunFolderError(
            f"{run.folder.root} is a run of the recipe {run.run.recipe!r}, and the config's is "
            f"{recipe!r}: name a run of this config"
        )


def _require_name(run: RecordedRun) -> None:
    """Refuse a folder that was renamed to what services, which know the run by it, do not take."""
    if not _NAME.fullmatch(run.folder.root.name):
        raise RunFolderError(
            f"{run.folder.root}: services know a run by the name of its folder, and take letters, "
            "digits, dots, - and _, at most 128 of them; rename it"
        )


def _require_same_scope(plan: AnyPlan, run: RecordedRun) -> None:
    """Refuse a service that has neither the weights of a run nor its checkpoints."""
    if plan.scope.told != run.run.scope:
        raise RunFolderError(
            f"{run.folder.root} was run under scope {run.run.scope!r}, and this is scope "
            f"{plan.scope.told!r} ({plan.scope.source}): add --scope {run.run.scope}, or name "
            "another run: --resume RUN_DIR"
        )


def told(past: Past | SFTPast) -> str:
    """Where a run goes on, for people."""
    if isinstance(past, SFTPast):
        loaded, again, groups = past.loaded, past.recorded - past.loaded, 0
        update = past.recorded
    else:
        loaded = 0 if past.checkpoint is None else past.checkpoint.update
        again, groups, update = len(past.kept), len(past.again), past.update
    parts = [
        f"goes on after update {update}",
        f"from the checkpoint of update {loaded}" if loaded else "from the first weights",
    ]
    if again:
        parts.append(f"{_are(again, 'update')} applied again")
    if groups:
        parts.append(f"{_are(groups, 'cut group')} started again")
    return ", ".join(parts)


def _are(number: int, noun: str) -> str:
    return f"{count(number, noun)} {'is' if number == 1 else 'are'}"
