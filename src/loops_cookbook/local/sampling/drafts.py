"""A completion while it is sampled: what it has so far, and what ends it."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from loops_cookbook.local.errors import NotFinite
from loops_cookbook.local.requests import Completion, SampleJob
from loops_cookbook.local.sampling.draw import RowSettings
from loops_cookbook.local.text import Decode, ends_in_stop


@dataclass(slots=True, eq=False)
class Draft:
    """One completion of a job."""

    job: SampleJob
    prompt: tuple[int, ...]
    limit: int
    """Tokens it may have: the job's, or what the window leaves."""
    stop_ids: frozenset[int]
    settings: RowSettings
    uniforms: npt.NDArray[np.float32]
    """float32[limit], what each of its tokens is drawn with."""
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    ended: Literal["stop", "length"] | None = None
    is_left: bool = False
    """Nobody waits for it any more."""

    @property
    def is_going(self) -> bool:
        """Whether another token is wanted."""
        return self.ended is None and not self.is_left

    def take(self, token: int, logprob: float, decode: Decode) -> None:
        """Append one token and see whether it ends the completion.

        Raises:
            NotFinite: the logprob is no number.
        """
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
