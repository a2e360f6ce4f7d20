"""Sampling: many jobs of many completions, decoded as merged batches.

Each distinct prompt of a batch is read once and its memory repeated for all completions that
begin with it. Rows that have ended are dropped once enough of them have. A batch is bounded by
the memory its rows may come to need; what doesn't fit waits for the next one. A completion is
the same, but for rounding, whatever shares its batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from loops_cookbook.local.context import Context
from loops_cookbook.local.draw import Draws, RowSettings, UniformNoise
from loops_cookbook.local.errors import NotFinite
from loops_cookbook.local.memory import (
    cached_token_bytes,
    lendable_bytes,
    scored_position_bytes,
)
from loops_cookbook.local.model import Policy
from loops_cookbook.local.requests import Completion, SampleJob
from loops_cookbook.local.text import Decode, ends_in_stop

DROP_BELOW = 0.75
"""Ended rows are dropped when the share of rows still going falls to this: dropping copies the
memory of those that stay, so it does not pay for a few."""


@dataclass(slots=True)
class _Draft:
    """One completion while it is being sampled."""

    job: SampleJob
    place: int
    """Which of its job's completions it is."""
    limit: int
    """Tokens it may have: the job's, or what the window leaves."""
    seed: int
    stop_ids: frozenset[int]
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    ended: Literal["stop", "length"] | None = None

    def take(self, token: int, logprob: float, decode: Decode) -> None:
        """Append one token and see whether it ends the completion."""
        if not math.isfinite(logprob):
            raise NotFinite(
                f"a sampled token has logprob {logprob}: the weights have run away, so begin "
                "again from a checkpoint or with a lower learning_rate"
            )
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids or ends_in_stop(self.ids, self.job.stop, decode):
            self.ended = "stop"
        elif len(self.ids) == self.limit:
            self.ended = "length"

    def finished(self, decode: Decode) -> Completion:
        """What was sampled."""
        assert self.ended is not None
        return Completion(self.ids, self.logprobs, self.ended, decode(self.ids))


class Sampler:
    """Samples from a policy with the weights that it holds at the call.

    Args:
        policy: the model.
        decode: ids to text.
        max_seq_len: the window; a completion that fills it ends as `length`.
        seed: of the jobs that bring none.
        memory_bytes: what the rows of one batch may need; None: what the device can lend.
    """

    def __init__(
        self,
        policy: Policy,
        decode: Decode,
        *,
        max_seq_len: int,
        seed: int,
        memory_bytes: int | None = None,
    ) -> None:
        self._policy = policy
        self._decode = decode
        self._max_seq_len = max_seq_len
        self._seeds = np.random.default_rng(seed)
        self._memory_bytes = memory_bytes
        self._noise = UniformNoise()
        self._token_bytes = cached_token_bytes(policy.module.config, policy.dtype)
        self._row_bytes = scored_position_bytes(policy.vocab_size)

    @torch.no_grad()
    def sample(self, jobs: Sequence[SampleJob]) -> list[list[Completion]]:
        """Every job's completions, in order.

        Raises:
            NotFinite: the weights hold numbers that are not finite.
        """
        drafts = [self._drafts(job) for job in jobs]
        for batch in self._batches([draft for job in drafts for draft in job]):
            self._decode_batch(batch)
        return [[draft.finished(self._decode) for draft in job] for job in drafts]

    def _drafts(self, job: SampleJob) -> list[_Draft]:
        seed = int(self._seeds.integers(2**63)) if job.seed is None else job.seed
        limit = min(job.max_tokens, self._max_seq_len - len(job.prompt_ids))
        gives_none = not job.stop and not job.stop_token_ids
        stop_ids = self._policy.eos_ids if gives_none else frozenset(job.stop_token_ids)
        return [_Draft(job, place, limit, seed, stop_ids) for place in range(job.n)]

    def _batches(self, drafts: Sequence[_Draft]) -> list[list[_Draft]]:
        """Split by memory, rows of like length together so that little is padded."""
        budget = self._memory_bytes or lendable_bytes(self._policy.device)
        batches: list[list[_Draft]] = []
        prompt = room = 0
        for draft in sorted(drafts, key=lambda draft: (len(draft.job.prompt_ids), draft.limit)):
            prompt, room = len(draft.job.prompt_ids), max(room, draft.limit)
            cost = (prompt + room) * self._token_bytes + self._row_bytes
            if not batches or (len(batches[-1]) + 1) * cost > budget:
                batches.append([])
                room = draft.limit
            batches[-1].append(draft)
        return batches

    def _decode_batch(self, drafts: list[_Draft]) -> None:
        """Decode drafts until each has ended."""
        places: dict[tuple[int, ...], int] = {}
        prompt_of = [
            places.setdefault(tuple(draft.job.prompt_ids), len(places)) for draft in drafts
        ]
        draws = self._draws(drafts)
        context = Context(self._policy, list(places), room=max(draft.limit for draft in drafts))
        logits = context.read()
        if len(places) < len(drafts):
            rows = self._index(prompt_of)
            context.keep(rows)
            logits = logits[rows]
        step = 0
        while True:
            tokens, logprobs = draws.draw(logits, step)
            for draft, token, logprob in zip(
                drafts, tokens.tolist(), logprobs.tolist(), strict=True
            ):
                if draft.ended is None:
                    draft.take(token, logprob, self._decode)
            going = [row for row, draft in enumerate(drafts) if draft.ended is None]
            if not going:
                return
            if len(going) <= DROP_BELOW * len(drafts):
                drafts = [drafts[row] for row in going]
                rows = self._index(going)
                context.keep(rows)
                draws.keep(rows)
                tokens = tokens[rows]
            logits = context.extend(tokens)
            step += 1

    def _draws(self, drafts: Sequence[_Draft]) -> Draws:
        uniforms = np.zeros((len(drafts), max(draft.limit for draft in drafts)), np.float32)
        for row, draft in enumerate(drafts):
            uniforms[row, : draft.limit] = self._noise.draw(draft.seed, draft.place, draft.limit)
        settings = [
            RowSettings(draft.job.temperature, draft.job.top_p, draft.job.top_k) for draft in drafts
        ]
        return Draws(settings, uniforms, self._policy.device)

    def _index(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor(rows, device=self._policy.device)
