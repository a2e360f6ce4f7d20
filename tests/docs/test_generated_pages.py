"""The reference pages are what the code says; `make docs` writes them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from loops_cookbook.config.rl import RLConfig

DOCS = Path(__file__).parents[2] / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(generator().PAGES))
def test_a_page_is_what_the_code_says(name: str) -> None:
    page = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert page == generator().PAGES[name](), "run `make docs`"


def test_every_key_of_a_config_is_documented() -> None:
    rows = [line for line in generator().config_page().splitlines() if line.startswith("| `")]
    undocumented = [row for row in rows if row.endswith("|  |")]
    assert len(rows) > len(RLConfig.model_fields)
    assert undocumented == []
