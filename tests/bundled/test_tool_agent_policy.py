"""The policy that ships for the tool agent: how it is told of tools, and how it calls them."""

import itertools
import json
from pathlib import Path
from types import ModuleType

import pytest
from tests.bundled.tool_agent import EXAMPLE, module, rows
from typer.testing import CliRunner

from loops_cookbook.cli.app import app
from loops_cookbook.config.load import load_config
from loops_cookbook.config.rl import RLConfig
from loops_cookbook.renderers.chat_template import ChatTemplateRenderer
from loops_cookbook.renderers.tokenizers import ChatTokenizer, load_tokenizer
from loops_cookbook.tokens import ids_of

POLICY = Path(__file__).parents[2] / "models" / "tool_agent"


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(POLICY, name="models/tool_agent")


@pytest.fixture(scope="module")
def renderer(tokenizer: ChatTokenizer) -> ChatTemplateRenderer:
    return ChatTemplateRenderer(tokenizer)


@pytest.mark.torch
def test_the_config_stands_and_every_turn_extends() -> None:
    result = CliRunner().invoke(app, ["check", "examples/tool_agent/train.toml"])
    assert result.exit_code == 0, result.output
    assert "Local model: models/tool_agent; max_seq_len 768 (up to 1024)" in result.stdout
    assert "stops <|end|>; turns extend" in result.stdout
    assert result.stderr == ""


def test_another_backend_is_one_key_of_the_config() -> None:
    loaded = load_config(str(EXAMPLE / "train.toml"), []).of_recipe(RLConfig)
    assert loaded is not None
    table = loaded.config.sandbox
    assert table.backend == "local"
    assert table.model_fields_set == {"backend", "timeout_seconds"}


def test_the_policy_is_small_and_in_half_precision() -> None:
    assert sum(path.stat().st_size for path in POLICY.iterdir()) < 1_500_000
    weights = (POLICY / "model.safetensors").read_bytes()
    header = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    assert {tensor["dtype"] for tensor in tensors} == {"F16"}


def test_tools_are_shown_and_calls_read_back(
    renderer: ChatTemplateRenderer, tokenizer: ChatTokenizer
) -> None:
    episode = module("episode")
    assert renderer.why_no_tools is None
    said = (
        '<tool_call>{"name": "shell", "arguments": {"command": "ls \\"a b\\""}}</tool_call><|end|>'
    )
    (call,) = renderer.parse(ids_of(tokenizer.encode(said)), episode.TOOLS).tool_calls
    assert (call.name, call.arguments) == ("shell", {"command": 'ls "a b"'})


def test_every_prompt_leaves_room_for_an_attempt(renderer: ChatTemplateRenderer) -> None:
    episode = module("episode")
    lengths = [
        len(
            renderer.render(
                [
                    {"role": "system", "content": episode.SYSTEM},
                    {"role": "user", "content": task["instruction"]},
                ],
                episode.TOOLS,
            )
        )
        for file in ("tasks.jsonl", "held_out.jsonl")
        for task in rows(file)
    ]
    assert max(lengths) < 64


# --- The script that made it


@pytest.fixture
def script() -> ModuleType:
    pytest.importorskip("torch")
    return module("make_policy")


@pytest.mark.torch
def test_the_script_writes_the_tokenizer_that_ships(script: ModuleType, tmp_path: Path) -> None:
    made = script.build_tokenizer()
    script.save(script.build_model(made), made, tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (tmp_path / file).read_bytes() == (POLICY / file).read_bytes()


@pytest.mark.torch
def test_demonstrations_are_written_as_the_renderer_writes_them(
    script: ModuleType, renderer: ChatTemplateRenderer, tokenizer: ChatTokenizer
) -> None:
    for messages in itertools.islice(script.demonstrations(3), 60):
        (text,) = script.written([messages])
        *before, last = messages
        asked = renderer.render(before, module("episode").TOOLS).tolist()
        assert tokenizer.encode(text) == asked + tokenizer.encode(f"{last['content']}<|end|>")


@pytest.mark.torch
def test_no_held_out_instruction_with_names_is_demonstrated(script: ModuleType) -> None:
    shown = {m[1]["content"] for m in itertools.islice(script.demonstrations(1), 6000)}
    held_out = {task["instruction"] for task in rows("held_out.jsonl")}
    words = module("make_tasks").WORDS
    assert {text for text in shown & held_out if any(word in text for word in words)} == set()


@pytest.mark.torch
def test_demonstrations_are_mostly_wrong(script: ModuleType) -> None:
    texts = [str(m[2:]) for m in itertools.islice(script.demonstrations(2), 4000)]
    right = sum("'wc -l < " in text for text in texts)
    trapped = sum("'wc -l " in text and "'wc -l < " not in text for text in texts)
    assert right / 333 == pytest.approx(
        0.4, abs=0.1
    )  # with those that call a tool that isn't there
    assert trapped / 333 == pytest.approx(0.52, abs=0.1)
