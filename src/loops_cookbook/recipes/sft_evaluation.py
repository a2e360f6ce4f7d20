"""Held-out rows of an SFT run: their loss, and what the policy itself says in their place.

The loss is the trainer's own, over every trained token of every row. A sample is one greedy reply
in the place of a trained message; it scores 1 if its content and tool calls are the message's,
else 0. Each sample is recorded as an attempt, with a transcript of its own; one whose call fails is
discarded, and counted beside the scores.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import anyio
import numpy as np

from loops_cookbook.attempts import Attempt, Call, Discarded, Fate, Group, Timing
from loops_cookbook.config.sft import SFTConfig
from loops_cookbook.errors import EngineDied, ServiceRefused
from loops_cookbook.learning.datums import Datum
from loops_cookbook.messages import Message, text_of
from loops_cookbook.recipes.demonstrations import Asked, Demonstration, reply_message, says
from loops_cookbook.recipes.scores import EvaluationFacts, evaluation_row
from loops_cookbook.recipes.sft_plan import HELD_OUT, DataSet
from loops_cookbook.records import EvaluationRow, Recorder
from loops_cookbook.renderers.base import Renderer
from loops_cookbook.rollouts.faults import caught, told
from loops_cookbook.rollouts.keeper import open_group
from loops_cookbook.rollouts.order import task_order
from loops_cookbook.runtimes.producers import MAIN
from loops_cookbook.services.base import SampleParams, Sampler, Scorer, Trainer
from loops_cookbook.tokens import SampledTokens, Trajectory, Turn

AT_ONCE = 64
"""Samples under way at once, and datums scored by one request."""
SLACK = 8
"""Tokens that a sample may have beyond those of the row's own reply, which it would be spelt in."""


def scorer(trainer: Trainer) -> Scorer:
    """The trainer, as one that can tell a loss without training.

    Raises:
        ServiceRefused: it cannot.
    """
    if not isinstance(trainer, Scorer):
        raise ServiceRefused(
            "data.held_out: the trainer has no `score`, so it cannot tell the loss of held-out "
            "rows; give it one, or remove data.held_out"
        )
    return trainer


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """What held-out rows cost, in nats."""

    mean: float
    """Of a trained token."""
    rows: Mapping[str, float]
    """Of a trained token of each row, by the row's file and line."""


async def held_out_loss(trainer: Scorer, rows: Sequence[Demonstration], *, key: str) -> HeldOutLoss:
    """The loss of rows by the trainer's own weights.

    Args:
        trainer: whose current weights are asked.
        rows: at least one.
        key: names this evaluation in the run.

    Raises:
        ServiceRefused: it is not finite.
    """
    datums = [datum for row in rows for datum in row.datums]
    losses: list[float] = []
    for start in range(0, len(datums), AT_ONCE):
        part = datums[start : start + AT_ONCE]
        logprobs = await trainer.score(part, key=f"{key}-{start // AT_ONCE}")
        losses += [_summed(d, each) for d, each in zip(part, logprobs, strict=True)]
    mean = sum(losses) / sum(datum.trained_tokens for datum in datums)
    if not math.isfinite(mean):
        raise ServiceRefused(
            f"the trainer gave the held-out rows a loss of {mean}: the weights have run away; "
            "lower training.learning_rate"
        )
    left = iter(losses)
    of_rows = {row.source: sum(next(left) for _ in row.datums) / row.trained_tokens for row in rows}
    return HeldOutLoss(mean, of_rows)


def drawn(rows: Sequence[Demonstration], samples: int) -> list[tuple[str, Asked]]:
    """So many trained messages, or all there are, each with its name; always the same ones.

    They are drawn, since every second one of rows with a call and an answer is a call.
    """
    asked = [(f"{row.source}[{len(each.messages)}]", each) for row in rows for each in row.asked]
    return [asked[i] for i in sorted(task_order(len(asked), 0, 0)[:samples])]


@dataclass(frozen=True, slots=True)
class Look:
    """Which weights are looked at."""

    key: str
    """Names them among all that their service is asked of: another name for other weights."""
    update: int = 0
    """How many updates they have had."""
    policy_version: int = 0
    """The version to sample from."""
    policy: str | None = None
    """What they are called, where they are not those of a run."""


