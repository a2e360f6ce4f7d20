"""Which container engine is spoken to, and what is said where there is none."""

from pathlib import Path

import pytest

from loops_cookbook.errors import SandboxUnavailable
from loops_cookbook.sandboxes.engine import engine_here, is_address_of_another_machine

SPEAKS = """#!/bin/sh
case $1 in
version) echo 9.9.9;;
context) echo unix:///run/engine.sock;;
esac
"""
SILENT = "#!/bin/sh\necho 'Cannot connect to the daemon.\nIs it running?' >&2\nexit 1\n"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CONTAINER_HOST", raising=False)
    return tmp_path


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


def test_without_a_program_it_is_said_what_to_install(programs: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="install Docker or Podman"):
        engine_here()


def test_a_program_whose_engine_does_not_answer_is_told_in_one_line(programs: Path) -> None:
    program(programs, "docker", SILENT)
    with pytest.raises(SandboxUnavailable, match=r"Cannot connect.*set DOCKER_HOST") as told:
        engine_here()
    assert "\n" not in str(told.value)


def test_docker_is_taken_before_podman_and_podman_before_nothing(programs: Path) -> None:
    program(programs, "podman", SPEAKS)
    program(programs, "docker", SILENT)
    assert engine_here().program == "podman"
    program(programs, "docker", SPEAKS)
    engine = engine_here()
    assert (engine.program, engine.version) == ("docker", "9.9.9")
    assert engine.place == "docker at unix:///run/engine.sock"
    assert not is_address_of_another_machine(engine.place)


@pytest.mark.parametrize(
    ("place", "is_remote"),
    [
        ("docker at unix:///var/run/docker.sock", False),
        ("docker at npipe:////./pipe/docker", False),
        ("podman of user 0", False),
        ("docker at tcp://host:2376", True),
        ("docker at ssh://user@host", True),
    ],
)
def test_only_an_address_of_a_machine_means_the_same_everywhere(
    place: str, is_remote: bool
) -> None:
    assert is_address_of_another_machine(place) == is_remote
