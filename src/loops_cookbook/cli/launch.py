"""What stands around work that runs for a while: records, progress, signals, the way out.

Signals end the work in order and within a bound, notes and logs of this package go to its records,
what user code prints goes to stderr, and a process that cannot end by itself is ended once its
records are whole.
"""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

from loops_cookbook.cli.collector import collecting_seldom
from loops_cookbook.cli.departure import run_to_its_end
from loops_cookbook.cli.descriptors import allow_open_files
from loops_cookbook.cli.exits import say
from loops_cookbook.cli.interruption import Interruption
from loops_cookbook.cli.logs import logs_noted
from loops_cookbook.cli.resuming import program_of
from loops_cookbook.cli.signals import answering_quit
from loops_cookbook.cli.stopping import STOP_SECONDS, Stopper, open_stopper
from loops_cookbook.problems import shown
from loops_cookbook.recipes.ending import Ending
from loops_cookbook.recipes.frame import Surroundings
from loops_cookbook.recipes.launch import rendering_limiter
from loops_cookbook.recipes.plan import Plan
from loops_cookbook.recipes.plans import AnyPlan
from loops_cookbook.recipes.sft_evaluation import AT_ONCE, drawn
from loops_cookbook.recipes.sft_plan import HELD_OUT, SFTPlan
from loops_cookbook.recorders import Fanout
from loops_cookbook.records import Recorder, RunRow, RunStatus
from loops_cookbook.report.closing import Closing
from loops_cookbook.report.console import stdout_kept_for_the_answer
from loops_cookbook.report.progress import Progress
from loops_cookbook.report.streams import say_on_terminal, told_if_lost
from loops_cookbook.report.trackers import open_trackers
from loops_cookbook.rollouts.stall import Narrator
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.rundir.write import RunWriter, versions

LOG_WIDTH = 100
"""Of the closing lines in log.txt, in characters."""
BEYOND_RELEASE_SECONDS = 10.0
"""For the end of a run that is interrupted, beyond the clock under which its attempts release."""


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
        Terminated: SIGTERM or SIGHUP came, and the work has ended.
        CancelledError: the work was cancelled, and by no signal.
    """
    output = plan.config.output
    progress.expect(evaluated_attempts(plan))
    with (
        stdout_kept_for_the_answer(),
        progress,
        RunWriter(folder, trace=output.trace) as writer,
        ExitStack() as stack,
    ):
        recorder = Fanout((writer, progress))
        closed = _Closed(progress, writer)
        program = program_of(sys.argv[0], os.environ)
        interruption = Interruption(recorder, folder, closed.told, program)
        stopper = stack.enter_context(open_stopper(interruption, stop_seconds(plan)))
        if is_tracked:
            trackers = stack.enter_context(open_trackers(output, folder, recorder.note))
            recorder = Fanout((writer, progress, *trackers))
        narrator = Narrator(recorder.note)
        end_process = partial(_end_process, stopper, interruption, closed)
        ending = interruption.ending = Ending(recorder, end_process)
        stack.enter_context(told_if_lost(partial(_goes_on_unread, stopper, writer, folder)))
        with logs_noted(recorder), answering_quit(narrator.tell), collecting_seldom():
            for warning in (*warnings, *_open_files(plan)):
                recorder.note("warning", warning)
            around = Surroundings(rendering_limiter(plan), narrator, ending)
            stoppable = partial(stopper.until_stopped, partial(work, recorder, around))
            try:
                run_to_its_end(stoppable, end_process)
            finally:
                closed.told()
    if stopper.number is not None:
        raise interruption.exception(stopper.number)
    if ending.is_interrupted:  # a scope took the cancellation for its own, and went on
        raise asyncio.CancelledError


def row_of(plan: AnyPlan, folder: RunFolder, recipe: str) -> RunRow:
    """What is known of any run of a plan before it begins; its tasks are those of its sets."""
    if isinstance(plan, SFTPlan):
        sets = {HELD_OUT: len(plan.held_out.rows)} if plan.held_out else {}
    else:
        sets = {held_out.name: len(held_out.tasks) for held_out in plan.sets}
    return RunRow(
        run=folder.root.name,
        started_at=time.time(),
        recipe=recipe,
        scope=plan.scope.told,
        model=plan.model.name,
        updates=None,
        attempts_per_update=None,
        tasks=sets,
        service={},
        versions=versions(),
        config_path=str(plan.loaded.path),
        config=plan.config.model_dump(mode="json", by_alias=True),
    )


def evaluated_attempts(plan: AnyPlan) -> dict[str, int]:
    """How many attempts an evaluation of each set has."""
    if not isinstance(plan, SFTPlan):
        return {each.name: len(each.tasks) * each.attempts for each in plan.sets}
    if plan.held_out is None:
        return {}
    return {HELD_OUT: len(drawn(plan.held_out.rows, plan.config.evaluation.samples))}


def stop_seconds(plan: AnyPlan) -> float:
    """How long an end in order may take: attempts have a clock for it, and nothing else has."""
    if isinstance(plan, Plan):
        return plan.clocks.release_seconds + BEYOND_RELEASE_SECONDS
    return STOP_SECONDS


class _Closed:
    """The closing lines of a run, which its log has too."""

    def __init__(self, progress: Progress, writer: RunWriter) -> None:
        self._progress = progress
        self._writer = writer
        self._is_kept = False

    def told(self) -> Closing | None:
        """What the run came to, once its end is told."""
        closing = self._progress.closing
        if closing is not None and not self._is_kept:
            self._is_kept = True
            onward = [] if closing.resumed_by is None else [closing.resumed_by]
            told = [*closing.lines(width=LOG_WIDTH), *onward]
            self._writer.note("info", "\n".join(told))
        return closing


def _goes_on_unread(stopper: Stopper, writer: RunWriter, folder: RunFolder, why: str) -> None:
    """Nobody sees what the run shows; whoever started it may still be there, and wait."""
    if stopper.number is not None:  # it ends
        return
    writer.note("warning", f"stderr has no reader any more ({why}): the run goes on unseen")
    say_on_terminal(
        f"nobody reads the run's progress any more: it goes on, and {shown(folder.log)} tells of "
        "it; Ctrl-C ends it"
    )


def _open_files(plan: AnyPlan) -> Sequence[str]:
    """Let this process open what the plan's calls need; a warning where the system does not."""
    calls = AT_ONCE if isinstance(plan, SFTPlan) else plan.config.sampling_slots
    too_few = allow_open_files(calls)
    return [] if too_few is None else [too_few]


def _end_process(
    stopper: Stopper,
    interruption: Interruption,
    closed: _Closed,
    status: RunStatus,
    why: Sequence[str],
) -> NoReturn:
    """End at once: the run is told, and what is left of it would hold the process for ever."""
    if stopper.number is not None:
        interruption.tell(stopper.number, why)
        os._exit(128 + stopper.number)
    closed.told()
    say(why)
    sys.stdout.flush()
    os._exit(0 if status == "done" else 1)
