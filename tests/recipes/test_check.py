"""The report, line for line as the documentation prints it, and the warnings after it."""

from pathlib import Path

import pytest

from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.recipes.check import LAST_LINE, check_report, warnings_of
from loops_cookbook.recipes.plan import plan_run

SEED_REPORT = """\
Runtime: loops_cookbook.episodes:create_runtime; tasks: 1
Capabilities: model access direct (AnswerEpisode.model_access); runtime-acquired phases sampling; \
grading retries 2 (AnswerEpisode.grading_retries); group grading false
Renderer: Qwen35Renderer (auto-detected by Prime)
Images: *
Mode: sync; batch: 1 × 16
Loss: cispo
Loss aggregation: sum
Rollout clock: 110s (derived by the runtime)
Concurrency: 16 sampling (+2 started ahead); 16 grading
Producers: main (trainable); a call that names none uses main
Configuration and runtime checked; no sandbox or Loops trainer launched.
""".splitlines()


SHORT = ("model.max_seq_len=64", "sampling.max_tokens=8", "sampling.max_attempt_tokens=8")


@pytest.fixture
def pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The smallest pattern, from a folder that has nothing of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return "patterns/custom_runtime/in_process_direct/train.toml"


@pytest.mark.parametrize("key", [None, "a-secret"])
def test_the_smallest_pattern_is_reported_in_the_documented_words(
    pattern: str, tmp_path: Path, key: str | None
) -> None:
    loaded = load_config(pattern)
    values = {} if key is None else {"BASETEN_API_KEY": key}
    plan = plan_run(loaded, read_environment(loaded.directory), values, None)
    report = check_report(plan, values)

    beside = loaded.path.parent
    assert report.lines[:4] == (
        f"Config: {loaded.path}",
        f"  paths, modules: beside {beside}",
        f"  .env: none (looked in {beside}, {tmp_path})",
        f"  runs: {tmp_path}/runs/custom-direct-none",
    )
    assert [
        "Images: *" if line.startswith("Images: ") else line for line in report.lines[4:]
    ] == SEED_REPORT
    assert "was not confirmed" in report.warnings[0]
    assert "a-secret" not in "\n".join(report.warnings)


def test_what_a_run_needs_is_said_when_there_is_no_key(make_plan) -> None:
    plan = make_plan()
    assert "`loops run` needs BASETEN_API_KEY" in warnings_of(plan, {})[0]


def test_a_local_model_has_its_line_and_its_limit(pattern: str) -> None:
    loaded = load_config("examples/counting/train.toml")
    plan = plan_run(loaded, read_environment(loaded.directory), {}, None)
    report = check_report(plan, {})
    assert report.lines[4] == "Local model: models/counting; max_seq_len 64 (up to 64)"
    assert "Images: not supported by this model" in report.lines
    assert report.lines[-1] == LAST_LINE


def test_a_rollout_clock_that_is_set_says_so(make_plan) -> None:
    report = check_report(make_plan("clocks.rollout_seconds=30"), {})
    assert "Rollout clock: 30s (set in [clocks])" in report.lines


def test_the_batch_and_the_slots_follow_the_config(make_plan) -> None:
    report = check_report(make_plan("concurrency.sampling=5", "concurrency.start_ahead=0"), {})
    assert "Mode: sync; batch: 2 × 4" in report.lines
    assert "Concurrency: 5 sampling (+0 started ahead); 8 grading" in report.lines


def test_async_mode_says_its_bound_and_has_slots_for_all_that_may_be_live(make_plan) -> None:
    report = check_report(make_plan('training.mode="async"'), {})
    assert "Mode: async, max_staleness 2; batch: 2 × 4" in report.lines
    assert "Concurrency: 24 sampling (+2 started ahead); 24 grading" in report.lines


def test_a_bound_that_has_no_effect_is_a_warning(make_plan) -> None:
    (warning,) = [w for w in warnings_of(make_plan("training.max_staleness=1"), {}) if "stale" in w]
    assert warning.startswith("training.max_staleness: has no effect in sync mode")
    both = make_plan("training.max_staleness=1", 'training.mode="async"')
    assert not [w for w in warnings_of(both, {}) if "stale" in w]


@pytest.mark.parametrize(
    "setting", ["sampling.top_p=0.9", "sampling.top_k=5", "sampling.temperature=0.6"]
)
def test_sampling_that_the_trainer_does_not_know_of_is_a_warning(make_plan, setting: str) -> None:
    key = setting.split("=")[0]
    assert any(
        w.startswith(f"{key} = ") and "biases the ratio" in w
        for w in warnings_of(make_plan(setting), {})
    )


def test_the_embedded_trainer_knows_the_temperature(pattern: str) -> None:
    loaded = load_config("examples/counting/train.toml", ["sampling.temperature=0.6"])
    plan = plan_run(loaded, read_environment(loaded.directory), {}, None)
    assert not any("temperature" in warning for warning in warnings_of(plan, {}))


