"""Progress of a run as it goes, on stderr; what it came to, at the end, on stdout.

On a terminal every update adds a line to a table; the line below it, drawn again as attempts
end, tells how far the next update is and how long the rest may take. Elsewhere a plain line is
printed for the first update and for the last, and between them whenever `every_seconds` have
gone by since the line before, in the middle of a long update too. Notes are printed as they come,
and so are evaluations, each after the row of its update.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loops_cookbook.attempts import Attempt
from loops_cookbook.records import (
    TRAIN,
    EvaluationRow,
    GroupRow,
    Level,
    RolloutRow,
    RunRow,
    RunStatus,
    StepRow,
)
from loops_cookbook.report.closing import TITLES, Closing, Evaluated
from loops_cookbook.report.console import has_unicode, printable
from loops_cookbook.report.onward import onward
from loops_cookbook.report.pace import Pace
from loops_cookbook.report.streams import forget
from loops_cookbook.report.table import UpdateTable
from loops_cookbook.report.words import between, count, measure, share

_REFRESH_SECONDS = 0.1
_ROWS_UNDER_A_HEAD = 25
_BAR_WIDTH = 16
_STYLES: Mapping[Level, str] = {"warning": "yellow", "error": "bold red"}


class Progress:
    """A Recorder that shows a run to a person; a context manager.

    Args:
        folder: the run's folder, named at the end.
        side: where progress goes: stderr.
        answer: where the closing lines go: stdout; None: nowhere.
        every_seconds: between two plain lines.
        now: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        folder: Path,
        *,
        side: Console,
        answer: Console | None,
        every_seconds: float = 30.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._side = side
        self._answer = answer
        self._every_seconds = every_seconds
        self._now = now
        self._begun = now()
        self._live: Live | None = None
        self._open = ExitStack()
        self._shown_at = -every_seconds
        self._table = UpdateTable(None, side.width)
        self._has_started = False
        self._batch: int | None = None
        self._unseen: StepRow | None = None
        self._rows = 0
        self._updates, self._is_resumed = 0, False
        self._ended = 0
        """Attempts that have ended and are in no update's row yet."""
        self._lost = 0
        """Those of them without a reward."""
        self._rejected = 0
        """Attempts of the groups rejected since the last update: so many more are needed."""
        self._evaluating: str | None = None
        self._evaluated = 0
        """Attempts of that set that have ended."""
        self._of_sets: Mapping[str, int] = {}
        """How many attempts an evaluation of each set has."""
        self._unscored = 0
        """Those of them without a reward."""
        self._pace = Pace()
        self._curves: dict[str, list[tuple[int, float]]] = {metric: [] for metric in TITLES}
        """By update, what the closing chart may be of."""
        self._evaluations: dict[str, tuple[EvaluationRow, EvaluationRow]] = {}
        self._closed_evaluations = Evaluated()
        self._resume_command: str | None = None
        self.closing: Closing | None = None
        """What the run came to, once it has ended."""

    def __enter__(self) -> Self:
        if self._side.is_terminal and not self._side.is_dumb_terminal:
            live = Live(
                console=self._side,
                auto_refresh=False,
                transient=True,
                redirect_stdout=self._answer is not None and self._answer.is_terminal,
                get_renderable=self._status_line,
            )
            self._live = self._open.enter_context(live)
        return self

    def __exit__(self, *exc: object) -> None:
        self._live = None
        self._open.close()

    def expect(self, attempts: Mapping[str, int]) -> None:
        """Take in how many attempts an evaluation of each set has."""
        self._of_sets = attempts

    def run_started(self, row: RunRow) -> None:
        """Take in how much is planned."""
        self._has_started = True
        self._begun = self._now()
        is_async = row.max_staleness > 0
        self._table = UpdateTable(row.updates, self._side.width, row.recipe, is_async)
        self._batch = row.attempts_per_update
        self._updates, self._is_resumed = row.resumed_from, bool(row.resumed_at)
        self._resume_command = row.resume_command

    def recall(self, steps: Iterable[StepRow], evaluations: Iterable[EvaluationRow]) -> None:
        """Take in what a run that goes on did before, so that its end tells of all of it."""
        for step in steps:
            self._remember(step)
        for row in evaluations:
            self._compare(row)

    def attempt_ended(self, attempt: Attempt, purpose: str) -> None:
        """Count it."""
        if purpose == TRAIN:
            self._ended += 1
            self._lost += attempt.reward is None
        else:
            self._evaluating = purpose
            self._pace.evaluating()
            self._evaluated += 1
            self._unscored += attempt.reward is None
        if self._live is None:
            if self._is_due(self._every_seconds):
                self._print_unseen() if self._unseen else self._print(self._status())
        elif self._is_due(_REFRESH_SECONDS):
            self._refresh()

    def group_settled(self, row: GroupRow) -> None:
        """A rejected group is replaced by another."""
        if not row.usable:
            self._rejected += len(row.rewards)

    def fates(self, rows: Sequence[RolloutRow]) -> None:
        """Counted elsewhere."""

    def update(self, row: StepRow) -> None:
        """Show its row."""
        self._rows += 1
        self._updates = row.update
        # In async mode attempts of later updates have ended by now.
        self._ended = max(0, self._ended - int(row.metrics.get("attempts/finished", self._ended)))
        self._lost = max(0, self._lost - int(row.metrics.get("attempts/discarded", self._lost)))
        self._rejected = 0
        self._remember(row)
        is_sampled = self._table.recipe != "sft"
        self._pace.updated(self._now(), row.metrics.get("time/update"), is_sampled=is_sampled)
        if self._live is not None:
            if self._rows % _ROWS_UNDER_A_HEAD == 1:
                self._print(self._table.head, style="dim")
            self._print(self._table.row(row))
            self._refresh()
            return
        self._unseen = row
        is_end = self._rows == 1 or row.update == self._table.planned
        if is_end or self._is_due(self._every_seconds):
            self._print_unseen()

    def evaluation(self, row: EvaluationRow) -> None:
        """Show its scores."""
        self._compare(row)
        self._pace.evaluating()
        self._evaluating, self._evaluated, self._unscored = None, 0, 0
        self._print_unseen()
        self._print(_scores(row))

    def note(self, level: Level, text: str) -> None:
        """Show it, unless it is for debugging."""
        if level != "debug":
            self._print(text if level == "info" else f"{level}: {text}", style=_STYLES.get(level))

    def run_ended(
        self, status: RunStatus, counts: Mapping[str, int], reason: str | None = None
    ) -> None:
        """Print what the run came to; why it ended is said by the command."""
        self._print_unseen()
        self._live = None
        self._open.close()
        self.closing = Closing(
            status=status,
            folder=self._folder,
            updates=self._updates,
            seconds=self._now() - self._begun,
            curve=self._curves[self._charted],
            charted=self._charted,
            evaluations=self._evaluations,
            evaluated=self._closed_evaluations,
            is_evaluation=self._table.recipe == "eval",
            counts=counts,
            is_resumed=self._is_resumed,
            onward=onward(self._folder, status, self._resume_command),
        )
        if self._answer is None:
            return
        try:
            self._print_answer(self._answer, self.closing)
        except OSError as error:  # the run has ended as it has, and its log tells the same
            forget(self._answer.file.fileno())
            if not isinstance(error, BrokenPipeError):
                why = error.strerror
                self.note("warning", f"stdout takes no more ({why}): log.txt has how the run ended")

    def _print_answer(self, answer: Console, closing: Closing) -> None:
        encoding = answer.encoding
        for line in closing.lines(width=answer.width, unicode=has_unicode(encoding)):
            answer.print(Text(printable(line, encoding)), soft_wrap=True)

    @property
    def _charted(self) -> str:
        return "loss" if self._table.recipe == "sft" else "reward/all_mean"

    def _remember(self, row: StepRow) -> None:
        for metric, curve in self._curves.items():
            if (value := row.metrics.get(metric)) is not None:
                curve.append((row.update, value))

    def _compare(self, row: EvaluationRow) -> None:
        first, _ = self._evaluations.get(row.set, (row, row))
        self._evaluations[row.set] = (first, row)
        self._closed_evaluations = self._closed_evaluations.with_(row)

    def _is_due(self, seconds: float) -> bool:
        return self._now() - self._shown_at >= seconds

    def _print_unseen(self) -> None:
        if self._unseen is not None:
            left = self._left()
            self._print(self._table.sentence(self._unseen) + (f", {left}" if left else ""))
            self._unseen = None

    def _print(self, text: str, *, style: str | None = None) -> None:
        plain = Text(printable(text, self._side.encoding), style or "")
        self._side.print(plain, soft_wrap=True)
        self._shown_at = self._now()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()
            self._shown_at = self._now()

    def _status(self) -> str:
        """Where the run stands now, in words."""
        if self._evaluating is not None:
            of = self._of_sets.get(self._evaluating)
            ended = (
                f"{self._evaluated:,}/{of:,} attempts" if of else count(self._evaluated, "attempt")
            )
            return f"evaluating {self._evaluating}: {ended} ended{_lost(self._unscored)}"
        if not self._has_started:
            return "starting"
        if self._table.recipe == "eval":
            return "evaluating"
        if self._updates == self._table.planned:
            return "all updates done"
        update = f"update {self._table.progress(self._updates + 1)}"
        if self._table.recipe == "sft":
            return update
        needed = None if self._batch is None else self._batch + self._rejected
        if needed is None or self._ended > needed:  # then a group that started earlier still runs
            ended = count(self._ended, "attempt")
            return f"{update}: {ended} ended and not trained yet{_lost(self._lost)}"
        return f"{update}: {self._ended:,}/{needed:,} attempts ended{_lost(self._lost)}"

    def _status_line(self) -> Table:
        """The same for a terminal, with a bar, in one line."""
        line = Table.grid(padding=(0, 2, 0, 0))
        cells: list[RenderableType] = []
        if self._batch is not None and self._evaluating is None:
            total = self._batch + self._rejected
            completed = min(self._ended, total)
            cells.append(ProgressBar(total=total, completed=completed, width=_BAR_WIDTH))
            line.add_column()
        cells.append(", ".join(filter(None, (self._status(), self._left()))))
        line.add_column(no_wrap=True, overflow="ellipsis")
        line.add_row(*cells)
        return line

    def _left(self) -> str:
        """How long the planned updates may still take."""
        if self._table.planned is None:
            return ""
        updates = self._table.planned - self._updates
        return self._pace.left(updates, are_evaluated=bool(self._of_sets))


def _lost(attempts: int) -> str:
    return f", {attempts:,} of them lost" if attempts else ""


def _scores(row: EvaluationRow) -> str:
    """An evaluation in one line."""
    when = "before the first update" if row.update == 0 else f"after {count(row.update, 'update')}"
    when = when if row.policy is None else f"by {row.policy}"
    parts = [] if row.loss is None else [f"loss {measure(row.loss)}"]
    if row.loss is not None and not row.fates:
        return f"{row.set} {when}: {parts[0]}"
    parts += [
        f"reward {between(measure, row.reward_mean, row.reward_interval)}",
        f"solved {between(share, row.solve_rate, row.solve_rate_interval)}",
    ]
    parts += [f"pass@{k} {share(value)}" for k, value in row.pass_at_k.items()]
    attempts = sum(row.fates.values())
    parts.append(count(attempts, "attempt"))
    lost = attempts - row.fates.get("evaluated", 0)
    if lost:
        parts.append(f"{lost:,} without a reward")
    return f"{row.set} {when}: {', '.join(parts)}"
