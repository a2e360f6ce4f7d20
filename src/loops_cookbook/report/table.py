"""The table of updates: which metrics stand in it, and how a row looks."""

from collections.abc import Callable
from dataclasses import dataclass

from loops_cookbook.records import StepRow
from loops_cookbook.report.words import duration, measure, short

_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, its width and what it shows of a row's metrics."""

    title: str
    width: int
    metric: str
    show: Callable[[float], str] = measure


_STALE = Column("stale", 6, "policy/staleness_max", short)
_RL = (
    Column("reward", 7, "reward/all_mean"),
    Column("group std", 9, "reward/group_std_mean"),
    Column("usable", 7, "groups/usable", short),
    Column("lost", 5, "attempts/discarded", short),
    Column("tokens", 7, "tokens/sampled", short),
    Column("kl", 8, "kl/sample_train_k3"),
    Column("time", 11, "time/update", duration),
)
_RL_IF_WIDE = (
    Column("loss", 9, "loss"),
    Column("grad norm", 9, "grad_norm"),
    Column("entropy", 8, "entropy"),
    _STALE,
)
_SFT = (
    Column("loss", 8, "loss"),
    Column("epoch", 6, "epoch"),
    Column("rows", 6, "rows", short),
    Column("tokens", 7, "tokens/read", short),
    Column("trained", 7, "tokens/trained", short),
    Column("grad norm", 9, "grad_norm"),
    Column("rate", 8, "learning_rate"),
    Column("time", 11, "time/update", duration),
)


@dataclass(frozen=True, slots=True)
class UpdateTable:
    """The table for a run of so many planned updates, within so many characters."""

    planned: int | None
    width: int
    recipe: str = "rl"
    is_async: bool = False

    @property
    def head(self) -> str:
        """The line of titles."""
        cells = [f"{'update':>{self._first}}"]
        cells += [f"{column.title:>{column.width}}" for column in self._columns]
        return _GAP.join(cells)

    def row(self, step: StepRow) -> str:
        """The line of an update, under `head`."""
        cells = [f"{self.progress(step.update):>{self._first}}"]
        cells += [f"{_cell(step, column):>{column.width}}" for column in self._columns]
        return _GAP.join(cells)

    def sentence(self, step: StepRow) -> str:
        """The narrow columns in one line that needs no head."""
        columns = (*self._always, _STALE) if self.is_async else self._always
        told = [f"{column.title} {_cell(step, column)}" for column in columns]
        return f"update {self.progress(step.update)}: {', '.join(told)}"

    def progress(self, update: int) -> str:
        """`13/50`, or `13` where no end is planned."""
        return str(update) if self.planned is None else f"{update}/{self.planned}"

    @property
    def _first(self) -> int:
        return max(len("update"), 2 * len(str(self.planned or 9999)) + 1)

    @property
    def _always(self) -> tuple[Column, ...]:
        return _SFT if self.recipe == "sft" else _RL

    @property
    def _columns(self) -> tuple[Column, ...]:
        columns = (*self._always, *(() if self.recipe == "sft" else _RL_IF_WIDE))
        width = self._first + sum(len(_GAP) + column.width for column in columns)
        return columns if width <= self.width else self._always


def _cell(step: StepRow, column: Column) -> str:
    value = step.metrics.get(column.metric)
    if value is None:
        return "-"
    if column.metric == "groups/usable":
        rejected = sum(step.metrics.get(f"groups/{why}", 0) for why in ("no_variance", "too_few"))
        return f"{value:.0f}/{value + rejected:.0f}"
    return column.show(value)
