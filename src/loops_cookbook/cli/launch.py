"""What stands around work that runs for a while: records, progress, signals, the way out.

Signals end the work in order, notes and logs of this package go to its records, what user code
prints goes to stderr, and a process that cannot end by itself is ended once its records are whole.
"""

import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

from loops_cookbook.cli.collector import collecting_seldom
from loops_cookbook.cli.departure import run_to_its_end
from loops_cookbook.cli.descriptors import allow_open_files
from loops_cookbook.cli.exits import INTERRUPTED, say
from loops_cookbook.cli.logs import logs_noted
from loops_cookbook.cli.signals import answering_quit, until_signalled
from loops_cookbook.recipes.launch import rendering_limiter
from loops_cookbook.recipes.plans import AnyPlan
from loops_cookbook.recipes.rl import Surroundings
from loops_cookbook.recipes.sft_evaluation import AT_ONCE
from loops_cookbook.recipes.sft_plan import SFTPlan
from loops_cookbook.recorders import Fanout
from loops_cookbook.records import Recorder, RunStatus
from loops_cookbook.report.console import stdout_kept_for_the_answer
from loops_cookbook.report.progress import Progress
from loops_cookbook.report.trackers import open_trackers
from loops_cookbook.rollouts.stall import Narrator
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.write import RunWriter

LOG_WIDTH = 100
"""Of the closing lines in log.txt, in characters."""


def launched(
    plan: AnyPlan,
    folder: RunFolder,
    progress: Progress,
    warnings: Sequence[str],
    work: Callable[[Recorder, Surroundings], Awaitable[None]],
    *,
    is_tracked: bool = False,
) -> None:
    """Do the work of a plan, recorded in a folder and shown as it goes.

    Args:
        plan: what is carried out.
        folder: a new one, or that of a run that goes on.
        progress: shows it.
        warnings: noted first.
        work: is handed who is told, and what is around it.
        is_tracked: whether the trackers that the config names are told too.

    Raises:
        KeyboardInterrupt: SIGINT came, and the work has ended.
        Terminated: SIGTERM came, and the work has ended.
    """
    output = plan.config.output
    with (
        stdout_kept_for_the_answer(),
        progress,
        RunWriter(folder, trace=output.trace) as writer,
        ExitStack() as stack,
    ):
        recorder = Fanout((writer, progress))
        if is_tracked:
            trackers = stack.enter_context(open_trackers(output, folder, recorder.note))
            recorder = Fanout((writer, progress, *trackers))
        narrator = Narrator(recorder.note)

        def keep_closing() -> None:
            if progress.closing is not None:
                lines = progress.closing.lines(width=LOG_WIDTH)
                writer.note("info", "\n".join(lines))

        def end_process(status: RunStatus, why: Sequence[str]) -> NoReturn:
            keep_closing()
            _end_process(status, why)

        with logs_noted(recorder), answering_quit(narrator.tell), collecting_seldom():
            for warning in (*warnings, *_open_files(plan)):
                recorder.note("warning", warning)
            around = Surroundings(rendering_limiter(plan), narrator, end_process)
            signalled = partial(until_signalled, partial(work, recorder, around))
            try:
                run_to_its_end(signalled, end_process)
            finally:
                keep_closing()


def _open_files(plan: AnyPlan) -> Sequence[str]:
    """Let this process open what the plan's calls need; a warning where the system does not."""
    calls = AT_ONCE if isinstance(plan, SFTPlan) else plan.config.sampling_slots
    too_few = allow_open_files(calls)
    return [] if too_few is None else [too_few]


def _end_process(status: RunStatus, why: Sequence[str]) -> NoReturn:
    """End at once: the run is told, and what is left of it would hold the process for ever."""
    say(why)
    sys.stdout.flush()
    os._exit({"done": 0, "interrupted": INTERRUPTED}.get(status, 1))
