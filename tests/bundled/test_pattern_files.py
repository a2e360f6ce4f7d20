"""The patterns of several turns, as they ship: checked, and played with a scripted model."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.recipes.check import LAST_LINE, check_report
from loops_cookbook.recipes.plan import plan_run
from loops_cookbook.tasks import load_tasks
from loops_cookbook.testing import Line, Script, Terms, Tried, attempt

pytestmark = pytest.mark.anyio

PATTERNS = Path(__file__).parents[2] / "patterns" / "custom_runtime"
EPISODES = {
    "several_turns_tool": ("stock_episode", "StockEpisode", "StockTask"),
    "sub_agents": ("readers_episode", "ReadersEpisode", "ReportTask"),
    "rewritten_history": ("diary_episode", "DiaryEpisode", "DiaryTask"),
}


@pytest.fixture
def anyio_backend() -> str:
    return "trio"


def module_of(pattern: str) -> ModuleType:
    """The Episode's module, under a name that no other has."""
    name = f"{pattern}_episode"
    if name not in sys.modules:
        path = PATTERNS / pattern / f"{EPISODES[pattern][0]}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


async def play(pattern: str, replies: Script, *, terms: Terms | None = None) -> Tried:
    """One attempt at the first task of a pattern."""
    _, episode, model = EPISODES[pattern]
    module = module_of(pattern)
    task, *_ = load_tasks(PATTERNS / pattern / "tasks.jsonl", getattr(module, model))
    return await attempt(getattr(module, episode), task.value, replies=replies, terms=terms)


def trained(tried: Tried) -> list[str]:
    """What was sampled in each sequence, as text."""
    return [
        bytes(i for i in row.ids[row.is_sampled].tolist() if i < 256).decode()
        for row in tried.attempt.sequences
    ]


def origins(tried: Tried) -> list[str | None]:
    return [call.origin for call in tried.transcript]


def count(*items: str) -> str:
    calls = [json.dumps({"name": "count", "arguments": {"item": item}}) for item in items]
    return "".join(f"<tool_call>{call}</tool_call>" for call in calls)


@pytest.mark.parametrize("pattern", EPISODES)
def test_a_pattern_checks_without_network(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(PATTERNS / pattern))
    loaded = load_config(f"patterns/custom_runtime/{pattern}/train.toml")
    report = check_report(plan_run(loaded, read_environment(loaded.directory), {}, None), {})
    assert report.lines[-1] == LAST_LINE
    assert "Runtime: loops_cookbook.episodes:create_runtime; tasks: 2" in report.lines


@pytest.mark.parametrize(
    ("replies", "reward", "rows"),
    [
        pytest.param([count("bolt", "nut"), "43"], 1.0, 1, id="two calls in one reply"),
        pytest.param([count("bolt"), count("nut"), "43"], 1.0, 1, id="one call after another"),
        pytest.param([count("bolt", "nut"), "It is 43."], 0.5, 1, id="other words"),
        pytest.param(["44"], 0.0, 1, id="a guess"),
        pytest.param([f"{count('bolt')}<tool_call>{{</tool_call>", "43"], 1.0, 1, id="broken call"),
    ],
)
async def test_stock_is_counted_in_one_sequence(
    replies: Sequence[str], reward: float, rows: int
) -> None:
    tried = await play("several_turns_tool", replies)
    assert (tried.reward, len(tried.attempt.sequences)) == (reward, rows)
    assert origins(tried) == ["first"] + ["extended"] * (len(replies) - 1)
    assert trained(tried) == ["".join(replies)]


async def test_a_call_that_makes_no_sense_is_answered() -> None:
    odd = '<tool_call>{"name": "sell", "arguments": {}}</tool_call>'
    tried = await play("several_turns_tool", [odd + count("moon"), "43"])
    said = [m["content"] for m in tried.transcript[-1].messages if m["role"] == "tool"]
    assert said == ["there is no tool named sell", "moon is not in the catalogue"]
    assert tried.metadata == {"ended": "answered", "calls": 2, "malformed": 0}


