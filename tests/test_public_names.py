"""The public faces say what they offer: `__all__` is what can be imported from them."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1] / "src" / "loops_cookbook"
FACES = sorted(
    path.parent.name for path in ROOT.glob("*/__init__.py") if path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("face", FACES)
def test_all_names_what_is_importable(face: str) -> None:
    package = importlib.import_module(f"loops_cookbook.{face}")
    offered = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(package.__all__) == offered


@pytest.mark.parametrize("face", FACES)
def test_all_names_nothing_twice(face: str) -> None:
    names = importlib.import_module(f"loops_cookbook.{face}").__all__
    assert len(names) == len(set(names))


def test_only_the_public_faces_have_a_filled_init() -> None:
    assert set(FACES) <= {"episodes", "harbor", "runtimes", "services", "testing"}
