"""Options and arguments that several commands share, each with one name and one meaning."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from loops_cookbook.config.shared import TOLD_SCOPES

ConfigArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="Path of a config file, from the working directory; where there is none, that of a "
        "bundled one, as `loops examples` lists them.",
        show_default=False,
    ),
]

SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="Change a key of the config for this command. VALUE is TOML: a string stands in "
        "quotes. May be given again.",
        show_default=False,
    ),
]

ScopeOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--scope",
        metavar="SCOPE",
        help=f"Who trains: {TOLD_SCOPES} or module:factory. It is used instead of the config's "
        "compute.scope.",
        show_default=False,
    ),
]

EnvFileOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--env-file",
        metavar="FILE",
        help="Read this file instead of the .env files beside the config and here.",
        show_default=False,
    ),
]

DebugOption: TypeAlias = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error, too.")
]

JsonOption: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Write the answer as JSON on stdout.")
]
