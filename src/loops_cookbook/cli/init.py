"""`loops init DIR`: a project to start from, copied from the folder `project` beside this module.

Nothing that is there already is touched: where one of the files exists, none is written.
"""

from pathlib import Path
from typing import Annotated

import typer

from loops_cookbook.cli.options import DebugOption
from loops_cookbook.errors import UsageError

_TEMPLATE = Path(__file__).with_name("project")

# A dot would hide them from people who look for the template, and git would obey the one.
_DOTTED = {"gitignore": ".gitignore", "env.example": ".env.example"}


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to make.", show_default=False)
    ],
    debug: DebugOption = False,
) -> None:
    """Make a project to start from: Episode, test, tasks, config."""
    made = make_project(directory)
    typer.echo(f"Made {directory}: {', '.join(path.name for path in made)}")
    typer.echo(f"Next: loops check {directory / 'train.toml'}")


def make_project(directory: Path) -> list[Path]:
    """Write the project's files; the paths of all of them.

    Raises:
        UsageError: one of them is there already, or the folder cannot be made.
    """
    texts = {
        directory / _DOTTED.get(source.name, source.name): source.read_text(encoding="utf-8")
        for source in sorted(_TEMPLATE.iterdir())
        if source.is_file()
    }
    there = [path.name for path in texts if path.exists() or path.is_symlink()]
    if there:
        what = "a project already" if len(there) == len(texts) else "some of a project's files"
        raise UsageError(
            f"{directory}: holds {what} ({', '.join(there)}), and none is written over; name "
            "another folder, or move them away"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{directory}: cannot be made: {reason}; name another folder") from error
    return list(texts)
