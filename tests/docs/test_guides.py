"""What the pages say is so: files run, settings load, links lead somewhere, commands exist.

A fenced block after a line that ends in a file's name (`episode.py`:) is that whole file. Such
files are laid over a fresh project of `loops init`: the Python of all pages, the rest of one's own.
"""

import ast
import importlib
import importlib.util
import itertools
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main
from pydantic import BaseModel, ConfigDict

from loops_cookbook import errors
from loops_cookbook.attempts import Fate
from loops_cookbook.cli.app import app
from loops_cookbook.cli.init import make_project
from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.imports import import_class
from loops_cookbook.config.load import LoadedConfig, load_config
from loops_cookbook.config.overrides import apply_overrides, parse_override
from loops_cookbook.config.rl import RLConfig
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.episodes.episode import Episode, declared
from loops_cookbook.recipes.check import check_report
from loops_cookbook.recipes.metrics import METRICS
from loops_cookbook.recipes.plan import plan_run
from loops_cookbook.recipes.sft_metrics import SFT_METRICS
from loops_cookbook.tasks import load_tasks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = {"cli.md", "config.md", "engines.md", "metrics.md", "modules.md"}
PAGES = [
    ROOT / "README.md",
    ROOT / "patterns" / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if page.name not in GENERATED),
]
REST: dict[str, Any] = {
    "recipe": "rl",
    "model": {"name": "my_model"},
    "episode": {"class": "episode:MyEpisode", "tasks": "tasks.jsonl"},
}
"""What a part of a config on a page lacks to be whole."""
SFT_REST: dict[str, Any] = {
    "recipe": "sft",
    "model": {"name": "my_model"},
    "data": {"train": "train.jsonl", "held_out": "held_out.jsonl"},
}
"""The same on the pages of supervised fine-tuning."""
SFT_PAGES = ("sft.md",)


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line before it."""

    page: Path
    line: int
    language: str
    text: str
    before: str

    @property
    def file(self) -> str:
        """The name of the file that it is the whole of, or nothing."""
        ending = {"python": "py", "toml": "toml", "text": "jsonl"}.get(self.language, "-")
        named = re.search(rf"`(\w+\.{ending})`:$", self.before)
        return named[1] if named else ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    opened, language, before = 0, "", ""
    lines: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```") and opened:
            yield Block(page, opened, language, "".join(f"{each}\n" for each in lines), before)
            opened, before = 0, ""
        elif line.startswith("```"):
            opened, language, lines = number, line[3:].strip(), []
        elif opened:
            lines.append(line)
        elif line.strip():
            before = line.strip()


@cache
def every_block() -> tuple[Block, ...]:
    return tuple(block for page in PAGES for block in blocks_of(page))


def blocks(language: str) -> list[Block]:
    return [block for block in every_block() if block.language == language]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def inline_codes() -> list[tuple[str, str]]:
    """Each page's name with each piece of inline code on it, once."""
    found = [(page.name, c) for page in PAGES for c in re.findall(r"`([^`\n]+)`", prose(page))]
    return list(dict.fromkeys(found))


def project_of(block: Block, folder: Path) -> Path:
    """A project with the files of the block's page, its folder on `sys.path`."""
    project = folder / "loops-project"
    make_project(project)
    for each in every_block():
        if each.file and (each.language == "python" or each.page == block.page):
            (project / each.file).write_text(each.text, encoding="utf-8")
    sys.path.insert(0, str(project))
    return project


def next_block(block: Block) -> Block:
    return min(
        (b for b in every_block() if b.page == block.page and b.line > block.line),
        key=lambda b: b.line,
    )


