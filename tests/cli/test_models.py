"""`loops models` lists what can be trained here, and fetches what can be fetched."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from loops_cookbook.cli.app import app
from loops_cookbook.cli.models import listed
from loops_cookbook.recipes.catalog import Entry, Facts, Machine, Use

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOOPS_CACHE", str(tmp_path / "cache"))


def loops(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["models", *arguments])


def refusal(*arguments: str) -> str:
    result = loops(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def entry(name: str, facts: Facts, *fits: Use) -> Entry:
    memory: dict[Use, int] = {"sample": 10**9, "train_lora": 2 * 10**9, "train_all": 10**10}
    return Entry(name, "directory", Path(name), facts, memory, fits)


def test_the_list_has_what_is_bundled_and_says_what_can_be_fetched() -> None:
    result = loops()
    assert result.exit_code == 0
    titles, counting, *_ = result.stdout.splitlines()
    assert titles.split()[:3] == ["model", "kind", "architecture"]
    assert counting.split()[:4] == ["models/counting", "bundled", "LlamaForCausalLM", "0.31"]
    assert result.stdout.splitlines()[-1].endswith(f"with `loops models fetch {NAME}`")


def test_as_json_it_is_one_object_in_bytes() -> None:
    told = json.loads(loops("--json").stdout)
    assert told["models"][0]["name"] == "models/counting"
    assert told["models"][0]["parameters"] == 307_776
    assert told["machine"]["memory_bytes"] > told["models"][0]["memory_bytes"]["train_all"]
    assert told["to_fetch"] == [NAME]


def test_columns_stand_one_under_the_other() -> None:
    entries = [
        entry("a", Facts("ShortName", 7_000_000_000, 1, 8192), "sample"),
        entry("b/longer", Facts("AMuchLongerNameForCausalLM", 1_500_000, 1, None)),
    ]
    assert listed(entries, Machine("cpu", 10**10))[:3] == [
        "model     kind       architecture                parameters  max length  sample  LoRA 32"
        "  every weight  fits",
        "a         directory  ShortName                      7,000 M        8192  1.0 GB   2.0 GB"
        "       10.0 GB  sampling",
        "b/longer  directory  AMuchLongerNameForCausalLM      1.50 M     unknown  1.0 GB   2.0 GB"
        "       10.0 GB  no",
    ]


def test_a_folder_that_is_no_model_is_refused() -> None:
    assert refusal("./nothing").startswith("loops: FOLDER: no model './nothing'")


def test_fetching_needs_one_name_that_is_known() -> None:
    assert refusal("fetch") == f"loops: fetch: name one model: {NAME}"
    assert refusal("fetch", NAME, NAME) == f"loops: fetch: name one model: {NAME}"
    assert refusal("fetch", "smollm2") == (
        f"loops: fetch: there is no 'smollm2' to fetch; did you mean {NAME}?"
    )
    assert "it is one of" in refusal("fetch", "qwen")


def test_what_was_fetched_is_told_by_its_folder_and_no_longer_offered(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "models" / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    result = loops("fetch", NAME)
    assert (result.exit_code, result.stdout) == (0, f"{folder}\n")
    assert result.stderr == f"{NAME} is there already\n"
    told = json.loads(loops("fetch", NAME, "--json").stdout)
    assert told == {"name": NAME, "directory": str(folder)}
