"""`loops export`: a checkpoint as a PEFT adapter, or as a whole model."""

from pathlib import Path
from typing import Annotated

import typer

from loops_cookbook.cli.exits import leaving
from loops_cookbook.cli.options import DebugOption
from loops_cookbook.recipes.export import Exported
from loops_cookbook.recipes.export import export as write


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="RUN_DIR[@UPDATE]",
            help="A run, whose last checkpoint is meant, or the one of an update.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The folder to make.", show_default=False)
    ],
    merged: Annotated[
        bool,
        typer.Option(
            "--merged",
            help="Merge the adapter into its base model and write a whole model, in float32.",
        ),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Write a checkpoint as a PEFT adapter, or as a whole model.

    Either is as Hugging Face libraries read it.
    """
    with leaving("nothing was written; run it again"):
        exported = write(checkpoint, out, merged=merged)
    typer.echo(_told(exported), err=True)
    typer.echo(exported.folder)


def _told(exported: Exported) -> str:
    located = exported.located
    what = f"an adapter for {exported.base}" if exported.is_adapter else "a whole model, in float32"
    return f"{located.root}@{located.row.update}: {what}"
