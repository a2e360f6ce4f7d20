"""What a person is told of an interrupted run: what is waited for, what was kept, how to go on.

Told at once what its end waits for and for how long at most; at its end, on stderr, where its
records are and, on the last line of all, what goes on with it. A run that is cut short tells the
same, and what it ended without.
"""

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from loops_cookbook.cli.exits import SIGNALLED, interruption, say
from loops_cookbook.cli.resuming import PROGRAM
from loops_cookbook.cli.stopping import AGAIN, stopping
from loops_cookbook.errors import RunFolderError, RunStopped
from loops_cookbook.problems import shown
from loops_cookbook.recipes.ending import Ending
from loops_cookbook.records import Recorder
from loops_cookbook.report.closing import Closing
from loops_cookbook.report.words import count
from loops_cookbook.rollouts.frames import users_line
from loops_cookbook.rollouts.keeper import Keeper
from loops_cookbook.rundir.layout import RunFolder
from loops_cookbook.sandboxes.ledger import open_entries


class Interruption:
    """Tells of it; implements `cli.stopping.Ended`.

    Args:
        recorder: gets notes.
        folder: of the run.
        closing: what the run came to, once its end is told.
        program: starts another command as this one was started.
    """

    def __init__(
        self,
        recorder: Recorder,
        folder: RunFolder,
        closing: Callable[[], Closing | None],
        program: Sequence[str] = (PROGRAM,),
    ) -> None:
        self.ending: Ending | None = None
        """Of the run."""
        self._recorder = recorder
        self._folder = folder
        self._closing = closing
        self._program = program
        self._telling = threading.Lock()

    def cancelled(self, number: signal.Signals, seconds: float) -> None:
        """Say what is waited for."""
        keeper = None
        if self.ending is not None:
            self.ending.number, keeper = number, self.ending.keeper
        self._recorder.note("info", stopping(number, seconds, _waits(keeper)))

    def held(self) -> None:
        """Say what does not let it end."""
        where = _held_at() or "an unknown line"
        self._recorder.note("warning", f"the event loop cannot be stopped at {where}; {AGAIN}")

    def hurry(self) -> None:
        """Let the run wait for nothing any more."""
        if self.ending is not None:
            self.ending.hurry()

    def last_words(self, number: signal.Signals) -> None:
        """Tell the records and the person, unless the person was told."""
        if self.ending is not None:
            self.ending.number = self.ending.number or number
        try:
            without = () if self.ending is None else self.ending.cut_short()
        except RunStopped as error:  # the disk takes no more
            without = (str(error),)
        if (where := _held_at()) is not None:  # then where attempts are cannot be known
            without = (f"ended without waiting for what holds the event loop, at {where}",)
        self.tell(number, without)

    def tell(self, number: signal.Signals, without: Sequence[str]) -> None:
        """Say how the run was interrupted and what it ended without, once."""
        if self._telling.acquire(blocking=False):
            with suppress(OSError):  # nobody may listen any more
                what, *onward = self._left()
                say([interruption(number, what), *without, *self._sandboxes()], onward)
                sys.stdout.flush()

    def exception(self, number: signal.Signals) -> BaseException:
        """What ends the command in order, which says the same."""
        self._telling.acquire(blocking=False)
        return SIGNALLED[number]("\n".join(self._left()))

    def _left(self) -> list[str]:
        return left(self._closing(), self._folder)

    def _sandboxes(self) -> Sequence[str]:
        """Those that the ledger still has; what lives in this process alone ends with it."""
        try:
            still = open_entries(self._folder.sandboxes) if self._folder.sandboxes.exists() else ()
        except RunFolderError:
            return []
        what = "1 sandbox" if len(still) == 1 else f"{len(still):,} sandboxes"
        command = shlex.join([*self._program, "cleanup", shown(self._folder.root)])
        return [f"{what} may be left: `{command}` sees to that"] if still else []


def left(closing: Closing | None, folder: RunFolder) -> list[str]:
    """What there is of a run that was interrupted, and how to go on, where there is a way."""
    where = shown(folder.root)
    if closing is None:
        return ["nothing had begun"]
    if closing.status == "done":
        return [f"the run had come to its end; it is in {where}"]
    if closing.is_evaluation:
        return [_left_of_evaluation(closing.evaluated.evaluations, where)]
    if closing.onward is None:
        return [f"it kept no update; what it did is in {where}"]
    told = f"what it did is in {where}"
    return [told] if closing.resumed_by is None else [told, closing.resumed_by]


def _left_of_evaluation(ended: int, where: str) -> str:
    """It is never gone on with; what it came to until then stays."""
    if not ended:
        return f"no evaluation came to its end; what it did is in {where}, and it begins anew"
    are = "is" if ended == 1 else "are"
    return (
        f"{count(ended, 'evaluation')} came to the end and {are} in {where}/evaluations.jsonl; "
        "what is left of them begins anew"
    )


def _waits(keeper: Keeper | None) -> str:
    """What the end waits for, where that is more than a moment."""
    match 0 if keeper is None else sum(job.block is not None for job in keeper.jobs):
        case 0:
            return ""
        case 1:
            return "1 attempt releases what it holds"
        case attempts:
            return f"{attempts:,} attempts release what they hold"


def _held_at() -> str | None:
    """The line of a user's code that holds the event loop; None where it turns, as on it here."""
    if threading.current_thread() is threading.main_thread():
        return None
    # The documented way to another thread's frame, in spite of its name.
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    return users_line(frames.get(threading.main_thread().ident or 0))
