"""What is installed is found by looking, without an import."""

import sys
from pathlib import Path

import pytest

from loops_cookbook.errors import MissingExtra
from loops_cookbook.services.extras import is_installed, namesake
from loops_cookbook.services.tinker import TinkerOptions, tinker_service


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that packages are found in."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(site: Path, distribution: str, module: str) -> None:
    (site / module).mkdir(exist_ok=True)
    (site / module / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    told = site / f"{distribution.replace('-', '_')}-1.2.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    (told / "RECORD").write_text(f"{module}/__init__.py,,\n")


def test_a_module_is_found_without_being_imported(site: Path) -> None:
    assert not is_installed(("some_extra",))
    install(site, "some-extra", "some_extra")
    assert is_installed(("some_extra",))
    assert "some_extra" not in sys.modules


def test_a_folder_of_the_name_is_no_package(site: Path) -> None:
    """wandb keeps its files in a folder `wandb` beside the config, which looked like wandb."""
    (site / "some_extra").mkdir()
    assert not is_installed(("some_extra",))


def test_a_package_is_no_namesake_of_its_own_module(site: Path) -> None:
    assert namesake("some_sdk") is None
    install(site, "some_sdk", "some_sdk")
    assert namesake("some_sdk") is None


def test_another_package_of_the_module_s_name_is_noticed(site: Path) -> None:
    install(site, "a-shim", "some_sdk")
    assert namesake("some_sdk") == "a-shim 1.2"
    install(site, "some_sdk", "some_sdk")
    assert namesake("some_sdk") == "a-shim 1.2"


@pytest.mark.anyio
async def test_a_shim_is_not_taken_for_the_sdk(site: Path) -> None:
    """Its `tinker` was imported, and a run ended in an AttributeError."""
    install(site, "baseten-loops-tinker", "tinker")
    options = TinkerOptions("http://tinker", "tml-k", "m", lora_rank=8, seed=0, run_id="r")
    with pytest.raises(MissingExtra, match=r"in whose place baseten-loops-tinker 1\.2 is") as told:
        async with tinker_service(options):
            pass
    assert 'run `uv add "loops-cookbook[tinker]"`' in str(told.value)
