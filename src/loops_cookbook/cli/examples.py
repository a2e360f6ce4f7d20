"""`loops examples`: the bundled configs, one line each: what to type and what it shows.

What goes for all of them is on stderr, so that stdout is the list alone.
"""

import re
from pathlib import Path

import typer

from loops_cookbook.cli.options import DebugOption
from loops_cookbook.config.bundled import bundled_configs, bundled_root

_SENTENCE_END = re.compile(r"(?<=[.!?])\s")

HINTS = (
    "`loops run` takes a path of these, `loops init DIR --example NAME` its folder's name too,",
    "such as several_turns_tool.",
    "The examples run on this machine, and so do own_runtime and own_service; the other patterns",
    "name a model of hosted Loops, which takes a key. To try one on a model that is here, which",
    "`loops models` lists: --set 'model.name=\"smollm2-135m\"'.",
)


def examples(debug: DebugOption = False) -> None:
    """List what is bundled: `loops init DIR --example NAME` copies it."""
    root = bundled_root()
    lines = [(str(config), described(root / config)) for config in bundled_configs()]
    width = max((len(config) for config, _ in lines), default=0)
    for config, text in lines:
        typer.echo(f"{config:{width}}  {text}".rstrip())
    for hint in HINTS:
        typer.echo(hint, err=True)


def described(config: Path) -> str:
    """The first sentence of the README beside a config, else of the config's leading comment."""
    readme = config.with_name("README.md")
    if readme.is_file():
        paragraph = _first_paragraph(readme.read_text(encoding="utf-8"))
    else:
        paragraph = _leading_comment(config.read_text(encoding="utf-8"))
    return _SENTENCE_END.split(paragraph, maxsplit=1)[0]


def _first_paragraph(markdown: str) -> str:
    """The first run of lines that are text, headings left out."""
    for block in markdown.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if text := " ".join(" ".join(lines).split()):
            return text
    return ""


def _leading_comment(toml: str) -> str:
    words: list[str] = []
    for line in toml.splitlines():
        if not line.startswith("#"):
            break
        words += line.lstrip("#").split()
    return " ".join(words)
