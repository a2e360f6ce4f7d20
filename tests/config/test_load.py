"""A TOML file becomes a config, or every fault in it is told."""

from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, field_validator

from loops_cookbook.config.load import AnyConfig, LoadedConfig, load_config
from loops_cookbook.config.rl import RLConfig
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.errors import ConfigError

LEAST = """\
recipe = "rl"
[model]
name = "models/counting"
[episode]
class = "episode:Answer"
tasks = "tasks.jsonl"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    return tmp_path


def load(text: str | bytes, *overrides: str) -> LoadedConfig[AnyConfig]:
    content = text.encode() if isinstance(text, str) else text
    Path("own", "train.toml").write_bytes(content)
    return load_config("own/train.toml", overrides)


def refusal(text: str | bytes, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value).splitlines()


def test_a_config_comes_with_where_it_was_found(project: Path) -> None:
    loaded = load(LEAST)
    assert loaded.config.model.name == "models/counting"
    assert loaded.path == project / "own" / "train.toml"
    assert loaded.directory == project / "own"
    assert loaded.beside("tasks.jsonl") == project / "own" / "tasks.jsonl"
    assert (loaded.bundled, loaded.text, loaded.overrides) == (False, LEAST, ())


def test_runs_lie_in_the_working_directory(project: Path) -> None:
    assert load(LEAST).output_dir == project / "runs" / "own"
    loaded = load(LEAST + '[output]\noutput_dir = "out/x"')
    assert loaded.output_dir == project / "out" / "x"


def test_a_byte_order_mark_is_no_fault(project: Path) -> None:
    assert load(b"\xef\xbb\xbf" + LEAST.encode()).config.recipe == "rl"


def test_an_override_goes_before_the_file(project: Path) -> None:
    loaded = load(LEAST, "training.updates=7", 'model.name="gpt2"')
    assert (loaded.config.training.updates, loaded.config.model.name) == (7, "gpt2")
    assert [override.text for override in loaded.overrides] == [
        "training.updates=7",
        'model.name="gpt2"',
    ]


def test_every_fault_is_told_with_its_file_and_key(project: Path) -> None:
    text = LEAST + '[training]\nupdates = "many"\ngroup_sise = 4\nloss = "none"\n'
    assert refusal(text) == [
        "own/train.toml: training.updates: found 'many'; use a whole number",
        "own/train.toml: training.loss: found 'none'; use 'cispo', 'ppo', 'importance_sampling', "
        "'dro' or 'dppo'",
        "own/train.toml: training.group_sise: unknown key; did you mean group_size?",
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("lr = 1e-5", "training.lr: unknown key; did you mean training.learning_rate?"),
        ("max_steps = 9", "training.max_steps: unknown key; did you mean training.updates?"),
        ("num_generations = 8", "training.num_generations: unknown key; did you mean "
                                "training.group_size?"),
        ("kl_coef = 0.1", "training.kl_coef: unknown key; there is no reference model, and no KL "
                          "penalty to one; leave it out"),
    ],
)  # fmt: skip
def test_a_name_of_another_trainer_is_told_as_ours(project: Path, line: str, told: str) -> None:
    """A list of all 22 keys came, or a key that is merely spelt alike: `max_staleness`."""
    assert refusal(f"{LEAST}[training]\n{line}\n") == [f"own/train.toml: {told}"]


def test_a_fault_of_an_override_is_told_of_the_override(project: Path) -> None:
    assert refusal(LEAST + "[sampling]\ntop_k = -1", "training.updates=0") == [
        "--set training.updates=0: training.updates: found 0; use 1 or more",
        "own/train.toml: sampling.top_k: found -1; use 0 or more",
    ]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["traning.x=1"], "--set traning.x=1: traning: unknown key; did you mean training?"),
        (
            ["evaluation.every=2", "evaluation.sets={}"],
            "--set evaluation.every=2: evaluation.every: set, but there is no set; add "
            "[evaluation.sets.<name>]",
        ),
        (["model.x.y=1"], "--set model.x.y=1: model.x: unknown key; the keys here are name, "),
    ],
)
def test_a_table_that_an_override_alone_brings_is_its_own_fault(
    project: Path, overrides: list[str], said: str
) -> None:
    """`--set traning.x=1` was told as a fault of the file, in which nobody could find it."""
    (line,) = refusal(LEAST, *overrides)
    assert line.startswith(said)


def test_a_table_that_the_file_has_too_is_the_files_fault(project: Path) -> None:
    assert refusal(LEAST + "[traning]\ny = 1\n", "traning.x=1") == [
        "own/train.toml: traning: unknown key; did you mean training?"
    ]


def test_a_config_without_a_recipe_is_told_which(project: Path) -> None:
    """`recipe: missing; add it` did not say what to add."""
    assert refusal(LEAST.replace('recipe = "rl"\n', "")) == [
        'own/train.toml: recipe: missing; add recipe = "rl"'
    ]


def test_text_that_is_not_toml_is_told_with_its_line(project: Path) -> None:
    """The line was told twice: `own/train.toml:2: ... (at line 2, column 9)`."""
    assert refusal('recipe = "rl"\nmodel = \n') == [
        "own/train.toml:2: not TOML: Invalid value at column 9; mend the line"
    ]


def test_text_that_ends_too_soon_is_told_so(project: Path) -> None:
    (said,) = refusal('recipe = """')
    assert said.startswith("own/train.toml: not TOML: ")
    (said,) = refusal('recipe = "rl"\nx = [1,')  # "mend the line", and none was named
    assert said == "own/train.toml: not TOML: Invalid value (at end of document); mend its end"


