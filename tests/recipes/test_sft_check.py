"""The report of an SFT plan: what will be trained, what is left out, what is shared."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.recipes.conftest import sft_line

from loops_cookbook.recipes.check import CheckReport
from loops_cookbook.recipes.sft_check import LAST_LINE, sft_check_report
from loops_cookbook.recipes.sft_plan import SFTPlan

MakeSFTPlan = Callable[..., SFTPlan]


def report(plan: SFTPlan) -> CheckReport:
    return sft_check_report(plan, {})


def test_the_report_counts_the_rows_and_their_tokens(make_sft_plan: MakeSFTPlan) -> None:
    lines = report(make_sft_plan("training.epochs=2")).lines
    assert lines[-4:] == (
        "Data: 3 rows, 26 tokens; 6 trained; longest 12 (train.jsonl:3)",
        "Held out: 2 rows, 14 tokens; 4 trained; longest 8 (held_out.jsonl:2); none of them "
        "trained on",
        "Batch: 2 rows; 2 epochs, 4 updates",
        LAST_LINE,
    )
    assert [line.partition(":")[0] for line in lines[:7]] == [
        "Config", "  paths, modules", "  .env", "  runs", "Local model", "Renderer", "Images",
    ]  # fmt: skip


def test_one_row_is_shown_with_its_trained_tokens_marked(make_sft_plan: MakeSFTPlan) -> None:
    assert report(make_sft_plan()).excerpt == (
        "Row train.jsonl:1, what is trained between « and »:",
        "  | <user> paid <end> <assistant>«1 <end>»",
    )


def test_what_is_left_out_is_named_row_by_row(
    make_sft_plan: MakeSFTPlan, sft_project: Path
) -> None:
    rows = "".join(sft_line(*row) for row in [("paid", "1"), ("paid, " * 70, "2"), ("x", "1")])
    (sft_project / "train.jsonl").write_text(rows)
    told = report(make_sft_plan('data.unusable_rows="skip"'))
    assert "; 1 more left out" in told.lines[-4]
    (warning,) = [w for w in told.warnings if "left out" in w]
    assert warning.startswith("data.train: left out: train.jsonl:2: does not fit: 145 tokens")


def test_held_out_rows_that_are_trained_on_are_a_warning_with_both_places(
    make_sft_plan: MakeSFTPlan, sft_project: Path
) -> None:
    rows = sft_line("shipped", "0") + sft_line("Paid,  unpaid", "1")
    (sft_project / "held_out.jsonl").write_text(rows)
    told = report(make_sft_plan())
    (warning,) = [w for w in told.warnings if "also trained on" in w]
    assert warning.startswith(
        "data.held_out: 1 of its 2 rows are also trained on (1 the same, 0 nearly: "
        "held_out.jsonl:2 as train.jsonl:2)"
    )
    assert not told.lines[-3].endswith("none of them trained on")


def test_without_a_tokenizer_the_report_says_so_and_stands(make_sft_plan: MakeSFTPlan) -> None:
    told = report(make_sft_plan('model.name="nobody/nothing"'))
    assert "Data: 3 rows, not tokenized" in told.lines
    assert "Batch: 2 rows" in told.lines
    assert told.excerpt == ()
    assert any("neither cached nor reachable" in warning for warning in told.warnings)


def test_as_json_the_row_stands_apart_from_the_named_lines(make_sft_plan: MakeSFTPlan) -> None:
    told = json.loads(json.dumps(report(make_sft_plan()).to_json()))
    assert told["report"]["Batch"] == "2 rows; 1 epoch, 2 updates"
    assert told["excerpt"][0].startswith("Row train.jsonl:1")