@pytest.mark.parametrize(
    ("settings", "warned"),
    [("temperature=0.0", True), ("temperature=0.0, attempts=1", False), ("attempts=4", False)],
)
def test_a_greedy_set_of_several_attempts_is_named(make_plan, settings: str, warned: bool) -> None:
    """Four greedy attempts at each task cost four times as much and nobody was told."""
    plan = make_plan(f'evaluation.sets.held={{tasks="tasks.jsonl", {settings}}}')
    told = [w for w in warnings_of(plan, {}) if w.startswith("evaluation.sets.held: temperature 0")]
    assert bool(told) == warned
    assert all("set attempts = 1," in warning for warning in told)


def test_tasks_that_are_also_trained_on_are_named(make_plan, project: Path) -> None:
    (project / "held.jsonl").write_text(
        '{"name": "ant", "word": "ant"}\n{"name": "new", "word": "new"}\n'
    )
    plan = make_plan('evaluation.sets.held.tasks="held.jsonl"')
    assert any(
        w.startswith("evaluation.sets.held: 1 of its 2 tasks are also trained on")
        for w in warnings_of(plan, {})
    )


def test_the_report_as_json_has_every_line_and_what_the_renderer_does(make_plan) -> None:
    told = check_report(make_plan(), {}).to_json()
    report = told["report"]
    assert isinstance(report, dict)
    assert report["Loss"] == "cispo"
    assert set(told) >= {"stops", "turns_extend", "warnings"}


def test_the_report_as_json_says_which_turns_extend_and_why_tools_are_refused() -> None:
    loaded = load_config("examples/counting/train.toml")
    plan = plan_run(loaded, read_environment(loaded.directory), {}, None)
    told = check_report(plan, {}).to_json()
    assert (told["turns_extend"], told["why_not_extended"]) == (True, None)
    assert (told["tools"], told["tool_results_extend"]) == (False, False)
    assert told["why_no_tools"] == "the chat template does not show the model any tools"


def test_what_a_renderer_does_is_unknown_where_its_tokenizer_is_out_of_reach(pattern: str) -> None:
    """It was told as one whose turns extend."""
    loaded = load_config(pattern)
    plan = plan_run(loaded, read_environment(loaded.directory), {}, None)
    told = check_report(plan, {}).to_json()
    assert (told["turns_extend"], told["tool_results_extend"], told["tools"]) == (None, None, None)


@pytest.mark.parametrize(
    ("config", "model", "warned"),
    [
        ("patterns/custom_runtime/several_turns_tool", "models/counting", True),
        ("patterns/custom_runtime/several_turns_tool", "models/tool_agent", False),
        ("patterns/custom_runtime/sub_agents", "models/counting", False),
    ],
)
def test_tools_for_a_model_that_cannot_be_given_any_are_a_warning(
    pattern: str, config: str, model: str, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run loaded the engine, and then failed every attempt; `check` had said nothing."""
    loaded = load_config(f"{config}/train.toml", [f'model.name="{model}"', *SHORT])
    monkeypatch.syspath_prepend(str(loaded.directory))
    plan = plan_run(loaded, read_environment(loaded.directory), {}, None)
    told = [warning for warning in warnings_of(plan, {}) if "gives the model tools" in warning]
    assert bool(told) is warned
    if told:
        assert "stock_episode.py:53: gives the model tools, and models/counting cannot" in told[0]
        assert "the chat template does not show the model any tools" in told[0]


def test_what_an_episode_has_that_nobody_will_call_is_a_warning(make_plan, project: Path) -> None:
    """A misspelt override passed, and the run was graded by what it should have replaced."""
    episode = project / "spelling.py"
    episode.write_text(
        f"{episode.read_text()}\n\nclass Strict(Spell):\n    async def grades(self, grading): ...\n"
    )
    plan = make_plan('episode.class="spelling:Strict"')
    told = [warning for warning in warnings_of(plan, {}) if "did you mean grade?" in warning]
    assert [each.partition(" ")[2].partition(" ")[0] for each in told] == ["Strict.grades"]


def test_tasks_that_json_cannot_hold_are_compared_with_none(make_plan, project: Path) -> None:
    """A serializer that raises ended `loops check` as a bug of ours."""
    episode = project / "spelling.py"
    serializer = "    @model_serializer\n    def _(self): raise LookupError\n"
    text = episode.read_text().replace("    word: str\n", f"    word: str\n\n{serializer}", 1)
    episode.write_text(f"from pydantic import model_serializer\n{text}")
    plan = make_plan('evaluation.sets.held_out.tasks="tasks.jsonl"')
    assert not [warning for warning in warnings_of(plan, {}) if "also trained on" in warning]
