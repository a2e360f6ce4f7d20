"""`loops run`: carry a config out, shown as it goes and recorded in a folder of its own."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import typer

from loops_cookbook.cli.launch import launched, row_of
from loops_cookbook.cli.options import (
    ConfigArgument,
    DebugOption,
    EnvFileOption,
    ScopeOption,
    SetOption,
)
from loops_cookbook.cli.reading import tell_reading
from loops_cookbook.cli.resuming import (
    Resumed,
    ResumeOption,
    find_resumed,
    program_of,
    resume_command,
    told,
)
from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.recipes.before import before
from loops_cookbook.recipes.check import warnings_of
from loops_cookbook.recipes.cleanup import clean_up_before
from loops_cookbook.recipes.confirm import confirm
from loops_cookbook.recipes.frame import Surroundings
from loops_cookbook.recipes.launch import equipped, open_service, require_service
from loops_cookbook.recipes.memory import Memory
from loops_cookbook.recipes.plans import AnyPlan, plan_config
from loops_cookbook.recipes.resume import changed_code, code_digests, file_digests
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.recipes.sft import run_sft
from loops_cookbook.recipes.sft_check import sft_warnings
from loops_cookbook.recipes.sft_plan import SFTPlan
from loops_cookbook.recipes.start import put_in_place, start_of
from loops_cookbook.records import TRAIN, Recorder, RunRow
from loops_cookbook.report.console import (
    answer_console,
    side_console,
    stdout_kept_for_the_answer,
)
from loops_cookbook.report.progress import Progress
from loops_cookbook.report.trackers import require_trackers
from loops_cookbook.rundir.layout import RunFolder, new_run_folder
from loops_cookbook.rundir.past import Past, SFTPast
from loops_cookbook.rundir.savepoints import SavePoints


def run(
    config: ConfigArgument,
    set_: SetOption = None,
    scope: ScopeOption = None,
    env_file: EnvFileOption = None,
    debug: DebugOption = False,
    resume: ResumeOption = None,
) -> None:
    """Train on what an agent does, or on conversations.

    The config's recipe says which of the two.
    """
    loaded = load_config(config, set_ or [])
    environment = read_environment(loaded.directory, env_file=env_file)
    environment.apply()
    tell_reading(loaded)
    with stdout_kept_for_the_answer():
        plan = plan_config(loaded, environment, os.environ, scope)
        require_trackers(plan.config.output)
        require_service(plan, os.environ)
        resumed = None if resume is None else find_resumed(plan, resume)
        start = None if resumed else start_of(plan)
        warnings = _warnings(plan)
    if resumed is None:
        folder = new_run_folder(loaded.output_dir, loaded.working_directory)
    else:
        folder = resumed.run.folder
    typer.echo(f"run: {folder.root}", err=True)
    typer.echo(f"config: {loaded.path}", err=True)
    row = _run_row(plan, folder)
    if start is not None:
        row = replace(row, started_from=put_in_place(start, folder))
    program = program_of(sys.argv[0], os.environ)
    again = resume_command(config, set_ or [], scope, env_file, folder.root, program=program)
    launch = _Launch(plan, folder, replace(row, resume_command=again), resumed)
    _carry_out(launch, warnings)


def _warnings(plan: AnyPlan) -> Sequence[str]:
    confirmation = confirm(plan, os.environ)
    if isinstance(plan, SFTPlan):
        return sft_warnings(plan, os.environ, confirmation)
    return warnings_of(plan, os.environ, confirmation)


@dataclass(frozen=True, slots=True)
class _Launch:
    """What is carried out."""

    plan: AnyPlan
    folder: RunFolder
    row: RunRow
    """As a new run begins with it."""
    resumed: Resumed | None


def _carry_out(launch: _Launch, warnings: Sequence[str]) -> None:
    plan, folder = launch.plan, launch.folder
    start = launch.resumed.run.run.started_from if launch.resumed else launch.row.started_from
    progress = Progress(
        folder.root,
        side=side_console(),
        answer=answer_console(),
        every_seconds=plan.config.output.progress_every_seconds,
    )

    async def work(recorder: Recorder, around: Surroundings) -> None:
        resumed = None if launch.resumed is None else launch.resumed.read_again()
        if resumed is not None:
            progress.recall(resumed.run.steps(), resumed.run.evaluations())
            for line in (await clean_up_before(folder)).lines:
                recorder.note("info", line)
        opened = partial(open_service, plan, folder, os.environ, rendering=around.rendering)
        with SavePoints(folder) as savepoints:
            if isinstance(plan, SFTPlan):
                memory = Memory[SFTPast](savepoints, start=start)
                if resumed is not None:
                    memory = resumed.remember(memory, resumed.sft_past(plan))
                row = _row_of(launch.row, recorder, resumed, memory.past)
                opened = partial(opened, before=before(memory))
                await run_sft(plan, opened, recorder, row, around, memory)
                return
            of_run = Memory[Past](savepoints, start=start)
            if resumed is not None:
                of_run = resumed.remember(of_run, resumed.past(plan))
            opened = partial(opened, before=before(of_run))
            row = _row_of(launch.row, recorder, resumed, of_run.past)
            async with equipped(plan, folder, os.environ) as ready:
                await run_rl(ready, opened, recorder, row, around, of_run)

    launched(plan, folder, progress, warnings, work, is_tracked=True)


def _row_of(
    row: RunRow, recorder: Recorder, resumed: Resumed | None, past: Past | SFTPast | None
) -> RunRow:
    """The row as a run begins with it, or goes on with it."""
    if resumed is None or past is None:
        return row
    recorder.note("info", f"resumed: {told(past)}")
    if (changed := changed_code(resumed.run.run.code, row.code)) is not None:
        recorder.note("info", changed)
    update = past.recorded if isinstance(past, SFTPast) else past.update
    return resumed.row(row, at=time.time(), update=update)


def _run_row(plan: AnyPlan, folder: RunFolder) -> RunRow:
    row = replace(
        row_of(plan, folder, plan.config.recipe),
        digests=file_digests(plan.loaded),
        code=code_digests(plan.loaded),
    )
    if isinstance(plan, SFTPlan):
        tasks = {TRAIN: len(plan.train.rows), **row.tasks}
        return replace(row, updates=len(plan.batches), tasks=tasks)
    training = plan.config.training
    return replace(
        row,
        updates=training.updates,
        attempts_per_update=training.groups_per_update * training.group_size,
        max_staleness=training.staleness_bound,
        tasks={TRAIN: len(plan.tasks), **row.tasks},
    )