def test_text_that_is_not_utf_8_is_told(project: Path) -> None:
    assert refusal(b'recipe = "caf\xe9"') == ["own/train.toml: is not UTF-8 text; save it as UTF-8"]


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    turns: int = 3

    @field_validator("turns")
    @classmethod
    def _lucky(cls, turns: int) -> int:
        if turns == 13:
            raise KeyError(turns)
        return turns


PLACE = ("episode", "options")


def test_options_are_validated_by_the_users_model(project: Path) -> None:
    loaded = load(LEAST)
    assert loaded.options(Options, {"turns": 5}, place=PLACE) == Options(turns=5)
    assert loaded.options(Options, None, place=PLACE) == Options()


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"turn": 5}, "episode.options.turn: unknown key; did you mean turns?"),
        ({"turns": "x"}, "episode.options.turns: found 'x'; use a whole number"),
        ({"turns": 13}, "episode.options: Options raised KeyError: 13; let it raise ValueError "
                        "on a bad value"),
    ],
)  # fmt: skip
def test_wrong_options_are_told_at_their_place(
    project: Path, table: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(LEAST).options(Options, table, place=PLACE)
    assert str(caught.value) == f"own/train.toml: {problem}"


def test_code_without_an_options_model_takes_no_table(project: Path) -> None:
    loaded = load(LEAST)
    assert loaded.options(None, None, place=PLACE) is None
    with pytest.raises(ConfigError, match=r"episode\.options: set, but the code takes no options"):
        loaded.options(None, {}, place=PLACE)


def test_the_recipe_decides_what_a_config_is(project: Path) -> None:
    text = 'recipe = "sft"\n[model]\nname = "m"\n[data]\ntrain = "train.jsonl"\n'
    loaded = load(text)
    assert loaded.of_recipe(SFTConfig) is loaded
    assert loaded.of_recipe(RLConfig) is None
    assert refusal(text + 'tran = "x"') == [
        "own/train.toml: data.tran: unknown key; did you mean train?"
    ]


def test_a_recipe_that_does_not_exist_is_refused_with_those_that_do(project: Path) -> None:
    assert refusal(LEAST, 'recipe="dpo"') == [
        "--set recipe=\"dpo\": recipe: found 'dpo'; use 'rl' or 'sft'"
    ]