@pytest.mark.parametrize(
    ("replies", "terms", "ended"),
    [
        ([count("bolt")] * 6, Terms(), "out of turns"),
        (["a long answer"], Terms(max_tokens=4), "length"),
        ([], Terms(max_seq_len=100), "context_full"),
    ],
)
async def test_an_agent_that_does_not_answer_says_why(
    replies: Sequence[str], terms: Terms, ended: str
) -> None:
    tried = await play("several_turns_tool", replies, terms=terms)
    assert tried.metadata["ended"] == ended


async def test_a_window_that_fills_up_ends_the_episode_and_it_is_graded() -> None:
    """B10: a prompt over the window was an error, and the episode no attempt."""
    whole = await play("several_turns_tool", [count("bolt"), "43"])
    first, second = whole.attempt.trajectory.turns
    terms = Terms(max_seq_len=len(second.prompt_ids))
    tried = await play("several_turns_tool", [count("bolt")], terms=terms)
    assert (tried.reward, tried.fate, tried.metadata["ended"]) == (0.0, None, "context_full")
    assert tried.attempt.flags.context_full
    assert trained(tried) == [count("bolt")]
    assert len(first.prompt_ids) < terms.max_seq_len


async def test_an_answer_that_ends_at_the_last_token_of_the_window_counts() -> None:
    """B10: the rule for a full window overwrote an episode that had finished."""
    whole = await play("several_turns_tool", [count("bolt"), "43"])
    last = whole.attempt.trajectory.turns[-1]
    terms = Terms(max_seq_len=len(last.prompt_ids) + len(last.sampled.ids))
    tried = await play("several_turns_tool", [count("bolt"), "43"], terms=terms)
    assert (tried.reward, tried.metadata["ended"]) == (1.0, "answered")
    assert not tried.attempt.flags.context_full


async def test_readers_and_the_lead_are_sequences_of_one_attempt() -> None:
    def say(prompt: str, _: int) -> Line:
        if "notes of those who read" in prompt:
            return Line("3" if "Part 2: one late" in prompt else "?")
        # The first reader is the slowest: what counts is the order of the parts.
        return Line("one late", seconds=0.01) if "Tuesday" in prompt else Line("see log", seconds=0)

    tried = await play("sub_agents", say)
    assert (tried.reward, tried.metadata) == (1.0, {"readers": 3})
    assert sorted(trained(tried)) == ["3", "one late", "see log", "see log"]
    assert origins(tried) == ["first"] * 4


async def test_a_shortened_history_begins_a_sequence_in_which_the_notes_are_context() -> None:
    replies = ["no", "no", "Nothing yet.", "a red door", "no", "The red one.", "that one", "Red."]
    tried = await play("rewritten_history", replies)
    assert (tried.reward, tried.metadata) == (1.0, {"shortened": 2})
    begun = [index for index, origin in enumerate(origins(tried)) if origin != "extended"]
    assert [(index, origins(tried)[index]) for index in begun] == [
        (0, "first"),
        (3, "rewritten"),
        (6, "rewritten"),
    ]
    assert trained(tried) == ["nonoNothing yet.", "a red doornoThe red one.", "that oneRed."]
    assert "Your notes so far: The red one.\nPage 5" in tried.prompts[-1]


def test_the_page_of_all_patterns_has_each_of_them_and_the_file_to_read() -> None:
    page = (PATTERNS.parent / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| [")]
    folders = sorted(path.parent.name for path in PATTERNS.glob("*/train.toml"))
    assert sorted(row[1].split("[")[1].split("]")[0] for row in rows) == folders
    for _, link, _, files, _ in rows:
        folder = PATTERNS.parent / link.split("(")[1].split(")")[0]
        assert all((folder / name.strip(" `")).is_file() for name in files.split(","))
