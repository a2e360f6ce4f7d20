"""Sampling: jobs come at any time, and each step draws one more token of all that are under way.

Jobs begin in the order in which they came, as soon as their rows fit into memory; large ones begin
part by part. Those that come while others are under way join them at the next step, and rows that
end make room at once. Jobs of other weights, and any jobs where the model's memory is not spans,
have batches of their own, which take turns. A completion is the same, but for rounding, whatever
else is sampled; where each job is taken alone, it is the same to the last bit.

A step that fails ends no job but one that had it for itself: the others begin again, alone.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from loops_cookbook.local.model import Policy
from loops_cookbook.local.requests import Sampled, SampleJob, Weights
from loops_cookbook.local.sampling.admission import Admission, Part
from loops_cookbook.local.sampling.batch import Batch
from loops_cookbook.local.sampling.context import Context
from loops_cookbook.local.sampling.drafts import Draft
from loops_cookbook.local.sampling.prefixes import Prefixes
from loops_cookbook.local.sampling.probe import try_spans
from loops_cookbook.local.sampling.prompt_scores import score_prompt
from loops_cookbook.local.sampling.reader import MOST_TOKENS, Reader, of_like_length
from loops_cookbook.local.sampling.room import room_for
from loops_cookbook.local.sampling.rows import Rows
from loops_cookbook.local.sampling.tickets import Outcome, Ticket
from loops_cookbook.local.text import Decode

logger = logging.getLogger(__name__)


class Sampler:
    """Samples from a policy.

    Args:
        policy: the model.
        decode: ids to text.
        max_seq_len: the window; a completion that fills it ends as `length`.
        seed: of the jobs that bring none.
        serving: puts the weights of a name in place for a `with` block; None: they always are.
        is_alone: take each job alone, and hold nothing from one to the next.
        memory_bytes: what sampling may take; None: what the device can lend.
    """

    def __init__(
        self,
        policy: Policy,
        decode: Decode,
        *,
        max_seq_len: int,
        seed: int,
        serving: Callable[[Weights], AbstractContextManager[None]] | None = None,
        is_alone: bool = False,
        memory_bytes: int | None = None,
    ) -> None:
        self._policy = policy
        self._decode = decode
        self._max_seq_len = max_seq_len
        self._seeds = np.random.default_rng(seed)
        self._serving = serving or (lambda _: nullcontext())
        self._is_alone = is_alone
        finding = try_spans(policy)
        logger.info("batches that jobs join, and prompts that they share: %s", finding)
        self._has_spans = finding.is_plain
        self.room = room_for(
            policy,
            is_shared=finding.is_plain,
            holds=finding.is_plain and not is_alone,
            lent_bytes=memory_bytes,
        )
        self._prefixes = Prefixes(self.room.held_tokens)
        self._admission = Admission(self.room)
        self._batches: list[Batch] = []

    @property
    def most_scored(self) -> int | None:
        """Tokens of a prompt that can be scored; None: any number."""
        return None if self._has_spans else self.room.most_scored

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return self._admission.is_idle

    def add(self, job: SampleJob) -> Ticket:
        """Queue a job, which `check_job` let through."""
        seed = int(self._seeds.integers(2**63)) if job.seed is None else job.seed
        limit = min(job.max_tokens, self._max_seq_len - len(job.prompt_ids))
        gives_none = not job.stop and not job.stop_token_ids
        stop_ids = self._policy.eos_ids if gives_none else frozenset(job.stop_token_ids)
        ticket = Ticket(job, seed, limit, stop_ids, self._is_alone)
        self._admission.add(ticket)
        return ticket

    def forget(self, weights: Weights) -> None:
        """These weights are others from now on. No job of theirs may be under way."""
        assert not any(batch.weights == weights for batch in self._batches)
        self._prefixes.forget(weights)

    def forget_idle(self, weights: Weights) -> bool:
        """Let go of these weights' prompts; False where a job of theirs is waiting or under way."""
        if self._admission.has(weights):
            return False
        self._prefixes.forget(weights)
        return True

    def forget_all(self) -> None:
        """All weights may be others from now on. No job may be under way."""
        assert not self._batches
        self._prefixes.forget_all()

    @torch.no_grad()
    def step(self) -> list[tuple[Ticket, Outcome]]:
        """Begin what fits, draw one more token for all that is under way, and tell what ended."""
        begun = self._admission.admit()
        named = [part.ticket.job.weights for part in begun]
        for weights in dict.fromkeys([batch.weights for batch in self._batches] + named):
            parts = [part for part in begun if part.ticket.job.weights == weights]
            try:
                with self._serving(weights):
                    self._advance(weights, parts)
            except Exception as error:  # a model may fail in any way, and others must go on
                self._begin_again(weights, error)
        self._batches = [batch for batch in self._batches if not batch.is_empty]
        return [(ticket, ticket.outcome(self._decode)) for ticket in self._admission.settle()]

    def sample(self, jobs: Sequence[SampleJob]) -> list[Sampled]:
        """What every job comes to, in order; nothing else may be under way.

        Raises:
            NotFinite: the weights hold numbers that are not finite.
        """
        tickets = [self.add(job) for job in jobs]
        outcomes: dict[Ticket, Outcome] = {}
        while not self.is_idle:
            outcomes.update(self.step())
        answers: list[Sampled] = []
        for outcome in (outcomes[ticket] for ticket in tickets):
            if isinstance(outcome, Exception):
                raise outcome
            answers.append(outcome)
        return answers

    def _advance(self, weights: Weights, parts: Sequence[Part]) -> None:
        """Begin parts and draw the next token, with these weights in place."""
        for ticket in dict.fromkeys(part.ticket for part in parts):
            self._score_prompt(ticket)
        starting = [draft for part in parts for draft in part.drafts if draft.is_going]
        for batch, drafts in self._with_batches(weights, starting):
            if drafts:
                batch.begin(drafts)
            batch.step()
            for draft, fault in batch.take_faults():
                self._admission.fail(draft, fault)

    def _with_batches(
        self, weights: Weights, starting: Sequence[Draft]
    ) -> list[tuple[Batch, Sequence[Draft]]]:
        """Every batch of some weights with the drafts that are to begin in it."""
        running = [batch for batch in self._batches if batch.weights == weights]
        if self._has_spans:
            if not running:
                reader = Reader(self._policy, self._prefixes, weights)
                running = [self._open(Rows(self._policy, reader), weights)]
            return [(running[0], starting)]
        waiting: list[tuple[Batch, Sequence[Draft]]] = [(batch, ()) for batch in running]
        prompts = dict.fromkeys(draft.prompt for draft in starting)
        for together in of_like_length(prompts, len):
            drafts = [draft for draft in starting if draft.prompt in set(together)]
            waiting.append((self._open(Context(self._policy), weights), drafts))
        return waiting

    def _open(self, memory: Rows | Context, weights: Weights) -> Batch:
        batch = Batch(memory, weights, self._decode, self._policy.device)
        self._batches.append(batch)
        return batch

    def _score_prompt(self, ticket: Ticket) -> None:
        top = ticket.job.prompt_logprobs
        if top is None or ticket.prompt_scores is not None:
            return
        at_once = min(MOST_TOKENS, max(1, self.room.most_scored)) if self._has_spans else None
        try:
            ticket.prompt_scores, span = score_prompt(
                self._policy, ticket.prompt, top, at_once=at_once
            )
        except Exception as error:  # nobody else's
            ticket.fail(error)
        else:
            if span is not None:
                self._prefixes.hold(ticket.job.weights, ticket.prompt, span)

    def _begin_again(self, weights: Weights, error: Exception) -> None:
        self._batches = [batch for batch in self._batches if batch.weights != weights]
        again = self._admission.begin_again(weights, error)
        if again:
            logger.warning("%d jobs begin again, each alone: %s", len(again), error)
