"""`loops init DIR`: a project to start from, or with `--example` a bundled one to change.

The project is copied from the folder `project` beside this module. Nothing that is there already
is touched: where one of the files exists, none is written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from loops_cookbook.cli.options import DebugOption
from loops_cookbook.config.bundled import bundled_configs, bundled_root
from loops_cookbook.errors import UsageError
from loops_cookbook.journal import file_above
from loops_cookbook.problems import nearest

_TEMPLATE = Path(__file__).with_name("project")

# A dot would hide them from people who look for the template, and git would obey the one.
_IGNORED = "gitignore"
_DOTTED = {_IGNORED: ".gitignore", "env.example": ".env.example"}


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder to make.", show_default=False)
    ],
    example: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Copy a bundled example or pattern instead; `loops examples` lists them.",
            show_default=False,
        ),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Make a project to start from: Episode, test, tasks, config."""
    made = make_project(directory) if example is None else copy_example(example, directory)
    typer.echo(f"Made {directory}: {', '.join(str(path.relative_to(directory)) for path in made)}")
    typer.echo(f"Next: loops check {directory / 'train.toml'}")


def copy_example(name: str, directory: Path) -> list[Path]:
    """Copy the folder of a bundled config; the paths of all files.

    Runs and keys are kept out of git, unless a `.gitignore` of one's own says what is.

    Args:
        name: as `loops examples` lists it, or its folder's path or name: `group_ranking`.
        directory: where to; what it needs is made.

    Raises:
        UsageError: there is no such example, one of its files is there already, or the folder
            cannot be made.
    """
    folder = bundled_root() / _example(name)
    files = {
        directory / source.relative_to(folder): source.read_bytes()
        for source in sorted(folder.rglob("*"))
        if source.is_file() and not _is_left(source.relative_to(folder))
    }
    ignored = directory / _DOTTED[_IGNORED]
    if not (ignored.exists() or ignored.is_symlink()):
        files.setdefault(ignored, (_TEMPLATE / _IGNORED).read_bytes())
    return _written(files, directory)


def _example(name: str) -> Path:
    folders = [config.parent for config in bundled_configs()]
    asked = name.strip("/").removesuffix("/train.toml")
    for folder in folders:
        if asked in (str(folder), folder.name):
            return folder
    near = nearest(asked, [folder.name for folder in folders])
    guess = f"did you mean {near}?" if near else "`loops examples` lists those that are bundled"
    raise UsageError(f"--example {name}: no such example; {guess}")


def _is_left(path: Path) -> bool:
    """What a run or an import made in a checkout is no part of an example."""
    return path.parts[0] == "runs" or "__pycache__" in path.parts


def make_project(directory: Path) -> list[Path]:
    """Write the project's files; the paths of all of them.

    Raises:
        UsageError: one of them is there already, or the folder cannot be made.
    """
    return _written(
        {
            directory / _DOTTED.get(source.name, source.name): source.read_bytes()
            for source in sorted(_TEMPLATE.iterdir())
            if source.is_file()
        },
        directory,
    )


def _written(files: Mapping[Path, bytes], directory: Path) -> list[Path]:
    file = file_above(directory / "a file in it")
    if file is not None:
        raise UsageError(f"{file}: is a file, where a folder is to be; name another")
    there = [path.name for path in files if path.exists() or path.is_symlink()]
    if there:
        what = "a project already" if len(there) == len(files) else "some of a project's files"
        raise UsageError(
            f"{directory}: holds {what} ({', '.join(there)}), and none is written over; name "
            "another folder, or move them away"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{directory}: cannot be made: {reason}; name another folder") from error
    return list(files)
