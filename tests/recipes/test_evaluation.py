"""A set is scored by what its graders say, one or all of a group; why attempts are lost is told."""

import json
from pathlib import Path

import pytest
from tests.recipes.notebook import Notebook
from tests.recipes.test_rl import HalfRight, row_of
from trio.testing import MockClock

from loops_cookbook.errors import NoLearningSignal
from loops_cookbook.recipes.check import warnings_of
from loops_cookbook.recipes.rl import run_rl
from loops_cookbook.testing import ScriptedService

pytestmark = pytest.mark.anyio

RANKED = """

class Ranked(Spell):
    @classmethod
    async def grade_group(cls, group):
        best = max(range(len(group.attempts)), key=lambda i: group.attempts[i].reward)
        return [float(i == best) / len(group.attempts) for i in range(len(group.attempts))]


class Lost(Spell):
    async def grade(self, grading):
        raise ValueError("no ruler")
"""
SET = 'evaluation.sets.words={tasks="tasks.jsonl", attempts=4}'


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture
def graders(project: Path) -> None:
    with (project / "spelling.py").open("a") as file:
        file.write(RANKED)


@pytest.mark.usefixtures("graders")
async def test_the_attempts_at_a_task_are_the_group_that_a_group_grader_sees(runnable) -> None:
    plan = runnable("episode.class='spelling:Ranked'", SET, "training.updates=1")
    notebook = Notebook()
    await run_rl(plan, ScriptedService(HalfRight()), notebook, row_of(plan))
    (before, _) = notebook.evaluations
    assert [sorted(task.rewards) for task in before.tasks] == [[0.0, 0.0, 0.0, 0.25]] * 4


@pytest.mark.usefixtures("graders")
def test_scores_of_a_group_grader_are_warned_about(runnable) -> None:
    plan = runnable("episode.class='spelling:Ranked'", SET)
    (told,) = [line for line in warnings_of(plan, {}) if "grade_group" in line]
    assert told.startswith("evaluation.sets (words): ")
    assert not any("grade_group" in line for line in warnings_of(runnable(SET), {}))
    ranked = runnable("episode.class='spelling:Ranked'")
    assert not any("grade_group" in line for line in warnings_of(ranked, {}))


@pytest.mark.usefixtures("graders")
async def test_why_attempts_were_lost_is_said_once_for_each_way(runnable) -> None:
    to_its_end = "training.max_consecutive_unusable_groups=0"
    plan = runnable("episode.class='spelling:Lost'", SET, "training.epochs=1", to_its_end)
    notebook = Notebook()
    with pytest.raises(NoLearningSignal, match="no group"):
        await run_rl(plan, ScriptedService(HalfRight()), notebook, row_of(plan))
    (told,) = [note for note in notebook.notes if " of words is " in note]
    assert "discarded/ungraded" in told
    assert "no ruler" in told


@pytest.mark.parametrize(("tokens", "is_told"), [(3, True), (8, False)])
async def test_replies_of_a_set_that_are_cut_are_a_warning_once(
    project: Path, runnable, tokens: int, is_told: bool
) -> None:
    """Scores were of what a limit had left of the replies, and nothing said so."""
    # Words of its own: every other call of a prompt is right, and training calls at the same time.
    words = [{"name": word, "word": word} for word in ("frog", "hare", "lynx", "newt")]
    (project / "held.jsonl").write_text("".join(f"{json.dumps(word)}\n" for word in words))
    cut = f'evaluation.sets.words={{tasks="held.jsonl", attempts=4, max_tokens={tokens}}}'
    plan = runnable(cut, "training.updates=1")
    notebook = Notebook()
    await run_rl(plan, ScriptedService(HalfRight()), notebook, row_of(plan))
    assert len(notebook.evaluations) == 2
    told = [note for note in notebook.notes if "cut at a token limit" in note]
    begins = "warning: words: 8 of 16 replies were cut at a token limit"
    assert [note.startswith(begins) for note in told] == [True] * is_told
    assert not is_told or "(evaluation.sets.words.max_tokens, sampling.max_tokens, " in told[0]