# --- Python


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_can_be_read_and_names_what_the_package_has(block: Block) -> None:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for node in ast.walk(compile(block.text, str(block), "exec", flags)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loops_cookbook"):
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


FILES = [block for block in blocks("python") if block.file]


@pytest.mark.parametrize("block", FILES, ids=[block.file for block in FILES])
def test_a_whole_file_runs(
    block: Block, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it prints is what the page shows next; tests pass; Episodes can be declared."""
    project_of(block, tmp_path)
    module = importlib.import_module(block.file.removesuffix(".py"))
    if printed := capsys.readouterr().out:
        assert printed == next_block(block).text
    for episode in episodes_in(module):
        assert declared(episode).name == episode.__name__
    for name, test in vars(module).items():
        if name.startswith("test_"):
            test()


def episodes_in(module: ModuleType) -> list[type[Episode[Any, Any]]]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Episode) and value is not Episode
    ]


def test_the_pages_show_files_that_run() -> None:
    names = {block.file for block in FILES}
    assert {"guess.py", "test_guess.py", "extract.py", "shortest.py", "ask_runtime.py"} <= names


# --- Settings and tasks


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_settings_load(block: Block) -> None:
    shown = tomllib.loads(block.text)
    is_sft = block.page.name in SFT_PAGES
    whole = shown if "recipe" in shown else merged(SFT_REST if is_sft else REST, shown)
    config = SFTConfig if whole["recipe"] == "sft" else RLConfig
    assert config.model_validate(whole).recipe == whole["recipe"]


def test_the_options_on_a_page_are_those_of_its_episode(tmp_path: Path) -> None:
    block = next(b for b in blocks("toml") if "[episode.options]" in b.text)
    project = project_of(block, tmp_path)
    loaded = loaded_rl(project)
    named = loaded.config.episode.class_ or ""
    says = declared(import_class(named, project, key="episode.class", base=Episode))
    options = loaded.options(says.options_model, loaded.config.episode.options, place=("options",))
    assert options is not None
    assert options.model_dump() == loaded.config.episode.options


def loaded_rl(project: Path) -> LoadedConfig[RLConfig]:
    loaded = load_config("train.toml", working_directory=project).of_recipe(RLConfig)
    assert loaded is not None
    return loaded


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: merged(below[key], value) if isinstance(value, dict) and key in below else value
        for key, value in above.items()
    }
    return {**below, **both}


@pytest.mark.parametrize("block", [*blocks("json"), *blocks("jsonl")], ids=str)
def test_json_is_json(block: Block) -> None:
    texts = [block.text] if block.language == "json" else block.text.splitlines()
    assert all(isinstance(json.loads(text), dict) for text in texts)


REPORTS = [block for block in blocks("text") if block.text.startswith("Config: <project>/")]


@pytest.mark.parametrize("block", REPORTS, ids=[block.page.stem for block in REPORTS])
def test_a_report_is_what_check_says(block: Block, tmp_path: Path) -> None:
    project = project_of(block, tmp_path)
    loaded = loaded_rl(project)
    environment = read_environment(project, working_directory=project)
    report = check_report(plan_run(loaded, environment, {}, None), {})
    said = "".join(f"{line}\n" for line in report.lines)
    assert block.text == said.replace(str(project), "<project>")


def test_bad_lines_are_told_as_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Question(BaseModel):
        model_config = ConfigDict(extra="forbid")

        name: str
        instruction: str
        answer: str

    page = [block for block in blocks("text") if block.page == DOCS / "guide" / "tasks.md"]
    told = next(block for block in page if block.text.startswith("loops: tasks.jsonl:"))
    lines = next(block for block in page if block.file == "tasks.jsonl")
    (tmp_path / "tasks.jsonl").write_text(lines.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.TaskFileError) as caught:
        load_tasks(tmp_path / "tasks.jsonl", Question)
    assert told.text.splitlines() == [f"loops: {line}" for line in str(caught.value).splitlines()]


# --- Commands, keys, metrics


def commands() -> list[tuple[str, str]]:
    """Each page's name with each `loops ...` on it."""
    shell = [*blocks("sh"), *blocks("")]
    lines = [(b.page.name, line) for b in shell for line in b.text.splitlines()]
    typed = [(page, text.removeprefix("uv run ")) for page, text in [*lines, *inline_codes()]]
    return list(dict.fromkeys(each for each in typed if each[1].startswith("loops ")))


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_exists_with_its_options(page: str, command: str) -> None:
    group: Any = typer.main.get_command(app)
    name, *words = shlex.split(command, comments=True)[1:]
    if name.startswith("-"):
        assert name in ("--help", "--version")
        return
    known = {option for parameter in group.commands[name].params for option in parameter.opts}
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert options - {"--help"} <= known
    overrides = [b for a, b in itertools.pairwise(words) if a == "--set"]
    is_sft = page in SFT_PAGES
    rest, config = (SFT_REST, SFTConfig) if is_sft else (REST, RLConfig)
    settings = apply_overrides(rest, [parse_override(text) for text in overrides])
    assert config.model_validate(settings).recipe == rest["recipe"]
    configs = [word for word in words if word.startswith(("examples/", "patterns/"))]
    assert [config for config in configs if not (ROOT / config).is_file()] == []


TABLES = "model|episode|data|training|sampling|concurrency|clocks|evaluation|sandbox|output"
KEY = rf"(?!episode\.py)({TABLES})\.[\w.]+"
METRIC = r"(reward|groups|attempts|rollout|tokens|policy|kl|time|eval)/[\w/<>]+"


def codes_like(pattern: str) -> list[str]:
    """The pieces of inline code, a value after them left out, that are of this form."""
    names = sorted({code.partition(" = ")[0] for _, code in inline_codes()})
    return [name for name in names if re.fullmatch(pattern, name)]


@pytest.mark.parametrize("key", codes_like(KEY))
def test_a_key_is_one_of_a_config(key: str) -> None:
    assert any(has_key(config, key) for config in (RLConfig, SFTConfig))


def has_key(config: Any, key: str) -> bool:
    for part in key.split("."):
        fields = {field.alias or name: field for name, field in config.model_fields.items()}
        if part not in fields:
            return False
        config = fields[part].annotation
    return True


@pytest.mark.parametrize("metric", codes_like(METRIC))
def test_a_metric_is_one_of_a_row(metric: str) -> None:
    patterns = [re.sub(r"<\w+>", "[^/]+", name) for name, _ in (*METRICS, *SFT_METRICS)]
    assert any(re.fullmatch(pattern, metric) for pattern in patterns)


# --- What a page must tell whole


def test_every_fate_is_told() -> None:
    told = (DOCS / "guide" / "episodes.md").read_text(encoding="utf-8")
    assert [fate.value for fate in Fate if f"| `{fate.value}` |" not in told] == []


def test_every_error_is_told_with_its_status() -> None:
    told = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    for error in classes:
        row = next(
            row for row in told.splitlines() if re.match(rf"\|.{{1,4}}{error.__name__}`", row)
        )
        is_the_commands = issubclass(error, errors.UsageError | errors.RunStopped)
        assert row.split("|")[2].strip() == (str(error.exit_status) if is_the_commands else "")


def test_the_house_is_drawn_as_the_layers_are_tested() -> None:
    drawing = next(b for b in blocks("text") if b.page == DOCS / "design" / "house.md").text
    floors = [line.split("   ")[0].split() for line in drawing.splitlines() if line.strip()]
    *core, annex = floors
    package = ROOT / "src" / "loops_cookbook"
    there = [
        name
        for name in layers().ORDER
        if (package / name).exists() or (package / f"{name}.py").exists()
    ]
    assert [name for floor in reversed(core) for name in floor] == there
    assert annex == ["local"]


def layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("layers", ROOT / "tests" / "test_layers.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- Links


def links() -> list[tuple[Path, str]]:
    found = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    return [(page, link) for page, link in found if "://" not in link]


@pytest.mark.parametrize(
    ("page", "link"), links(), ids=[f"{page.stem}-{link}" for page, link in links()]
)
def test_a_link_leads_somewhere(page: Path, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    assert target.exists()
    assert not anchor or anchor in anchors(target)


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
