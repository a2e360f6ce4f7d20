"""`loops cleanup`: release the sandboxes that runs which are over did not."""

from pathlib import Path
from typing import Annotated

import anyio
import typer

from loops_cookbook.cli.options import DebugOption, EnvFileOption
from loops_cookbook.config.environment import read_environment
from loops_cookbook.recipes.cleanup import Cleaned, clean, config_directories, run_folders

LEFT_OVER = 1
NOTHING = "nothing to release"
NOWHERE = (
    "no run was found, and nothing was released: runs are looked for from the working directory; "
    "go to where they are, or name the folder of a run"
)


def cleanup(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG or RUN_DIR ...",
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
    named = {Path.cwd() / target for target in targets or []}
    for directory in dict.fromkeys([*config_directories(targets or []), Path.cwd()]):
        read_environment(directory, env_file=env_file).apply()  # a service's key may be in it

    async def clean_all() -> list[Cleaned]:
        return [await clean(each, dry_run=dry_run, is_named=each in named) for each in folders]

    cleaned = anyio.run(clean_all)
    lines = [line for each in cleaned for line in each.lines]
    for line in lines or [NOTHING if folders else NOWHERE]:
        typer.echo(line)
    if any(each.left for each in cleaned):
        raise typer.Exit(LEFT_OVER)
