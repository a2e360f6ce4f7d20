"""The command `loops` as a whole."""

from importlib.metadata import version

import pytest
from typer.testing import CliRunner, Result

from loops_cookbook.cli.app import app
from loops_cookbook.config.shared import SCOPES, TOLD_SCOPES


def loops(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, prog_name="loops")


def test_help_names_every_command() -> None:
    said = loops("--help").stdout
    assert said.startswith("Usage: loops")
    for command in ("init", "examples"):
        assert f"\n  {command} " in said


def test_the_version_is_that_of_the_distribution() -> None:
    result = loops("--version")
    assert result.stdout == f"loops-cookbook {version('loops-cookbook')}\n"
    assert result.exit_code == 0


@pytest.mark.parametrize("arguments", [(), ("nothing",), ("init",), ("examples", "--nothing")])
def test_a_wrong_use_exits_2_and_says_how_to_use_it(arguments: tuple[str, ...]) -> None:
    result = loops(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage: loops" in result.stderr


def test_every_command_takes_debug() -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        said = loops(command.name or command.callback.__name__, "--help").stdout
        assert "--debug" in said


def test_an_error_of_a_command_is_one_line_and_its_status() -> None:
    result = loops("init", "/dev/null/x")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("loops: /dev/null: is a file, where a folder is to be; ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["check", "run", "eval"])
def test_the_help_and_the_refusal_of_a_scope_name_the_same_scopes(command: str) -> None:
    """`deployment` was told in the one and not in the other."""
    refused = loops(command, "examples/counting/train.toml", "--scope", "gpu").stderr
    assert f"it is one of {TOLD_SCOPES}, or module:factory" in refused
    told = " ".join(loops(command, "--help").stdout.split())
    assert f"{TOLD_SCOPES} or module:factory" in told


@pytest.mark.parametrize(
    ("command", "sentences"),
    [
        (
            "check",
            [
                "Path of a config file, from the working directory;",
                "It is used instead of the config's compute.scope.",
                "Change a key of the config for this command.",
            ],
        ),
        (
            "serve",
            [
                "Tokens that a prompt and its reply may have together. Without it: as many as",
                "Rank of the LoRA adapter, until a client asks for another;",
                "Without it: cuda where there is one, else cpu.",
            ],
        ),
    ],
)
def test_help_says_what_an_option_is_in_whole_sentences(command: str, sentences: list[str]) -> None:
    """`Before the config's.` and `Unset: what the model takes.` were all that it said."""
    told = " ".join(loops(command, "--help").stdout.split())
    assert all(sentence in told for sentence in sentences)


def test_every_scope_is_among_those_that_people_are_told() -> None:
    assert all(scope in TOLD_SCOPES for scope in SCOPES)
