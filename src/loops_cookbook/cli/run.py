"""`loops run`: carry a config out, shown as it goes and recorded in a folder of its own."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import anyio
import typer

from loops_cookbook.cli.collector import collecting_seldom
from loops_cookbook.cli.descriptors import allow_open_files
from loops_cookbook.cli.exits import INTERRUPTED, say
from loops_cookbook.cli.logs import logs_noted
from loops_cookbook.cli.options import (
    ConfigArgument,
    DebugOption,
    EnvFileOption,
    ScopeOption,
    SetOption,
)
from loops_cookbook.cli.signals import answering_quit, until_signalled
from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.recipes.check import warnings_of
from loops_cookbook.recipes.confirm import confirm
from loops_cookbook.recipes.launch import (
    open_service,
    rendering_limiter,
    require_service,
    with_judges,
)
from loops_cookbook.recipes.plan import Plan, plan_run
from loops_cookbook.recipes.rl import Surroundings, run_rl
from loops_cookbook.recipes.sandboxes import open_sandboxes, require_sandboxes
from loops_cookbook.recorders import Fanout
from loops_cookbook.records import RunRow, RunStatus
from loops_cookbook.report.console import (
    answer_console,
    side_console,
    stdout_kept_for_the_answer,
)
from loops_cookbook.report.progress import Progress
from loops_cookbook.rollouts.stall import Narrator
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.write import RunWriter, versions

LOG_WIDTH = 100
"""Of the closing lines in log.txt, in characters."""


def run(
    config: ConfigArgument,
    set_: SetOption = None,
    scope: ScopeOption = None,
    env_file: EnvFileOption = None,
    debug: DebugOption = False,
) -> None:
    """Train: run the tasks, grade the attempts, update the policy."""
    loaded = load_config(config, set_ or [])
    environment = read_environment(loaded.directory, env_file=env_file)
    environment.apply()
    with stdout_kept_for_the_answer():
        plan = plan_run(loaded, environment, os.environ, scope)
        require_service(plan, os.environ)
        require_sandboxes(plan.config)
        warnings = warnings_of(plan, os.environ, confirm(plan, os.environ))
    folder = new_run_folder(loaded.output_dir, loaded.working_directory)
    typer.echo(f"run: {folder.root}", err=True)
    typer.echo(f"config: {loaded.path}", err=True)
    typer.echo("policy: lasts as long as the run; this version saves no checkpoints", err=True)
    too_few = allow_open_files(plan.config.sampling_slots)
    _carry_out(plan, folder, [*warnings, *([too_few] if too_few else [])])


def _carry_out(plan: Plan, folder: RunFolder, warnings: Sequence[str]) -> None:
    output = plan.config.output
    progress = Progress(
        folder.root,
        side=side_console(),
        answer=answer_console(),
        every_seconds=output.progress_every_seconds,
    )
    with (
        stdout_kept_for_the_answer(),
        progress,
        RunWriter(folder, trace=output.trace) as writer,
    ):
        recorder = Fanout((writer, progress))
        narrator = Narrator(recorder.note)
        with logs_noted(recorder), answering_quit(narrator.tell):
            for warning in warnings:
                recorder.note("warning", warning)
            rendering = rendering_limiter(plan)
            opener = partial(open_service, plan, folder, os.environ, rendering=rendering)
            row = _run_row(plan, folder)

            def keep_closing() -> None:
                if progress.closing is not None:
                    lines = progress.closing.lines(width=LOG_WIDTH)
                    writer.note("info", "\n".join(lines))

            def end_process(status: RunStatus, why: Sequence[str]) -> NoReturn:
                keep_closing()
                _end_process(status, why)

            around = Surroundings(rendering, narrator, end_process)

            async def work() -> None:
                async with (
                    with_judges(plan, os.environ) as judged,
                    open_sandboxes(plan.config, folder) as sandboxes,
                ):
                    ready = replace(judged, sandboxes=sandboxes)
                    await run_rl(ready, opener, recorder, row, around)

            try:
                with collecting_seldom():
                    anyio.run(until_signalled, work)
            finally:
                keep_closing()


def _end_process(status: RunStatus, why: Sequence[str]) -> NoReturn:
    """End at once: the run is told, and what is left of it would hold the process for ever."""
    say(why)
    sys.stdout.flush()
    os._exit({"done": 0, "interrupted": INTERRUPTED}.get(status, 1))


def _run_row(plan: Plan, folder: RunFolder) -> RunRow:
    training = plan.config.training
    return RunRow(
        run=folder.root.name,
        started_at=time.time(),
        recipe=plan.config.recipe,
        scope=plan.scope.told,
        model=plan.model.name,
        updates=training.updates,
        attempts_per_update=training.groups_per_update * training.group_size,
        max_staleness=training.staleness_bound,
        tasks={
            "train": len(plan.tasks),
            **{held_out.name: len(held_out.tasks) for held_out in plan.sets},
        },
        service={},
        versions=versions(),
        config_path=str(plan.loaded.path),
        config=plan.config.model_dump(mode="json", by_alias=True),
    )
