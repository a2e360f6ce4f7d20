"""Measure the judge against labelled cases, before a run is let to optimize what it says.

    python validate_judge.py [train.toml]

Each case is an attempt whose reply is given, graded by the Episode's own `grade` and the judge of
the config. Exit status 1: the judge is not to be trusted yet. Then look at the cases that are
listed, mend the rubric or take another model, and add cases of what you saw; never relabel to fit.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
from pydantic import BaseModel
from support_episode import SupportEpisode, Ticket

from loops_cookbook.errors import ConfigError
from loops_cookbook.services import Chat
from loops_cookbook.testing import Terms, attempt, open_models

HERE = Path(__file__).parent
LEAST_AGREEMENT = 0.9
"""Share of cases in which judge and label are the same."""


class Case(BaseModel):
    """One line of labelled.jsonl: a reply, and the score that a person gave it."""

    task: Ticket
    reply: str
    score: int


def read_cases(path: Path) -> list[Case]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Case.model_validate_json(line) for line in lines if line.strip()]


async def scores(cases: Sequence[Case], config: Path) -> list[int | None]:
    """What the judge says of each case; None where it gave no score."""
    found: list[int | None] = [None for _ in cases]

    async def grade(index: int, models: Mapping[str, Chat]) -> None:
        case, terms = cases[index], Terms(models=models)
        tried = await attempt(SupportEpisode, case.task, replies=[case.reply], terms=terms)
        if tried.reward is None:
            sys.stderr.write(f"{case.task.name}: {tried.detail}\n")
        else:
            found[index] = round(2 * tried.reward)

    async with open_models(config) as models, anyio.create_task_group() as group:
        for index in range(len(cases)):  # at once, up to the judge's max_concurrency
            group.start_soon(grade, index, models)
    return found


def agreement(labels: Sequence[int], judged: Sequence[int | None]) -> float:
    """The share of cases in which both say the same."""
    return sum(a == b for a, b in zip(labels, judged, strict=True)) / len(labels)


def kappa(labels: Sequence[int], judged: Sequence[int | None]) -> float:
    """Cohen's kappa: agreement beyond what two raters with these habits have by chance.

    Source: Cohen 1960, "A coefficient of agreement for nominal scales".
    """
    ours, theirs = Counter(labels), Counter(judged)
    chance = sum(ours[score] * theirs[score] for score in ours) / len(labels) ** 2
    return 1.0 if chance == 1 else (agreement(labels, judged) - chance) / (1 - chance)


def main(config: Path) -> int:
    cases = read_cases(HERE / "labelled.jsonl")
    labels = [case.score for case in cases]
    try:
        judged = anyio.run(scores, cases, config)
    except ConfigError as error:  # no such config, or no key
        sys.exit(str(error))
    for case, found in zip(cases, judged, strict=True):
        if found != case.score:
            told = {"label": case.score, "judge": found, "reply": case.reply}
            print(case.task.name, json.dumps(told, ensure_ascii=False))
    # A reply that should earn nothing and earns all is what training will find and repeat.
    holes = sum(a == 0 and b == 2 for a, b in zip(labels, judged, strict=True))
    share = agreement(labels, judged)
    print(
        f"{len(cases)} cases: agreement {share:.0%}, kappa {kappa(labels, judged):.2f}, "
        f"{holes} of {labels.count(0)} worthless replies paid in full"
    )
    is_trusted = share >= LEAST_AGREEMENT and holes == 0
    print("the judge may grade" if is_trusted else "the judge is not to be trusted yet")
    return 0 if is_trusted else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "train.toml"))
