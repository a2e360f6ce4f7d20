import json
import subprocess
import sys

import pytest

from loops_cookbook.errors import ConfigError, ModelError
from loops_cookbook.renderers.detect import detect
from loops_cookbook.renderers.hub import snapshot

QWEN3 = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
FROM_QWEN3 = {"_name_or_path": "Qwen/Qwen3-4B"}


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snapshot.cache_clear()
    yield
    snapshot.cache_clear()


def test_a_folder_is_probed_and_the_line_says_stops_and_turns(save_model, tmp_path):
    found = detect("models/tiny", save_model(tmp_path))

    assert found.line == (
        "ChatTemplateRenderer (probed from the chat template of models/tiny); "
        "stops <|im_end|>; turns extend"
    )
    assert found.stops == ("<|im_end|>",)
    assert found.warnings == ()
    assert found.renderer is not None


def test_a_template_that_does_not_extend_says_why_in_the_line(save_model, tmp_path):
    found = detect("models/tiny", save_model(tmp_path, "forgets_reasoning"))

    why = "the template drops the reasoning of earlier turns"
    assert found.line.endswith(f"; turns do not extend: {why}")
    assert found.why_not_extended == why


def test_reasoning_that_shall_be_kept_makes_turns_extend(save_model, tmp_path):
    folder = save_model(tmp_path, "forgets_reasoning")

    assert detect("models/tiny", folder, thinking_retention="all").line.endswith("turns extend")


def test_a_model_on_the_hub_out_of_reach_is_named_from_its_name_with_one_warning(offline):
    found = detect("Qwen/Qwen3.5-4B")

    assert found.renderer is None
    assert found.line == "Qwen35Renderer (auto-detected by Prime)"
    (warning,) = found.warnings
    assert "'Qwen/Qwen3.5-4B' is neither cached nor reachable (HF_HUB_OFFLINE is set)" in warning


def test_a_model_that_prime_does_not_know_and_out_of_reach_passes_too(offline):
    found = detect("nobody/knows-this")

    assert found.line == "ChatTemplateRenderer (from the chat template of nobody/knows-this)"
    assert len(found.warnings) == 1


def test_a_model_on_the_hub_with_a_tokenizer_beside_it_gets_primes_renderer(save_model, tmp_path):
    folder = save_model(tmp_path, more=QWEN3)
    found = detect("Qwen/Qwen3-4B", tokenizer=str(folder))

    assert found.line == "Qwen3Renderer (auto-detected by Prime)"
    assert found.renderer is not None
    assert found.stops == ("<|im_end|>", "<|endoftext|>")


def test_a_folder_made_from_a_model_that_prime_knows_gets_primes_renderer(save_model, tmp_path):
    folder = save_model(tmp_path, "forgets_reasoning", config=FROM_QWEN3, more=QWEN3)

    assert detect("models/tuned", folder).line == "Qwen3Renderer (auto-detected by Prime)"


@pytest.mark.parametrize(
    ("template", "more"),
    [
        pytest.param("headers", QWEN3, id="another format"),
        pytest.param("chatml", QWEN3, id="keeps the reasoning that the format drops"),
        pytest.param("chatml", (), id="lacks a token that the format needs"),
    ],
)
def test_a_folder_that_changed_the_format_of_its_origin_is_probed(
    save_model, tmp_path, template, more
):
    folder = save_model(tmp_path, template, config=FROM_QWEN3, more=more)

    assert detect("models/tuned", folder).line.startswith("ChatTemplateRenderer (probed from")


@pytest.mark.parametrize("forced", ["Qwen3Renderer", "ChatTemplateRenderer"])
def test_the_config_can_force_either_kind(save_model, tmp_path, forced):
    folder = save_model(tmp_path, "chatml", config=FROM_QWEN3, more=QWEN3)

    line = detect("models/tuned", folder, forced=forced).line
    assert line.startswith(f"{forced} (set in [model] renderer)")


def test_a_forced_renderer_that_does_not_fit_is_refused(save_model, tmp_path):
    with pytest.raises(ModelError, match="Qwen3Renderer does not fit the tokenizer of models/tiny"):
        detect("models/tiny", save_model(tmp_path), forced="Qwen3Renderer")


@pytest.mark.parametrize(
    ("forced", "guess"),
    [("Qwen3Rendrer", "did you mean 'Qwen3Renderer'"), ("?", "use 'ChatTemplateRenderer'")],
)
def test_a_renderer_that_is_not_there_is_refused_with_the_nearest(
    save_model, tmp_path, forced, guess
):
    with pytest.raises(ConfigError, match=f"no renderer '.*': {guess}"):
        detect("models/tiny", save_model(tmp_path), forced=forced)


def test_replies_that_nothing_stops_are_a_warning(save_model, tmp_path):
    folder = save_model(tmp_path, "plain")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = detect("models/tiny", folder)

    assert "; stops at no token; turns do not extend" in found.line
    assert found.warnings[0].startswith("no token ends a reply of models/tiny")


def test_a_folder_of_unknown_origin_imports_nothing_heavy(save_model, tmp_path):
    """`loops check` of the counting example must stay light."""
    config = {"model_type": "llama", "_name_or_path": "/home/me/models/base"}
    code = (
        "import sys, pathlib;"
        "from loops_cookbook.renderers.detect import detect;"
        "from loops_cookbook.renderers.images import images_line;"
        "before = 'jinja2' in sys.modules;"
        "folder = pathlib.Path(sys.argv[1]);"
        "detect('models/tiny', folder); images_line('models/tiny', folder);"
        "heavy = {'renderers', 'transformers', 'torch', 'huggingface_hub'};"
        "print(before, sorted(heavy & set(sys.modules)))"
    )
    folder = save_model(tmp_path, config=config)
    out = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )

    assert out.stdout.strip() == "False []"


def test_a_template_that_keeps_reasoning_among_results_alone_says_both(save_model, tmp_path):
    told = detect("models/tiny", save_model(tmp_path, "tool_cycle"))

    assert told.line.endswith(
        "; stops <|im_end|>; results of tools extend, turns of a user do not: "
        "the template drops the reasoning of earlier turns"
    )
    assert (told.extends_results, told.why_no_tools) == (True, None)


def test_a_template_without_tools_says_why(save_model, tmp_path):
    told = detect("models/tiny", save_model(tmp_path))

    assert told.why_no_tools == "the chat template does not show the model any tools"
    assert not told.extends_results
