"""From `[sandbox]` to what makes sandboxes."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from loops_cookbook.config.rl import RLConfig
from loops_cookbook.config.sandbox import SandboxTable
from loops_cookbook.errors import MissingExtra, SandboxUnavailable
from loops_cookbook.recipes.sandboxes import (
    backend_of,
    open_sandboxes,
    require_sandboxes,
    sandbox_warnings,
    sandboxes_line,
)
from loops_cookbook.rundir.layout import new_run_folder
from loops_cookbook.sandboxes import blaxel_sdk
from loops_cookbook.sandboxes.ledger import open_entries

PLAIN = {"backend": "local", "isolation": "none", "network": True}


def config(**table: Any) -> RLConfig:
    whole = {
        "recipe": "rl",
        "model": {"name": "m"},
        "episode": {"class": "e:E", "tasks": "t"},
        "sandbox": table,
    }
    return RLConfig.model_validate(whole)


def test_isolation_chooses_what_makes_them() -> None:
    assert backend_of(SandboxTable()) is None
    kinds = [backend_of(SandboxTable.model_validate(t)) for t in ({"backend": "local"}, PLAIN)]
    assert [backend and backend.kind for backend in kinds] == ["bubblewrap", "plain"]


def test_a_machine_without_bubblewrap_is_refused_with_the_ways_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match=r"no bwrap on PATH.*isolation = \"none\""):
        require_sandboxes(config(backend="local"))
    require_sandboxes(config(**PLAIN))
    require_sandboxes(config())


def test_a_machine_that_forbids_namespaces_is_refused_with_what_bubblewrap_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container, where bwrap is installed and may do nothing."""
    forbidding = tmp_path / "bwrap"
    forbidding.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\n")
    forbidding.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("loops_cookbook.sandboxes.bubblewrap.PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(
        SandboxUnavailable, match=r"makes no sandbox here .*did not start.*see sysctl user"
    ):
        require_sandboxes(config(backend="local"))


def test_a_person_is_told_that_nothing_is_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox_warnings(SandboxTable(), {}) == []
    (warning,) = sandbox_warnings(SandboxTable.model_validate(PLAIN), {})
    assert 'isolation is "none"' in warning
    monkeypatch.setenv("PATH", "/nowhere")
    (warning,) = sandbox_warnings(SandboxTable(backend="local"), {})
    assert "bubblewrap is not installed" in warning


def test_a_run_without_sandboxes_has_no_ledger_and_one_with_them_has(tmp_path: Path) -> None:
    folder = new_run_folder("runs", tmp_path)

    async def use(table: dict[str, Any]) -> None:
        async with open_sandboxes(config(**table), folder) as source:
            if source is not None:
                await source.open("task a", {})
                assert len(open_entries(folder.sandboxes)) == 1

    anyio.run(use, {})
    assert not folder.sandboxes.exists()
    anyio.run(use, PLAIN)
    assert folder.sandboxes.exists()
    assert open_entries(folder.sandboxes) == ()


def test_the_report_names_what_makes_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this machine's it said nothing, and so not that an agent is given the network."""
    assert sandboxes_line(SandboxTable()) is None
    line = sandboxes_line(SandboxTable(backend="local"))
    assert line == "Sandboxes: local; isolation bubblewrap; no network"
    line = sandboxes_line(SandboxTable.model_validate(PLAIN))
    assert line == "Sandboxes: local; isolation none; network"
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="no container engine here"):
        sandboxes_line(SandboxTable(backend="docker", image="debian"))
    monkeypatch.setattr(blaxel_sdk, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r'uv add "loops-cookbook\[blaxel\]"'):
        sandboxes_line(SandboxTable(backend="blaxel"))
    monkeypatch.setattr(blaxel_sdk, "find_spec", lambda name: object())
    line = sandboxes_line(SandboxTable(backend="blaxel"))
    assert line == "Sandboxes: blaxel; image blaxel/base-image:latest; no network"


def test_a_person_is_told_what_is_ignored_and_what_a_service_needs() -> None:
    table = SandboxTable.model_validate({"backend": "blaxel", "cpu": 1.0})
    ignored, key, _, _ = sandbox_warnings(table, {})
    assert ignored.startswith('sandbox.cpu: backend = "blaxel" ignores it')
    assert key.startswith("BL_API_KEY: neither the environment nor .env has it; `loops run` needs")
