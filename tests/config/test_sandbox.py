"""The table `[sandbox]`: nothing is asked of what is not there or cannot give it."""

from typing import Any

import pytest
from pydantic import ValidationError

from loops_cookbook.config.sandbox import SandboxTable
from loops_cookbook.problems import problems_in


def faults(**keys: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        SandboxTable.model_validate(keys)
    return [str(problem) for problem in problems_in(caught.value, SandboxTable)]


def test_there_are_no_sandboxes_unless_asked_for() -> None:
    assert SandboxTable().backend == "none"


def test_a_local_sandbox_is_isolated_and_has_no_network_by_default() -> None:
    table = SandboxTable(backend="local")
    assert (table.isolation, table.network) == ("bubblewrap", False)


def test_keys_of_sandboxes_that_are_not_there_are_faults() -> None:
    (fault,) = faults(memory_mb=5)
    assert 'set, but there are no sandboxes; set backend = "local"' in fault


def test_no_isolation_does_not_promise_to_keep_the_network_away() -> None:
    (fault,) = faults(backend="local", isolation="none")
    assert 'found false, which isolation = "none" cannot keep' in fault
    assert SandboxTable(backend="local", isolation="none", network=True).network


@pytest.mark.parametrize(
    "keys",
    [
        {"backend": "moon"},
        {"memory_mb": 0},
        {"image": ""},
        {"cpu": 0},
        {"lifetime_seconds": 60},
        {"timeout_seconds": 0},
        {"disk_gb": 1},
    ],
)
def test_what_is_not_built_or_cannot_be_is_refused(keys: dict[str, object]) -> None:
    assert faults(**{"backend": "local", **keys})


def test_a_container_needs_an_image_and_this_machine_has_none() -> None:
    assert "name an image" in faults(backend="docker")[0]
    assert "shows this machine's own system" in faults(backend="local", image="debian")[0]
    assert SandboxTable(backend="blaxel").image is None


@pytest.mark.parametrize(
    ("backend", "key", "value"),
    [
        ("local", "cpu", 1.0),
        ("local", "lifetime_seconds", 600.0),
        ("docker", "isolation", "bubblewrap"),
        ("docker", "lifetime_seconds", 600.0),
        ("blaxel", "cpu", 1.0),
        ("blaxel", "disk_mb", 1),
        ("blaxel", "processes", 1),
        ("blaxel", "isolation", "none"),
    ],
)
def test_a_key_that_a_backend_ignores_is_told_and_allowed(
    backend: str, key: str, value: object
) -> None:
    image = {"image": "debian"} if backend == "docker" else {}
    table = SandboxTable.model_validate({"backend": backend, key: value, **image})
    (told,) = table.ignored(table.model_fields_set)
    assert told.startswith(f'{key}: backend = "{backend}" ignores it: ')
    assert [*table.ignored({"memory_mb", "network", "timeout_seconds"})] == []
