"""A process serves one config; a test session serves many, so each test forgets its own."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every machine, and no clock on them: machines differ.
settings.register_profile("loops", deadline=None, derandomize=True)
settings.load_profile("loops")

ROOT = Path(__file__).parents[1]
BUNDLED = (ROOT / "examples", ROOT / "patterns")


@pytest.fixture(autouse=True)
def _forget_user_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Take back what a config put on `sys.path`, and what was imported from there."""
    path = [*sys.path]
    yield
    if sys.path == path:
        return
    sys.path[:] = path
    users = (*BUNDLED, tmp_path_factory.getbasetemp())
    for name, module in [*sys.modules.items()]:
        origin = getattr(module, "__file__", None)
        if origin and any(folder in Path(origin).parents for folder in users):
            del sys.modules[name]