class HeldOut:
    """The held-out rows of a run, ready to be evaluated.

    Args:
        data: the rows.
        config: how many of them are also asked of the policy, and how long it may be.
        renderer: of the policy.
        recorder: told of each sample and of each evaluation.
    """

    def __init__(
        self, data: DataSet, config: SFTConfig, renderer: Renderer, recorder: Recorder
    ) -> None:
        self._rows = data.rows
        self._sampled = drawn(data.rows, config.evaluation.samples)
        self._max_seq_len = config.model.max_seq_len
        self._renderer = renderer
        self._recorder = recorder
        self._losses: set[str | None] = set()
        """The kinds of errors that samples failed by."""

    @property
    def asks_the_policy(self) -> bool:
        """Whether the policy must be published to be evaluated."""
        return bool(self._sampled)

    async def evaluate(self, trainer: Scorer, sampler: Sampler, look: Look) -> EvaluationRow:
        """Score all rows, sample some, record both.

        Args:
            trainer: whose current weights are asked.
            sampler: serves the same.
            look: which weights they are.
        """
        began = anyio.current_time()
        loss = await held_out_loss(trainer, self._rows, key=f"{HELD_OUT}-{look.key}")
        attempts = await self._attempts(sampler, look.policy_version)
        row = evaluation_row(
            EvaluationFacts(
                set=HELD_OUT,
                update=look.update,
                policy_version=look.policy_version,
                groups=[_group(attempt, look.policy_version) for attempt in attempts],
                solved_at=1.0,
                at=time.time(),
                seconds=anyio.current_time() - began,
                policy=look.policy,
            )
        )
        row = replace(row, loss=loss.mean, row_losses=loss.rows)
        self._recorder.evaluation(row)
        return row

    async def _attempts(self, sampler: Sampler, policy_version: int) -> list[Attempt]:
        """All samples, in their rows' order."""
        attempts: dict[int, Attempt] = {}
        limiter = anyio.CapacityLimiter(AT_ONCE)

        async def sample(place: int) -> None:
            async with limiter:
                attempts[place] = await self._attempt(place, sampler, policy_version)
            self._attempt_ended(attempts[place])

        async with open_group() as group:
            for place in range(len(self._sampled)):
                group.start_soon(sample, place)
        return [attempts[place] for place in sorted(attempts)]

    def _attempt_ended(self, attempt: Attempt) -> None:
        """Tell of it, and of the first that fails in each way; transcripts have all of them."""
        self._recorder.attempt_ended(attempt, HELD_OUT)
        lost = attempt.discarded
        if lost is not None and lost.exception not in self._losses:
            self._losses.add(lost.exception)
            self._recorder.note(
                "warning",
                f"the sample of {attempt.task} is {lost.fate}: {lost.detail}; more of this kind "
                "are only counted, and told in their transcripts",
            )

    async def _attempt(self, place: int, sampler: Sampler, policy_version: int) -> Attempt:
        name, asked = self._sampled[place]
        began = anyio.current_time()
        ended = partial(
            Attempt,
            group=place,
            index=0,
            task=name,
            metadata={"expected": expected(asked.said)},
            started_at=time.time(),
        )
        sampled = await caught(partial(self._sample, asked, sampler, policy_version))
        if isinstance(sampled, EngineDied):
            raise sampled
        if isinstance(sampled, Exception):  # a model call that failed for good, as in any attempt
            lost = Discarded(Fate.FAILED, told("sampling", sampled), type(sampled).__name__)
            return ended(discarded=lost, timing=Timing(sampling=anyio.current_time() - began))
        parsed = self._renderer.parse(sampled.ids, asked.tools or None)
        finish = "tool_calls" if parsed.tool_calls else sampled.stop
        return ended(
            reward=float(says(parsed, asked.said)),
            trajectory=Trajectory((Turn(asked.prompt_ids, sampled),)),
            calls=(
                Call(MAIN, asked.messages, asked.tools, reply_message(parsed), finish, "first", 0),
            ),
            timing=Timing(sampling=anyio.current_time() - began),
        )

    async def _sample(self, asked: Asked, sampler: Sampler, policy_version: int) -> SampledTokens:
        room = self._max_seq_len - len(asked.prompt_ids)
        params = SampleParams(
            max_tokens=min(len(asked.said_ids) + SLACK, room),
            temperature=0.0,
            stop_token_ids=self._renderer.stop_token_ids,
        )
        (sampled,) = await sampler.sample(
            asked.prompt_ids, params, min_policy_version=policy_version
        )
        return sampled


def _summed(datum: Datum, logprobs: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
    assert datum.weights is not None, "a supervised datum has weights"
    is_trained = datum.weights > 0
    return -float((datum.weights[is_trained] * logprobs[is_trained]).sum(dtype=np.float64))


def expected(said: Message) -> str:
    """What the row has there, for whoever reads the transcript."""
    calls = cast(Sequence[Mapping[str, Mapping[str, object]]], said.get("tool_calls") or ())
    told = [
        f"{call['function']['name']}({call['function'].get('arguments', '')})" for call in calls
    ]
    return " ".join([text_of(said.get("content")) or "", *told]).strip()


def _group(attempt: Attempt, policy_version: int) -> Group:
    return Group(
        serial=attempt.group,
        task=attempt.task,
        task_index=attempt.group,
        source=attempt.task,
        epoch=0,
        policy_version=policy_version,
        attempts=(attempt,),
    )
