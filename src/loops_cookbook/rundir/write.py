"""The Recorder that writes a run folder: each row whole or absent, also after `kill -9`.

A transcript is written when its attempt ends, a row as soon as it is known, `run.json` again at
each update. What is written is what the recipe hands over: of the environment, where secrets
live, nothing is read here.
"""

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Literal, Self, TypeAlias, cast

from loops_cookbook.attempts import Attempt
from loops_cookbook.journal import Journal, encode, read_rows, utf8, write_atomically
from loops_cookbook.records import (
    TRAIN,
    EvaluationRow,
    GroupRow,
    Json,
    Level,
    RolloutRow,
    RunRow,
    RunStatus,
    StepRow,
)
from loops_cookbook.rundir.layout import RunFolder, locked, transcript_stem
from loops_cookbook.rundir.read import read_evaluations
from loops_cookbook.rundir.transcripts import transcript_text

Trace: TypeAlias = Literal["full", "samples", "off"]
"""Which attempts leave a transcript: all; the first two of each group and the first at each task
of an evaluation; none."""

_SAMPLES_OF_A_GROUP = 2
_SAMPLES_OF_A_TASK = 1
_VERSIONED = ("loops-cookbook", "numpy", "tokenizers", "transformers", "renderers", "torch", "peft")


class RunWriter:
    """Writes one run into its folder, which it holds as long as its `with` block lasts.

    Every method may raise `RunStopped`, when the disk takes no more.

    Args:
        folder: a new one, or one to go on with; rows are only ever added.
        trace: which attempts leave a transcript.
        now: Unix time.
    """

    def __init__(
        self, folder: RunFolder, *, trace: Trace = "full", now: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._trace = trace
        self._now = now
        self._run: RunRow | None = None
        self._transcripts_folder = str(folder.transcripts)  # joined once for each attempt
        self._transcripts: dict[tuple[str, int, int], str] = {}
        """Their names by purpose, group and attempt, until a row tells them."""
        self._taken: set[str] = set()
        """The name of every transcript there is."""
        self._evaluated: Counter[str] = Counter()
        """How many evaluations of each set are complete."""
        self._update: int | None = None
        """The last one that has a row here."""
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Lock the folder and open its files.

        Raises:
            RunFolderError: another process writes it.
        """
        with ExitStack() as opened:
            opened.enter_context(locked(self._folder, claims=True))
            self._folder.transcripts.mkdir(exist_ok=True)  # empty folders get lost in copies
            self._steps = opened.enter_context(Journal(self._folder.steps))
            self._groups = opened.enter_context(Journal(self._folder.groups))
            self._rollouts = opened.enter_context(Journal(self._folder.rollouts))
            self._evaluations = opened.enter_context(Journal(self._folder.evaluations))
            self._log = opened.enter_context(self._folder.log.open("ab", buffering=0))
            self._take_up()
            self._open = opened.pop_all()
        return self

    def _take_up(self) -> None:
        """Know what is there already, and add the scores that a kill kept from an update's row."""
        steps = [row for _, row in read_rows(self._folder.steps)]
        last = steps[-1] if steps else {}
        self._update = cast("int | None", last.get("update"))
        for row in read_evaluations(self._folder):
            self._evaluated[row.set] += 1
            if row.update == self._update and not row.metrics.keys() <= last.keys():
                self._steps.amend(row.metrics)
        self._taken.update(os.listdir(self._folder.transcripts))

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def run_started(self, row: RunRow) -> None:
        """Write `run.json`."""
        self._write_run(row)

    def attempt_ended(self, attempt: Attempt, purpose: str) -> None:
        """Write the attempt's transcript, if `trace` keeps it; never over another one."""
        if not self._keeps(attempt, purpose):
            return
        name = self._free_name(attempt, purpose)
        text = transcript_text(attempt, purpose)
        write_atomically(f"{self._transcripts_folder}/{name}", text)
        self._taken.add(name)
        self._transcripts[purpose, attempt.group, attempt.index] = name

    def group_settled(self, row: GroupRow) -> None:
        """Add a row to `groups.jsonl`."""
        self._groups.append([row.to_json()])

    def fates(self, rows: Sequence[RolloutRow]) -> None:
        """Add rows to `rollouts.jsonl`, each with the name of its transcript."""
        self._rollouts.append(map(self._with_transcript, rows))

    def update(self, row: StepRow) -> None:
        """Add a row to `steps.jsonl`; bring the counts in `run.json` up to date."""
        self._steps.append([row.to_json()])
        self._update = row.update
        if self._run is not None:
            self._write_run(replace(self._run, counts=row.totals))

    def evaluation(self, row: EvaluationRow) -> None:
        """Add a row to `evaluations.jsonl`, and the scores to the row of the update before it."""
        tasks = tuple(
            replace(
                task,
                transcripts=tuple(
                    self._name_of(row.set, task.group, i) for i in range(len(task.fates))
                ),
            )
            for task in row.tasks
        )
        self._evaluations.append([replace(row, tasks=tasks).to_json()])
        self._evaluated[row.set] += 1
        if row.update == self._update:
            self._steps.amend(row.metrics)

    def note(self, level: Level, text: str) -> None:
        """Add a line to `log.txt`; further lines of a text are indented."""
        time_of_day = datetime.fromtimestamp(self._now(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        line = f"{time_of_day} {level} " + text.replace("\n", "\n    ") + "\n"
        with suppress(OSError):  # a row that cannot be written ends the run; a remark must not
            self._log.write(utf8(line))

    def run_ended(
        self, status: RunStatus, counts: Mapping[str, int], reason: str | None = None
    ) -> None:
        """Say in `run.json` how the run ended, and with what counts."""
        if self._run is not None:
            ended = replace(self._run, status=status, reason=reason, ended_at=self._now())
            self._write_run(replace(ended, counts=counts))

    def _write_run(self, row: RunRow) -> None:
        write_atomically(self._folder.run, _indented(row.to_json()))
        self._run = row

    def _free_name(self, attempt: Attempt, purpose: str) -> str:
        """The name of its transcript, with a number in it where another one has that name.

        One has it where an attempt is made again under its old numbers, as a resumed run does.
        """
        # Each evaluation of a set numbers its groups anew, so its own number is in the name.
        evaluation = "" if purpose == TRAIN else f"{purpose}-{self._evaluated[purpose] + 1}"
        stem = transcript_stem(attempt.group, attempt.index, evaluation=evaluation)
        name = f"{stem}.json"
        for number in count(2):
            if name not in self._taken:
                break
            name = f"{stem}.{number}.json"
        return name

    def _with_transcript(self, row: RolloutRow) -> Json:
        told = row.to_json()
        told["transcript"] = row.transcript or self._name_of(TRAIN, row.group, row.attempt)
        return told

    def _name_of(self, purpose: str, group: int, attempt: int) -> str | None:
        """The transcript of an attempt that is asked for once."""
        return self._transcripts.pop((purpose, group, attempt), None)

    def _keeps(self, attempt: Attempt, purpose: str) -> bool:
        if self._trace == "samples":
            return attempt.index < (_SAMPLES_OF_A_GROUP if purpose == TRAIN else _SAMPLES_OF_A_TASK)
        return self._trace == "full"


def versions() -> dict[str, str]:
    """What decides a run's results and is installed here, with its version."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _indented(row: Json) -> str:
    return json.dumps(json.loads(encode(row)), indent=2, ensure_ascii=False) + "\n"
