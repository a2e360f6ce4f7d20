"""The command `loops`: its commands, registered, and nothing else."""

import sys
from functools import partial
from importlib.metadata import version
from typing import Annotated

import typer

from loops_cookbook.cli.check import check
from loops_cookbook.cli.cleanup import cleanup
from loops_cookbook.cli.eval import evaluate
from loops_cookbook.cli.examples import examples
from loops_cookbook.cli.exits import guarded
from loops_cookbook.cli.export import export
from loops_cookbook.cli.init import init
from loops_cookbook.cli.models import models
from loops_cookbook.cli.resuming import ResumableCommand
from loops_cookbook.cli.run import run
from loops_cookbook.cli.serve import serve
from loops_cookbook.cli.settable import SettableCommand

app = typer.Typer(
    name="loops",
    help="Train language models on what their agents do, scored by graders you write.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"loops-cookbook {version('loops-cookbook')}")
        raise typer.Exit


@app.callback()
def loops(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Say the version and exit."
        ),
    ] = False,
) -> None:
    """Train language models on what their agents do, scored by graders you write."""


app.command(cls=SettableCommand)(guarded(check))
app.command(cls=ResumableCommand)(guarded(run))
app.command("eval", cls=SettableCommand)(guarded(evaluate))
app.command()(guarded(export))
app.command()(guarded(cleanup))
app.command()(guarded(init))
app.command()(guarded(examples))
app.command()(guarded(models))
app.command()(guarded(serve))


def main() -> None:
    """Run the command that the process's arguments name, and exit."""
    try:
        guarded(partial(app, prog_name="loops"))()  # help and version are no commands of their own
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
