"""An option that there is not is told as the key of the config that was meant."""

import pytest
from typer.testing import CliRunner

from loops_cookbook.cli.app import app


@pytest.mark.parametrize("command", ["check", "run", "eval"])
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--lr", "did you mean --set training.learning_rate=VALUE?"),
        ("--learning-rate", "did you mean --set training.learning_rate=VALUE?"),
        ("--training.learning_rate", "did you mean --set training.learning_rate=VALUE?"),
        ("--model", "did you mean --set model.name=VALUE?"),
        ("--batch-size", "did you mean --set training.groups_per_update=VALUE?"),
        ("--seed", "did you mean --set model.seed=VALUE or --set training.seed=VALUE?"),
        ("--beta", "there is no reference model, and no KL penalty to one; leave it out"),
        ("--scop", "did you mean --scope?"),
        ("--zeppelin", "--set TABLE.KEY=VALUE changes a key of the config"),
    ],
)
def test_an_option_that_a_config_has_as_a_key_is_told_as_that(
    command: str, asked: str, said: str
) -> None:
    """`--lr 3` was answered by `Possible options: --help`."""
    result = CliRunner().invoke(app, [command, "train.toml", asked, "3"])
    assert result.exit_code == 2
    last = " ".join(result.stderr.split("Error: ")[1].split())
    assert last == f"No such option: {asked}; {said}"
