"""`loops eval`: policies on the sets of a config, without training; two are compared."""

import json
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from itertools import combinations
from typing import Annotated

import typer

from loops_cookbook.cli.launch import launched, row_of
from loops_cookbook.cli.options import (
    ConfigArgument,
    DebugOption,
    EnvFileOption,
    JsonOption,
    ScopeOption,
    SetOption,
)
from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.errors import UsageError
from loops_cookbook.journal import encode
from loops_cookbook.recipes.check import evaluation_warnings
from loops_cookbook.recipes.confirm import confirm
from loops_cookbook.recipes.evaluate import (
    BASE,
    Candidate,
    comparisons,
    in_order,
    plan_evaluation,
    run_evaluation,
)
from loops_cookbook.recipes.frame import Surroundings
from loops_cookbook.recipes.launch import equipped, open_service, require_service
from loops_cookbook.recipes.plans import AnyPlan
from loops_cookbook.recipes.sft_check import sft_warnings
from loops_cookbook.recipes.sft_plan import SFTPlan
from loops_cookbook.recipes.start import Start, find_start, place_checkpoint, start_of
from loops_cookbook.records import Recorder
from loops_cookbook.report.console import print_lines, side_console, stdout_kept_for_the_answer
from loops_cookbook.report.evaluations import evaluation_lines
from loops_cookbook.report.progress import Progress
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.read import open_run
from loops_cookbook.services.base import Service


def evaluate(
    config: ConfigArgument,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="C",
            help="RUN_DIR (its last checkpoint), RUN_DIR@UPDATE, a path of the scope's service, or "
            f"`{BASE}`: the policy as its model is. Where none is given: model.start_from, else "
            f"`{BASE}`. May be given again; each is compared with the first.",
            show_default=False,
        ),
    ] = None,
    set_: SetOption = None,
    scope: ScopeOption = None,
    env_file: EnvFileOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Evaluate checkpoints on the sets of a config, without training.

    Two are compared.
    """
    loaded = load_config(config, set_ or [])
    environment = read_environment(loaded.directory, env_file=env_file)
    environment.apply()
    with stdout_kept_for_the_answer():
        plan = plan_evaluation(loaded, environment, os.environ, scope)
        candidates = candidates_of(plan, checkpoint or [])
        require_service(plan, os.environ)
        warnings = _warnings(plan)
    folder = new_run_folder(loaded.output_dir, loaded.working_directory)
    typer.echo(f"run: {folder.root}", err=True)
    typer.echo(f"config: {loaded.path}", err=True)
    _carry_out(plan, candidates, folder, warnings)
    _answer(candidates, folder, as_json=as_json)


def candidates_of(plan: AnyPlan, references: Sequence[str]) -> list[Candidate]:
    """The policies that are meant, each once.

    Raises:
        UsageError: a checkpoint is not there, does not fit, or is given twice.
    """
    found = [_candidate(reference, plan) for reference in references or [_own(plan)]]
    names = [candidate.name for candidate in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--checkpoint {twice}: is given twice; name each policy once")
    _require_apart([each.start for each in found if each.start is not None])
    return found


def _require_apart(starts: Sequence[Start]) -> None:
    """Refuse checkpoints of one path in two folders: the service would load one of them twice."""
    for start, other in combinations(starts, 2):
        is_copy = start.located and other.located and start.path == other.path
        if is_copy and start.is_here:
            raise UsageError(
                f"--checkpoint {start.name} and {other.name}: both are {start.path} to the "
                "engine, since one folder is the other, or a copy of it; evaluate a copy by a "
                "command of its own"
            )


def _own(plan: AnyPlan) -> str | Start:
    """The policy as the config has it: that of `start_from`, or its model's."""
    return start_of(plan) or BASE


def _candidate(reference: str | Start, plan: AnyPlan) -> Candidate:
    if reference == BASE:
        return Candidate(BASE, None)
    start = reference if isinstance(reference, Start) else find_start(reference, plan)
    name = start.name.rstrip("/")
    if start.located is not None:
        update = f"@{start.located.row.update}"
        name = name if name.endswith(update) else f"{name}{update}"
    return Candidate(name, start)


def _warnings(plan: AnyPlan) -> Sequence[str]:
    confirmation = confirm(plan, os.environ)
    if isinstance(plan, SFTPlan):
        return sft_warnings(plan, os.environ, confirmation)
    return evaluation_warnings(plan, os.environ, confirmation)


def _carry_out(
    plan: AnyPlan, candidates: Sequence[Candidate], folder: RunFolder, warnings: Sequence[str]
) -> None:
    every = plan.config.output.progress_every_seconds
    progress = Progress(folder.root, side=side_console(), answer=None, every_seconds=every)

    async def work(recorder: Recorder, around: Surroundings) -> None:
        @asynccontextmanager
        async def opened() -> AsyncGenerator[Service]:
            for candidate in candidates:
                if (start := candidate.start) is not None and start.is_here:
                    assert start.located is not None, "its files are here"
                    place_checkpoint(start.located, folder)
            rendering = around.rendering
            async with open_service(plan, folder, os.environ, rendering=rendering) as service:
                yield service

        row = row_of(plan, folder, "eval")
        if isinstance(plan, SFTPlan):
            await run_evaluation(plan, candidates, opened, recorder, row, around)
            return
        async with equipped(plan, folder, os.environ) as ready:
            await run_evaluation(ready, candidates, opened, recorder, row, around)

    launched(plan, folder, progress, warnings, work)


def _answer(candidates: Sequence[Candidate], folder: RunFolder, *, as_json: bool) -> None:
    # As they were recorded: with the names of their transcripts.
    rows = in_order(open_run(folder.root).evaluations(), candidates)
    compared = comparisons(rows, candidates)
    if as_json:
        told = {"run": str(folder.root), "evaluations": rows, "comparisons": compared}
        typer.echo(json.dumps(json.loads(encode(told)), ensure_ascii=False, indent=2))
    else:
        print_lines([*evaluation_lines(rows, compared), "", f"run: {folder.root}"])
