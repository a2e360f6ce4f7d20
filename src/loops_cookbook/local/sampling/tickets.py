"""A job while it is sampled: which of its completions have begun, and what it comes to."""

from dataclasses import dataclass, field
from typing import TypeAlias

from loops_cookbook.local.requests import PromptScores, Sampled, SampleJob
from loops_cookbook.local.sampling.drafts import Draft
from loops_cookbook.local.sampling.draw import RowSettings, UniformNoise
from loops_cookbook.local.text import Decode

Outcome: TypeAlias = Sampled | Exception


@dataclass(slots=True, eq=False)
class Ticket:
    """A job on its way; whoever asked for it keeps this to know the outcome by."""

    job: SampleJob
    seed: int
    limit: int
    """Tokens of a completion: what the job asks for, or what the window leaves."""
    stop_ids: frozenset[int]
    is_alone: bool
    """Nothing else may be under way with it."""
    drafts: list[Draft] = field(default_factory=list[Draft])
    """Completions that have begun."""
    prompt_scores: PromptScores | None = None
    fault: Exception | None = None
    is_left: bool = False
    """Nobody waits for it any more."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its ids."""
        return tuple(self.job.prompt_ids)

    @property
    def waiting(self) -> int:
        """How many completions have yet to begin."""
        return 0 if self.is_left or self.fault else self.job.n - len(self.drafts)

    @property
    def is_ended(self) -> bool:
        """Whether there is nothing more to do."""
        return not (self.waiting or any(draft.is_going for draft in self.drafts))

    def begin(self, count: int, noise: UniformNoise) -> list[Draft]:
        """Let some more completions begin."""
        job, first = self.job, len(self.drafts)
        settings = RowSettings(job.temperature, job.top_p, job.top_k)
        drafts = [
            Draft(
                job, self.prompt, self.limit, self.stop_ids, settings,
                noise.draw(self.seed, place, self.limit),
            )
            for place in range(first, first + count)
        ]  # fmt: skip
        self.drafts += drafts
        return drafts

    def begin_again(self) -> None:
        """Let all completions begin anew, and alone."""
        for draft in self.drafts:
            draft.is_left = True
        self.drafts = []
        self.is_alone = True

    def leave(self) -> None:
        """Nobody waits for it any more: it ends at the next step, and nothing is told of it."""
        self.is_left = True
        for draft in self.drafts:
            draft.is_left = True

    def fail(self, fault: Exception) -> None:
        """End it with a fault."""
        self.leave()
        self.is_left, self.fault = False, fault

    def outcome(self, decode: Decode) -> Outcome:
        """What it has come to."""
        if self.fault is not None:
            return self.fault
        return Sampled([draft.finished(decode) for draft in self.drafts], self.prompt_scores)
