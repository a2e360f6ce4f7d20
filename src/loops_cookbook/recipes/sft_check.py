"""What `loops check` says of an SFT plan: the report's lines, one row in full, the warnings."""

from collections.abc import Mapping

from loops_cookbook.recipes.check import (
    CheckReport,
    engine_warnings,
    head_lines,
    images_told,
    model_lines,
    start_lines,
)
from loops_cookbook.recipes.confirm import UNASKED, Confirmation
from loops_cookbook.recipes.excerpt import excerpt
from loops_cookbook.recipes.proportion import proportion_warnings
from loops_cookbook.recipes.sft_plan import DataSet, SFTPlan
from loops_cookbook.tasks import PROBLEMS_SHOWN

LAST_LINE = "Configuration and data checked; no Loops trainer launched."


def sft_check_report(
    plan: SFTPlan, values: Mapping[str, str], confirmation: Confirmation = UNASKED
) -> CheckReport:
    """Report a plan; launches nothing and needs no network.

    Args:
        plan: what is reported.
        values: the environment.
        confirmation: what hosted Loops says of the model, where it trains.
    """
    renderer = plan.detection.renderer
    return CheckReport(
        lines=(
            *head_lines(plan),
            *model_lines(plan, values, confirmation),
            *start_lines(plan),
            f"Renderer: {plan.detection.line}",
            f"Images: {images_told(plan)}",
            f"Data: {_counted(plan.train)}",
            f"Held out: {_held_out(plan)}",
            *_batch_lines(plan),
            LAST_LINE,
        ),
        warnings=sft_warnings(plan, values, confirmation),
        renderer=plan.detection,
        excerpt=tuple(excerpt(plan.train.rows[0], renderer)) if renderer is not None else (),
    )


def sft_warnings(
    plan: SFTPlan, values: Mapping[str, str], confirmation: Confirmation = UNASKED
) -> tuple[str, ...]:
    """What to know before a run, one line each, with what to do."""
    sets = [plan.train, *([plan.held_out] if plan.held_out else [])]
    return (
        *engine_warnings(plan, values, confirmation),
        *plan.detection.warnings,
        *proportion_warnings(plan),
        *(warning for each in sets for warning in _unusable_warnings(each)),
        *_shared_warnings(plan),
        *_split_warnings(plan),
        *plan.environment.warnings(),
    )


def _counted(data: DataSet) -> str:
    rows = f"{len(data.rows):,} rows" if data.rows else f"{data.lines:,} rows, not tokenized"
    if not data.rows:
        return rows
    longest = max(data.rows, key=lambda row: row.longest)
    told = [
        f"{rows}, {sum(row.tokens for row in data.rows):,} tokens",
        f"{sum(row.trained_tokens for row in data.rows):,} trained",
        f"longest {longest.longest:,} ({longest.source})",
    ]
    split = [row for row in data.rows if len(row.sequences) > 1]
    if split:
        sequences = sum(len(row.sequences) for row in split)
        told.append(f"{len(split):,} rows split into {sequences:,} sequences")
    if data.unusable:
        told.append(f"{len(data.unusable):,} more left out")
    return "; ".join(told)


def _held_out(plan: SFTPlan) -> str:
    if plan.held_out is None:
        return "none"
    alone = "" if plan.shared or not plan.held_out.rows else "; none of them trained on"
    return f"{_counted(plan.held_out)}{alone}"


def _batch_lines(plan: SFTPlan) -> list[str]:
    training = plan.config.training
    size = f"{training.batch_size:,} rows" if training.batch_size else ""
    if training.batch_tokens is not None:
        size = f"up to {training.batch_tokens:,} tokens"
    if not plan.batches:
        return [f"Batch: {size}"]
    epochs = f"{training.epochs} epochs" if training.epochs > 1 else "1 epoch"
    return [f"Batch: {size}; {epochs}, {len(plan.batches):,} updates"]


def _unusable_warnings(data: DataSet) -> list[str]:
    """Every row that is left out, the first by name."""
    warnings = [f"{data.key}: left out: {fault}" for fault in data.unusable[:PROBLEMS_SHOWN]]
    if rest := len(data.unusable) - len(warnings):
        warnings.append(f"{data.key}: left out: {rest} more rows like these")
    return warnings


def _shared_warnings(plan: SFTPlan) -> list[str]:
    held_out = plan.held_out
    if held_out is None or not plan.shared:
        return []
    same = sum(each.kind == "same" for each in plan.shared)
    pairs = [
        f"{held_out.rows[each.place].source} as {plan.train.rows[each.other].source}"
        for each in plan.shared[:3]
    ]
    more = ", ..." if len(plan.shared) > len(pairs) else ""
    return [
        f"data.held_out: {len(plan.shared)} of its {len(held_out.rows)} rows are also trained on "
        f"({same} the same, {len(plan.shared) - same} nearly: {', '.join(pairs)}{more}), so its "
        "loss does not show what holds on new ones; use other rows"
    ]


def _split_warnings(plan: SFTPlan) -> list[str]:
    """Why a row became several sequences."""
    split = sum(len(row.sequences) > 1 for row in plan.train.rows)
    if not split:
        return []
    why = plan.detection.why_not_extended or "a new user message begins a new sequence there"
    return [
        f"data.train: {split} rows are split, since {why}: each of "
        "their trained messages is trained after exactly what generation would have seen, at the "
        "cost of reading what they share again"
    ]
