"""What an SFT config may not be, told before anything is launched; and what a plan holds."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.recipes.conftest import sft_line

from loops_cookbook.config.environment import read_environment
from loops_cookbook.config.load import load_config
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.errors import ConfigError, TaskFileError
from loops_cookbook.recipes.sft_plan import SFTPlan, plan_sft

MakeSFTPlan = Callable[..., SFTPlan]


def write(file: Path, rows: list[tuple[str, str]]) -> None:
    file.write_text("".join(sft_line(*row) for row in rows))


def test_a_plan_knows_its_rows_and_its_batches(make_sft_plan: MakeSFTPlan) -> None:
    plan = make_sft_plan("training.epochs=2", "training.batch_size=2")
    assert [row.source for row in plan.train.rows] == [f"train.jsonl:{i}" for i in (1, 2, 3)]
    assert [len(batch.rows) for batch in plan.batches] == [2, 1, 2, 1]
    assert plan.held_out is not None
    assert len(plan.held_out.rows) == 2


def test_rows_that_cannot_be_used_stop_a_run_and_are_all_named(
    make_sft_plan: MakeSFTPlan, sft_project: Path
) -> None:
    """A row whose prompt alone was too long once trained on a loss of 0."""
    long = "paid, " * 70
    write(sft_project / "train.jsonl", [("paid", "1"), (long, "2"), (f"{long}paid", "3")])
    with pytest.raises(TaskFileError) as caught:
        make_sft_plan()
    first, second, what = str(caught.value).splitlines()
    assert first.startswith("train.jsonl:2: does not fit: 145 tokens, its prompt alone 143")
    assert second.startswith("train.jsonl:3: does not fit")
    assert what == (
        '2 rows cannot be used: mend the data, or leave them out with data.unusable_rows = "skip"'
    )


def test_they_are_left_out_where_that_is_asked_for(
    make_sft_plan: MakeSFTPlan, sft_project: Path
) -> None:
    write(sft_project / "train.jsonl", [("paid", "1"), ("paid, " * 70, "2")])
    plan = make_sft_plan('data.unusable_rows="skip"', "training.batch_size=1")
    assert [row.source for row in plan.train.rows] == ["train.jsonl:1"]
    assert [fault.source for fault in plan.train.unusable] == ["train.jsonl:2"]


def test_a_file_of_nothing_else_is_refused_all_the_same(
    make_sft_plan: MakeSFTPlan, sft_project: Path
) -> None:
    write(sft_project / "train.jsonl", [("paid, " * 70, "2")])
    with pytest.raises(TaskFileError, match=r"data\.train: none of its 1 rows can be used"):
        make_sft_plan('data.unusable_rows="skip"')


def test_an_empty_file_is_refused(make_sft_plan: MakeSFTPlan, sft_project: Path) -> None:
    (sft_project / "held_out.jsonl").write_text("")
    with pytest.raises(TaskFileError, match=r"held_out\.jsonl: holds no row"):
        make_sft_plan()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "training.batch_size=4",
            "training.batch_size: found 4, more than the rows of train.jsonl that can be used; use "
            "3 or less",
        ),
        (
            "training.batch_tokens=6",
            "training.batch_tokens: found 6, and train.jsonl:3 alone has 12; use 12 or more",
        ),
    ],
)
def test_a_batch_that_the_rows_do_not_fill_or_fit_is_refused(
    make_sft_plan: MakeSFTPlan, override: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_sft_plan(override)
    assert str(caught.value) == said


def test_random_weights_need_no_weights_in_the_folder(
    make_sft_plan: MakeSFTPlan, sft_project: Path
) -> None:
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        source = Path(__file__).parents[2] / "models" / "counting" / file
        (sft_project / "shape").mkdir(exist_ok=True)
        (sft_project / "shape" / file).write_text(source.read_text())
    named = ('model.name="shape"', "model.lora_rank=0")
    assert make_sft_plan(*named, 'model.init="random"').train.rows
    with pytest.raises(Exception, match=r'no weights .*or set model\.init = "random"'):
        make_sft_plan(*named)


def test_where_the_tokenizer_is_out_of_reach_the_rows_are_read_and_no_more(
    make_sft_plan: MakeSFTPlan,
) -> None:
    plan = make_sft_plan('model.name="nobody/nothing"')
    assert (plan.train.lines, plan.train.rows, plan.batches) == (3, (), ())


def test_overrides_put_one_size_of_a_batch_in_the_place_of_the_other(
    sft_project: Path,
) -> None:
    loaded = load_config("train.toml", ["training.batch_tokens=99"])
    sft = loaded.of_recipe(SFTConfig)
    assert sft is not None
    assert sft.config.training.batch_size is None
    assert read_environment(sft_project) is not None
    assert plan_sft(sft, read_environment(sft_project), {}, None).batches


def test_rows_are_trained_over_the_tinker_api_too(make_sft_plan: MakeSFTPlan) -> None:
    plan = make_sft_plan("compute.scope='tinker'")
    assert plan.scope.is_tinker
    assert len(plan.batches) == 2
