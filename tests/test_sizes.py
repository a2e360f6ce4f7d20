"""A module fits in a head: 400 lines at most, and 60 in a function."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.py")])

MOST_LINES_OF_A_MODULE = 400
MOST_LINES_OF_A_FUNCTION = 60


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_not_too_long(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_A_MODULE


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_function_is_too_long(path: Path) -> None:
    lengths = [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [named for named in lengths if named[1] > MOST_LINES_OF_A_FUNCTION] == []
