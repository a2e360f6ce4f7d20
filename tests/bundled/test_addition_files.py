"""What ships for addition: right sums, none of them in both files, an Episode that checks them.

The model is not needed here: what the example does with it is told in its README.
"""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from loops_cookbook.cli.app import app
from loops_cookbook.config.fetched import FETCHABLE
from loops_cookbook.config.load import load_config
from loops_cookbook.tasks import load_tasks
from loops_cookbook.testing.episodes import attempt

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "addition"
FILES = ("tasks.jsonl", "held_out.jsonl")
TASK = {"name": "3+4", "question": "What is 3+4?", "answer": "7"}


@pytest.fixture(scope="module")
def episode() -> ModuleType:
    name = "addition_episode"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE / "episode.py")
        assert spec
        assert spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def sums(file: str) -> dict[tuple[int, int], int]:
    """The two numbers of each question, with its answer."""
    lines = [json.loads(line) for line in (EXAMPLE / file).read_text(encoding="utf-8").splitlines()]
    return {numbers_in(line["question"]): int(line["answer"]) for line in lines}


def numbers_in(question: str) -> tuple[int, int]:
    found = re.fullmatch(r"What is (\d)\+(\d)\?", question)
    assert found, question
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(("file", "count"), [*zip(FILES, (73, 24), strict=True)])
def test_every_line_is_a_right_sum(file: str, count: int, episode: ModuleType) -> None:
    assert len(load_tasks(EXAMPLE / file, episode.Sum)) == count
    assert len(sums(file)) == count
    assert all(sum(numbers) == answer for numbers, answer in sums(file).items())


def test_a_sum_is_held_out_in_both_orders_and_the_solved_ones_stand_nowhere(
    episode: ModuleType,
) -> None:
    trained, held_out = (set(sums(file)) for file in FILES)
    turned = {(b, a) for a, b in held_out}
    assert held_out == turned
    assert not trained & held_out
    solved = [numbers_in(e["content"]) for e in episode.EXAMPLES if e["role"] == "user"]
    shown = {pair for a, b in solved for pair in ((a, b), (b, a))}
    assert trained | held_out | shown == {(a, b) for a in range(10) for b in range(10)}
    assert not shown & (trained | held_out)


def test_the_solved_examples_are_right(episode: ModuleType) -> None:
    contents = [message["content"] for message in episode.EXAMPLES[1:]]
    for question, answer in zip(contents[::2], contents[1::2], strict=True):
        assert sum(numbers_in(question)) == int(answer)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("reply", "reward", "well_formed"),
    [
        ("7", 1.0, True),
        (" 7\n", 1.0, True),
        ("8", 0.0, True),
        ("07", 0.0, True),
        ("7.", 0.0, False),
        ("3+4=7", 0.0, False),
        ("", 0.0, False),
    ],
)
async def test_only_the_right_number_earns(
    reply: str, reward: float, well_formed: bool, episode: ModuleType
) -> None:
    tried = await attempt(episode.AdditionEpisode, TASK, replies=[reply])
    assert tried.reward == reward
    assert dict(tried.metadata) == {"well_formed": well_formed}


@pytest.mark.anyio
async def test_the_model_is_shown_the_solved_examples_and_no_answer(episode: ModuleType) -> None:
    tried = await attempt(episode.AdditionEpisode, TASK, replies=["7"])
    *examples, question = [dict(m) for m in tried.transcript[0].messages]
    assert examples == [dict(message) for message in episode.EXAMPLES]
    assert question == {"role": "user", "content": TASK["question"]}


def test_without_the_model_check_says_how_to_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOOPS_CACHE", str(tmp_path))
    result = CliRunner().invoke(app, ["check", "examples/addition/train.toml"])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.endswith("run `loops models fetch smollm2-135m`")


def test_the_config_names_a_model_that_can_be_fetched() -> None:
    config = load_config(str(EXAMPLE / "train.toml"), []).config
    assert config.model.name in FETCHABLE
    assert {held_out.tasks for held_out in config.evaluation.sets.values()} == {"held_out.jsonl"}
