"""What a config names is looked at before anything is launched; what cannot stand is one line."""

import json
from pathlib import Path

import pytest

from loops_cookbook.errors import (
    ConfigError,
    EpisodeError,
    MissingExtra,
    ModelError,
    TaskFileError,
    UsageError,
)
from loops_cookbook.recipes import launch
from loops_cookbook.recipes.launch import require_service

BACK_HOME = "models/counting"


def test_a_plan_holds_what_the_config_names(make_plan) -> None:
    plan = make_plan('evaluation.sets.all={tasks="tasks.jsonl", attempts=2, temperature=0.0}')
    assert [task.name for task in plan.tasks] == ["ant", "bee", "cat", "dog"]
    assert plan.sets[0].params.temperature == 0
    assert plan.params.temperature == 1
    assert plan.capabilities.model_access_from == "Spell.model_access"
    assert plan.clocks.rollout_seconds == 110


@pytest.mark.parametrize(
    ("setting", "error", "words"),
    [
        ('episode.class="spelling:Spel"', EpisodeError, "Spell"),
        ('episode.class="nothing:Spell"', EpisodeError, "no module 'nothing'"),
        (
            'episode.class="spelling:Word"',
            EpisodeError,
            r"subclass of loops_cookbook\.episodes\.Episode$",
        ),
        ('episode.tasks="none.jsonl"', TaskFileError, "no such tasks file"),
        ("episode.options={a=1}", ConfigError, "takes no options"),
        ("runtime_options={a=1}", ConfigError, "takes no options"),
        ('evaluation.sets.x.tasks="none.jsonl"', TaskFileError, "no such tasks file"),
        ('model.name="./nowhere"', ModelError, "no folder with a config.json"),
        ('model.name="models/none"', ModelError, "bundled are models/counting"),
        ('runtime="spelling:nothing"', EpisodeError, "nothing"),
        ('model.renderer="Qwen99Renderer"', ConfigError, "Qwen99Renderer"),
    ],
)
def test_what_cannot_stand_is_one_line(
    make_plan, setting: str, error: type[UsageError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        make_plan(setting)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_status == 2


def test_every_bad_task_is_listed(make_plan, project: Path) -> None:
    (project / "tasks.jsonl").write_text('{"name": "a"}\n{"name": "b", "word": 3}\nnot json\n')
    with pytest.raises(TaskFileError) as caught:
        make_plan()
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0].rpartition(":")[2] for line in lines] == ["1", "2", "3"]


def test_a_sequence_longer_than_the_model_takes_is_refused(make_plan) -> None:
    with pytest.raises(ConfigError, match="takes sequences up to 64; use 64 or less"):
        make_plan(f'model.name="{BACK_HOME}"', "model.max_seq_len=65")


def test_the_embedded_engine_wants_a_folder(make_plan) -> None:
    with pytest.raises(ModelError, match="is a hub id"):
        make_plan(scope="local")


def test_every_weight_is_only_trained_by_the_embedded_engine(make_plan) -> None:
    with pytest.raises(ConfigError, match="only the embedded engine trains"):
        make_plan("model.lora_rank=0")


def test_only_the_embedded_engine_can_be_asked_to_be_deterministic(make_plan) -> None:
    with pytest.raises(ConfigError, match=r"compute\.deterministic: found true: only"):
        make_plan("compute.deterministic=true")


def test_a_runtime_of_the_users_own_is_made_from_its_factory(make_plan, project: Path) -> None:
    (project / "own.py").write_text(
        "from loops_cookbook.runtimes import Capabilities\n"
        "class Own:\n"
        "    capabilities = Capabilities(grading_retries=7)\n"
        "    open = grade_group = __aenter__ = __aexit__ = lambda *_: None\n"
        "def create(context):\n"
        "    assert context.tasks[0].value.word == 'ant'\n"
        "    return Own()\n"
    )
    config = (project / "train.toml").read_text().replace('class = "spelling:Spell"\n', "")
    (project / "train.toml").write_text(config)
    plan = make_plan('runtime="own:create"')
    assert plan.capabilities.grading_retries == 7


def test_a_hosted_model_without_a_key_cannot_run_and_the_ways_out_are_named(make_plan) -> None:
    with pytest.raises(UsageError, match=r"needs BASETEN_API_KEY.*models/counting"):
        require_service(make_plan(), {})


def test_a_run_without_the_engines_libraries_says_what_to_install(
    make_plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LOCAL", ("no_such_library",))
    plan = make_plan(f'model.name="{BACK_HOME}"')
    with pytest.raises(MissingExtra, match=r'uv add "loops-cookbook\[local\]"'):
        require_service(plan, {})


def test_a_folder_with_a_damaged_model_config_is_refused(make_plan, project: Path) -> None:
    (project / "model").mkdir()
    (project / "model" / "config.json").write_text(json.dumps([]))
    (project / "model" / "model.safetensors").touch()
    with pytest.raises(ModelError, match="must hold a JSON object"):
        make_plan('model.name="model"', "model.max_seq_len=32")


def test_a_folder_without_weights_is_refused_before_a_run_folder_is_made(
    make_plan, project: Path
) -> None:
    """Check used to pass it, and a run made its folder before the engine refused it."""
    (project / "model").mkdir()
    (project / "model" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no weights"):
        make_plan('model.name="model"')


def test_episode_options_that_nobody_reads_are_refused(make_plan, project: Path) -> None:
    """With a runtime of the user's own and no Episode they were ignored without a word."""
    (project / "own.py").write_text("def create(context): ...\n")
    config = (project / "train.toml").read_text().replace('class = "spelling:Spell"\n', "")
    (project / "train.toml").write_text(config)
    with pytest.raises(ConfigError, match="takes no options"):
        make_plan('runtime="own:create"', "episode.options={a=1}")
