"""Rows take a while to be read and checked: a command about to do so says it, if they are many."""

import typer

from loops_cookbook.config.load import AnyConfig, LoadedConfig
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.problems import shown

MANY_BYTES = 1_000_000
"""A second or two, where the chat format is a slow one."""


def tell_reading(loaded: LoadedConfig[AnyConfig]) -> None:
    """Say on stderr which rows are read now, where nobody would know for what the command waits."""
    sft = loaded.of_recipe(SFTConfig)
    if sft is None:
        return
    path = sft.beside(sft.config.data.train)
    try:
        size = path.stat().st_size
    except OSError:  # whoever reads it says what is wrong
        return
    if size >= MANY_BYTES:
        typer.echo(f"reading {shown(path)}, {size / 1e6:.0f} MB", err=True)
