"""A row of the table shows the same metrics under the same titles at every width."""

import pytest

from loops_cookbook.records import StepRow
from loops_cookbook.report.table import UpdateTable

STEP = StepRow(
    update=12,
    at=0.0,
    metrics={
        "reward/all_mean": 0.4375,
        "reward/group_std_mean": 0.47,
        "groups/usable": 8.0,
        "groups/no_variance": 1.0,
        "groups/too_few": 1.0,
        "attempts/discarded": 3.0,
        "tokens/sampled": 12_345.0,
        "kl/sample_train_k3": 4.1e-5,
        "time/update": 3.2,
        "loss": -12.3,
        "grad_norm": 0.51,
        "entropy": 0.8,
        "policy/staleness_max": 0.0,
    },
)


def test_a_row_stands_under_its_head() -> None:
    table = UpdateTable(50, 80)

    assert table.head == (
        "update   reward  group std   usable   lost   tokens        kl         time"
    )
    assert table.row(STEP) == (
        " 12/50    0.438      0.470     8/10      3    12.3k   4.1e-05        3.2 s"
    )


def test_a_wide_terminal_has_more_columns() -> None:
    table = UpdateTable(50, 120)

    assert table.head.split()[-5:] == ["loss", "grad", "norm", "entropy", "stale"]
    assert table.row(STEP).split()[-4:] == ["-12.300", "0.510", "0.800", "0"]


@pytest.mark.parametrize("planned", [None, 1, 50, 10_000])
@pytest.mark.parametrize("width", [80, 120])
def test_head_and_row_fit_the_width_and_are_equally_long(planned: int | None, width: int) -> None:
    table = UpdateTable(planned, width)

    assert len(table.head) == len(table.row(STEP)) <= width


def test_a_metric_that_is_not_there_is_a_dash() -> None:
    assert UpdateTable(None, 80).row(StepRow(update=1, at=0.0, metrics={})).split() == [
        "1",
        *["-"] * 7,
    ]


def test_a_sentence_names_what_it_shows() -> None:
    assert UpdateTable(50, 80).sentence(STEP) == (
        "update 12/50: reward 0.438, group std 0.470, usable 8/10, lost 3, tokens 12.3k, "
        "kl 4.1e-05, time 3.2 s"
    )


def test_the_rows_of_an_sft_run_have_columns_of_their_own() -> None:
    table = UpdateTable(50, 120, recipe="sft")
    row = StepRow(update=3, at=0.0, metrics={"loss": 2.5, "epoch": 0.25, "tokens/read": 2740.0})

    assert table.head.split()[:6] == ["update", "loss", "epoch", "rows", "tokens", "trained"]
    assert table.row(row).split()[:5] == ["3/50", "2.500", "0.250", "-", "2.7k"]
    assert table.sentence(row).startswith("update 3/50: loss 2.500, epoch 0.250, rows -")
    assert len(table.head) == len(table.row(row))


def test_a_sentence_of_an_async_run_says_how_old_its_groups_were() -> None:
    assert UpdateTable(50, 80, is_async=True).sentence(STEP).endswith("time 3.2 s, stale 0")
