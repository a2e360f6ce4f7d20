"""`loops cleanup`: release the sandboxes that runs which are over did not."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from loops_cookbook.cli.options import DebugOption, EnvFileOption
from loops_cookbook.cli.signals import run_until_signalled
from loops_cookbook.config.environment import read_environment
from loops_cookbook.errors import RunFolderError
from loops_cookbook.recipes.cleanup import (
    RELEASE_SECONDS,
    Cleaned,
    clean,
    config_directories,
    run_folders,
)
from loops_cookbook.report.streams import forget
from loops_cookbook.report.words import count
from loops_cookbook.rundir.layout import run_root

LEFT_OVER = 1
BEYOND_RELEASE_SECONDS = 10.0
"""For the end of this command when it is interrupted, beyond the release of one sandbox."""
NOWHERE = (
    "no run was found, and nothing was released: runs are looked for from the working directory; "
    "go to where they are, or name the folder of a run"
)


def cleanup(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG|RUN_DIR",
            help="Runs, or configs whose runs are meant. Nothing: every run under ./runs.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be released, and release nothing.")
    ] = False,
    env_file: EnvFileOption = None,
    debug: DebugOption = False,
) -> None:
    """Release the sandboxes that runs which are over left behind."""
    folders = run_folders(targets or [], Path.cwd())
    named = {run_root(Path.cwd() / target) for target in targets or []}
    for directory in dict.fromkeys([*config_directories(targets or []), Path.cwd()]):
        read_environment(directory, env_file=env_file).apply()  # a service's key may be in it

    cleaned: list[Cleaned] = []
    damaged: list[RunFolderError] = []
    unread: list[OSError] = []

    async def clean_all() -> None:
        for folder in folders:
            try:
                one = await clean(folder, dry_run=dry_run, is_named=folder in named)
            except RunFolderError as error:  # of this one run
                damaged.append(error)
                continue
            cleaned.append(one)
            try:
                for line in one.lines:
                    typer.echo(line)
            except OSError as error:  # what is left bills, whether or not anybody reads of it
                forget(sys.stdout.fileno())
                unread.append(error)

    run_until_signalled(
        clean_all,
        seconds=RELEASE_SECONDS + BEYOND_RELEASE_SECONDS,
        waits="the sandbox under way is released",
        left="what was released is in the ledgers; run it again for the rest",
    )
    if damaged:
        raise ExceptionGroup("folders that cannot be cleaned", damaged)
    if unread:
        raise unread[0]
    if not any(one.lines for one in cleaned):
        typer.echo(f"nothing to release in {count(len(cleaned), 'run')}" if folders else NOWHERE)
    if any(one.left for one in cleaned):
        raise typer.Exit(LEFT_OVER)
