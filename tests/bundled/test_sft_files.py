"""What ships for supervised fine-tuning: rows that its scripts made, and that check accepts."""

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.recipes.sft_plan import SFTPlan, plan_sft

EXAMPLES = Path(__file__).parents[2] / "examples"


def script(example: str) -> ModuleType:
    path = EXAMPLES / example / "make_rows.py"
    spec = importlib.util.spec_from_file_location(f"{example}_make_rows", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def planned(example: str) -> SFTPlan:
    loaded = load_config(EXAMPLES / example / "train.toml").of_recipe(SFTConfig)
    assert loaded is not None
    return plan_sft(loaded, read_environment(loaded.directory), dict(os.environ), None)


@pytest.fixture(scope="module")
def orders() -> SFTPlan:
    return planned("sft_orders")


@pytest.fixture(scope="module")
def tools() -> SFTPlan:
    return planned("sft_tools")


def test_the_rows_on_orders_are_what_their_script_makes() -> None:
    for file, lines in script("sft_orders").rows(EXAMPLES / "counting").items():
        assert (EXAMPLES / "sft_orders" / file).read_text(encoding="utf-8") == "".join(lines)


def test_no_task_of_counting_is_among_the_rows_on_orders() -> None:
    asked = script("sft_orders").asked_in(EXAMPLES / "counting")
    for file in ("train.jsonl", "held_out.jsonl"):
        text = (EXAMPLES / "sft_orders" / file).read_text(encoding="utf-8")
        for line in text.splitlines():
            assert json.loads(line)["messages"][0]["content"] not in asked


@pytest.mark.parametrize("example", ["orders", "tools"])
def test_every_row_can_be_used_and_none_is_in_both_files(
    request: pytest.FixtureRequest, example: str
) -> None:
    plan: SFTPlan = request.getfixturevalue(example)
    assert plan.held_out is not None
    assert (plan.train.unusable, plan.held_out.unusable, plan.shared) == ((), (), ())


def test_a_row_on_orders_trains_a_number_and_the_end_of_the_turn(orders: SFTPlan) -> None:
    assert {row.trained_tokens for row in orders.train.rows} == {2}


def test_the_rows_with_tools_are_what_their_script_makes() -> None:
    module = script("sft_tools")
    made = module.rows()
    for file, lines in made.items():
        assert (EXAMPLES / "sft_tools" / file).read_text(encoding="utf-8") == "".join(lines)


def test_calls_and_answers_are_trained_and_slips_are_not(tools: SFTPlan) -> None:
    renderer = tools.detection.renderer
    assert renderer is not None
    lines = (EXAMPLES / "sft_tools" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    for row, line in zip(tools.train.rows, lines, strict=True):
        messages = json.loads(line)["messages"]
        trained = [m for m in messages if m["role"] == "assistant" and m.get("train") is not False]
        (sequence,) = row.sequences
        said = renderer.decode(sequence.ids[sequence.is_sampled])
        assert said.count("<tool_call>") == sum("tool_calls" in m for m in trained) == 1
        assert said.endswith(f"{messages[-1]['content']}<|end|>")
