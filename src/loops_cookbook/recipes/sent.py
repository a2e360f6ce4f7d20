"""An update as it is kept before it is sent: all that sending and recording it again needs.

Everything in it is plain JSON but the datums, so reading it runs nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict, cast

from loops_cookbook.journal import Row, encode
from loops_cookbook.learning.datums import Datum
from loops_cookbook.recipes.metrics import Draft
from loops_cookbook.records import RolloutRow
from loops_cookbook.rundir.read import rollout_row
from loops_cookbook.rundir.updates import KeptUpdate
from loops_cookbook.services.base import AdamParams, LossSpec


@dataclass(frozen=True, slots=True, eq=False)
class SentUpdate:
    """An update, ready to be sent."""

    update: int
    key: str
    """Names it at the trainer."""
    datums: Sequence[Datum]
    loss: LossSpec
    adam: AdamParams
    groups: tuple[int, ...] = ()
    """The serials of what it trains on."""
    rows: tuple[RolloutRow, ...] = ()
    """Of their attempts, as they are once it is applied."""
    draft: Draft | None = None
    """Of its row; None for a recipe that makes it anew."""


class _Call(TypedDict):
    loss: str
    loss_config: dict[str, float | bool]
    adam: dict[str, float]


class _Facts(TypedDict):
    groups: list[int]
    rows: list[Row]
    metrics: dict[str, float]
    counts: dict[str, int]


def to_keep(sent: SentUpdate) -> KeptUpdate:
    """What is written of an update."""
    call = _Call(loss=sent.loss.name, loss_config=dict(sent.loss.config), adam=asdict(sent.adam))
    draft = sent.draft or Draft({}, {})
    facts = _Facts(
        groups=list(sent.groups),
        rows=[json.loads(encode(row.to_json())) for row in sent.rows],
        metrics=dict(draft.metrics),
        counts=dict(draft.counts),
    )
    return KeptUpdate(
        update=sent.update,
        key=sent.key,
        datums=tuple(sent.datums),
        call=cast(Mapping[str, object], call),
        facts=cast(Mapping[str, object], facts),
    )


def from_kept(kept: KeptUpdate) -> SentUpdate:
    """The update, as it was sent."""
    call, facts = cast(_Call, kept.call), cast(_Facts, kept.facts)
    return SentUpdate(
        update=kept.update,
        key=kept.key,
        datums=kept.datums,
        loss=LossSpec(call["loss"], call["loss_config"]),
        adam=AdamParams(**call["adam"]),
        groups=tuple(facts["groups"]),
        rows=tuple(rollout_row(row) for row in facts["rows"]),
        draft=Draft(facts["metrics"], facts["counts"]),
    )
