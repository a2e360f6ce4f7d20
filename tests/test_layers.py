"""The house stands: every import points down, nothing goes in a circle, the core is light."""

import ast
import subprocess
import sys
from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "loops_cookbook"

# From the ground up. A package imports only itself and those named before it.
ORDER: Sequence[str] = """
    errors problems values clock journal messages tokens attempts records recorders
    tasks learning config
    services renderers sandboxes rundir
    runtimes episodes harbor rollouts recipes report testing cli
""".split()  # noqa: SIM905 - floors, one a line
DOORS = {"services", "renderers", "sandboxes", "rundir"}  # and these not one another
ANNEX_MAY_IMPORT = {"errors", "problems", "tokens", "learning", "services", "local"}
HEAVY = {"torch", "transformers", "renderers", "openai", "aiohttp", "blaxel", "harbor", "tinker"}
HEAVY |= {"wandb", "trackio"}
MODULES = sorted(ROOT.rglob("*.py"))


def imported_names(path: Path) -> set[str]:
    """Every name a file imports, in full, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def own_packages(path: Path) -> set[str]:
    """The packages of ours that a file imports from."""
    own = {name for name in imported_names(path) if name.startswith("loops_cookbook.")}
    return {name.split(".")[1] for name in own}


def may_import(package: str) -> set[str]:
    """The packages of ours that a package may import from."""
    if package == "__init__":
        return set()
    if package == "local":
        return ANNEX_MAY_IMPORT
    below = set(ORDER[: ORDER.index(package) + 1])
    return below - (DOORS - {package}) if package in DOORS else below


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert own_packages(path) <= may_import(package)


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in MODULES}
    modules = {name.removesuffix(".__init__") for name in names}
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        imports = imported_names(path)
        imports = {full if full in modules else full.rpartition(".")[0] for full in imports}
        name = name.removesuffix(".__init__")
        graph[name] = imports & modules - {name}
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_the_command_and_the_episode_api_import_no_heavy_library() -> None:
    code = (
        "import sys, loops_cookbook.cli.app, loops_cookbook.episodes;"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_help_is_said_without_a_heavy_library() -> None:
    code = (
        "import sys, loops_cookbook.cli.app as cli; sys.argv = ['loops', '--help']\n"
        "try: cli.main()\n"
        f"finally: print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("Usage: loops")
    assert said.endswith("[]\n")
