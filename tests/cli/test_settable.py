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
        (
            "--batch-size",
            "did you mean --set training.groups_per_update=VALUE or --set "
            "training.batch_size=VALUE?",
        ),
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


@pytest.mark.parametrize(
    ("config", "asked", "said"),
    [
        ("examples/counting/train.toml", "--batch-size", "training.groups_per_update=VALUE?"),
        ("examples/sft_orders/train.toml", "--batch-size", "training.batch_size=VALUE?"),
        ("examples/sft_orders/train.toml", "--group-size", "TABLE.KEY=VALUE changes a key"),
    ],
)
def test_the_key_is_one_of_the_recipe_that_the_config_names(
    config: str, asked: str, said: str
) -> None:
    """`--batch-size` with a config of supervised fine-tuning was told as a key of RL's."""
    result = CliRunner().invoke(app, ["run", config, asked, "0"])
    last = " ".join(result.stderr.split("Error: ")[1].split())
    assert f"--set {said}" in last
