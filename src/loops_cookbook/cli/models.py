"""`loops models`: what the embedded engine can load here, and fetching what is not here yet."""

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from loops_cookbook.cli.exits import leaving
from loops_cookbook.cli.options import DebugOption, JsonOption
from loops_cookbook.config.fetched import FETCHABLE, is_fetched
from loops_cookbook.errors import ModelError, UsageError
from loops_cookbook.problems import nearest
from loops_cookbook.recipes.catalog import LORA_RANK, Entry, Machine, catalog, this_machine
from loops_cookbook.recipes.fetch import fetch
from loops_cookbook.report.console import print_lines

FETCH = "fetch"

_TITLES = (
    *("model", "kind", "architecture", "parameters", "max length"),
    *("sample", f"LoRA {LORA_RANK}", "every weight", "fits"),
)


def models(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FOLDER | fetch NAME",
            help="Folders with models, to list them too; or `fetch` and the model to fetch.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """List what can be trained on this machine, or fetch a model."""
    words = words or []
    if words and words[0] == FETCH:
        _fetch(words[1:], as_json)
    else:
        _list(words, as_json)


def _fetch(names: list[str], as_json: bool) -> None:
    known = ", ".join(FETCHABLE)
    if len(names) != 1:
        raise UsageError(f"fetch: name one model: {known}")
    (name,) = names
    if name not in FETCHABLE:
        near = nearest(name, FETCHABLE)
        guess = f"did you mean {near}?" if near else f"it is one of {known}"
        raise ModelError(f"fetch: there is no {name!r} to fetch; {guess}")
    with leaving("nothing of it was kept; run it again"):
        folder = fetch(FETCHABLE[name], lambda text: typer.echo(text, err=True))
    typer.echo(json.dumps({"name": name, "directory": str(folder)}) if as_json else folder)


def _list(folders: list[str], as_json: bool) -> None:
    machine = this_machine()
    entries = catalog(folders, machine)
    to_fetch = [row for row in FETCHABLE.values() if not is_fetched(row.name)]
    if as_json:
        told = {
            "machine": {"device": machine.device, "memory_bytes": machine.memory_bytes},
            "models": [entry.to_json() for entry in entries],
            "to_fetch": [row.name for row in to_fetch],
        }
        typer.echo(json.dumps(told, ensure_ascii=False, indent=2))
        return
    lines = listed(entries, machine)
    lines += [
        f"To fetch: {row.name} ({row.repository}, {row.licence}) with `loops models fetch "
        f"{row.name}`"
        for row in to_fetch
    ]
    print_lines(lines)


def listed(entries: Sequence[Entry], machine: Machine) -> list[str]:
    """The table, and what its numbers mean."""
    return [*_table([_TITLES, *map(_cells, entries)]), "", _explained(machine)]


def _cells(entry: Entry) -> tuple[str, ...]:
    facts, needed = entry.facts, entry.memory_bytes
    fits = {3: "all", 2: "LoRA", 1: "sampling", 0: "no"}[len(entry.fits)]
    return (
        *(entry.name, entry.kind, facts.architecture, _million(facts.parameters)),
        str(facts.max_seq_len or "unknown"),
        *(_gigabytes(needed[use]) for use in ("sample", "train_lora", "train_all")),
        fits,
    )


def _explained(machine: Machine) -> str:
    kind = "the CPU, float32" if machine.device == "cpu" else "CUDA, bfloat16 under LoRA"
    batch, there = _gigabytes(machine.batch_bytes), _gigabytes(machine.memory_bytes)
    return (
        f"Memory to sample, to train a LoRA adapter and to train every weight, on {kind};\n"
        f"a batch takes up to {batch} more. There are {there}."
    )


def _million(count: int) -> str:
    return f"{count / 10**6:,.{2 if count < 10**7 else 0}f} M"


def _gigabytes(size: int) -> str:
    return f"{size / 10**9:,.1f} GB"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numbers = range(3, 8)
    return [
        "  ".join(
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
